"""Playing schedules: against closed forms, against the whole playing, and against the rows themselves."""

import random

import numpy as np
import pytest

from trainwright.plan import pipeline
from trainwright.plan.cores import Cores, shared_makespan
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.schedule import SCHEDULES, Act, Rows


def brute_force(rows: Rows, vpp: int, forward: list[float], backward: list[float], send: float) -> float:
    """An independent playing: repeat over all acts until no start moves (longest path by relaxation)."""
    pp, last = len(rows), len(rows) * vpp - 1
    end: dict[tuple[int, Act], float] = {}
    changed = True
    while changed:
        changed = False
        for rank, row in enumerate(rows):
            free = 0.0
            for act in row:
                stage = act.chunk * pp + rank
                start = free
                ahead = stage - 1 if act.kind == "F" else stage + 1
                if 0 <= ahead <= last:
                    key = (ahead % pp, Act(act.kind, act.microbatch, ahead // pp))
                    start = max(start, end.get(key, 0.0) + send)
                if act.kind == "B" and stage == last:
                    start = max(start, end.get((rank, Act("F", act.microbatch, act.chunk)), 0.0))
                finish = start + (forward if act.kind == "F" else backward)[stage]
                if end.get((rank, act)) != finish:
                    end[rank, act] = finish
                    changed = True
                free = finish
    return max(end.values())


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 9), (8, 40), (16, 16)])
def test_1f1b_of_equal_stages_takes_m_plus_p_minus_1_rounds(pp: int, microbatches: int) -> None:
    seconds = pipeline.makespan("1f1b", pp, 1, microbatches, [1.0] * pp, [2.0] * pp, 0.0)
    assert seconds == pytest.approx((microbatches + pp - 1) * 3.0, rel=1e-12)


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (4, 4, 32), (8, 2, 16)])
def test_interleaving_divides_the_bubble(pp: int, vpp: int, microbatches: int) -> None:
    stages = pp * vpp
    seconds = pipeline.makespan("interleaved_1f1b", pp, vpp, microbatches, [1.0] * stages, [2.0] * stages, 0.0)
    assert seconds == pytest.approx((microbatches * vpp + pp - 1) * 3.0, rel=1e-12)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_playing_equals_relaxation_over_the_rows(schedule: str) -> None:
    draw = random.Random(schedule)
    for _ in range(20):
        pp = draw.choice([2, 3, 4])
        vpp = draw.choice([2, 3]) if schedule == "interleaved_1f1b" else 1
        microbatches = pp * draw.choice([1, 2, 3]) if vpp > 1 else draw.choice([1, 2, 5, 7])
        forward = [draw.uniform(0.5, 2.0) for _ in range(pp * vpp)]
        backward = [draw.uniform(0.5, 4.0) for _ in range(pp * vpp)]
        send = draw.choice([0.0, 0.3])
        played = pipeline.makespan(schedule, pp, vpp, microbatches, forward, backward, send)
        rows = SCHEDULES[schedule](pp, vpp, microbatches)
        assert played == pytest.approx(brute_force(rows, vpp, forward, backward, send), rel=1e-12)


def test_extrapolated_rounds_equal_the_whole_playing(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    cases = []
    for _ in range(150):
        pp = draw.choice([2, 4, 8])
        vpp = draw.choice([1, 2, 3])
        schedule = "1f1b" if vpp == 1 else "interleaved_1f1b"
        microbatches = pp * draw.choice([5, 8, 11]) + (draw.choice([0, 1]) if vpp == 1 else 0)
        # Stages differ as they do where layers don't divide: one holds less, the last has the loss.
        forward = [draw.choice([1.0, 1.0, 1.14, 0.86]) for _ in range(pp * vpp)]
        forward[-1] *= draw.uniform(1.0, 1.4)
        backward = [2.0 * each for each in forward]
        cases.append((schedule, pp, vpp, microbatches, forward, backward, draw.choice([0.0, 0.02])))
    short = [pipeline.makespan(*case) for case in cases]
    monkeypatch.setattr(pipeline, "FIRST_ROUNDS", 10**6)
    whole = [pipeline.makespan(*case) for case in cases]
    np.testing.assert_allclose(short, whole, rtol=1e-9)


def test_bounds_are_below_and_reached_by_equal_stages() -> None:
    draw = random.Random(1)
    for _ in range(40):
        pp, vpp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2])
        vpp = 1 if pp == 1 else vpp
        schedule = "1f1b" if vpp == 1 else "interleaved_1f1b"
        microbatches = pp * draw.choice([1, 2, 6])
        equal = draw.choice([True, False])
        forward = [1.0 if equal else draw.uniform(0.5, 2) for _ in range(pp * vpp)]
        backward = [2.0 * each for each in forward]
        send = 0.0 if equal else 0.1
        played = pipeline.makespan(schedule, pp, vpp, microbatches, forward, backward, send)
        bound = pipeline.bounds(
            pp, vpp, microbatches, np.array([forward]), np.array([backward]), np.array([send])
        )[0]
        assert bound <= played * (1 + 1e-12)
        if equal:
            assert bound == pytest.approx(played, rel=1e-12)


@pytest.mark.parametrize(("pp", "microbatches"), [(4, 2), (4, 4), (4, 40), (8, 64)])
def test_1f1b_holds_at_most_pp_minus_rank(pp: int, microbatches: int) -> None:
    held = pipeline.in_flight("1f1b", pp, 1, microbatches)
    assert [sum(chunks) for chunks in held] == [min(microbatches, pp - rank) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_more_microbatches_do_not_hold_more(pp: int, vpp: int) -> None:
    """in_flight plays two rounds; the rows of many rounds hold the same."""
    rows = SCHEDULES["interleaved_1f1b"](pp, vpp, 6 * pp)
    for rank, row in enumerate(rows):
        held = most = 0
        for act in row:
            held += 1 if act.kind == "F" else -1
            most = max(most, held)
        assert sum(pipeline.in_flight("interleaved_1f1b", pp, vpp, 6 * pp)[rank]) == most


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_rows_do_every_act_once(schedule: str) -> None:
    vpp = 2 if schedule == "interleaved_1f1b" else 1
    rows = SCHEDULES[schedule](4, vpp, 8)
    wanted = {Act(kind, m, c) for kind in ("F", "B") for m in range(8) for c in range(vpp)}
    for row in rows:
        assert len(row) == len(wanted)
        assert set(row) == wanted


def test_interleaving_wants_a_multiple_of_pp() -> None:
    with pytest.raises(InvalidSpec, match="multiple of pp=4"):
        SCHEDULES["interleaved_1f1b"](4, 2, 6)


def test_enough_cores_change_nothing_and_one_core_does_all_work_in_turn() -> None:
    forward, backward = [1.0, 1.5, 1.0, 2.0], [2.0, 2.5, 2.0, 3.0]
    shape = ("1f1b", 4, 1, 6, forward, backward, 0.1)
    alone = pipeline.makespan(*shape)
    assert shared_makespan(*shape, Cores(1, 4, 1.0)) == pytest.approx(alone)
    work = 6 * (sum(forward) + sum(backward))
    on_one = shared_makespan("1f1b", 4, 1, 6, forward, backward, 0.0, Cores(1, 1, 1.0))
    assert on_one == pytest.approx(work)
    on_two = shared_makespan("1f1b", 4, 1, 6, forward, backward, 0.0, Cores(1, 2, 1.0))
    assert max(work / 2, pipeline.makespan("1f1b", 4, 1, 6, forward, backward, 0.0)) <= on_two < work


def test_ranks_in_step_share_cores_by_their_number() -> None:
    """Four data-parallel ranks on two cores: compute takes twice as long, communication as long as before."""
    seconds = shared_makespan("1f1b", 1, 1, 3, [1.0], [2.0], 0.0, Cores(4, 2, 0.75))
    assert seconds == pytest.approx(3 * 3.0 * (0.75 * 2 + 0.25))


def test_a_billion_microbatches_take_no_longer_to_predict() -> None:
    for schedule in ("1f1b", "gpipe"):
        seconds = pipeline.makespan(schedule, 4, 1, 10**9, [1.0] * 4, [2.0] * 4, 0.0)
        assert seconds == pytest.approx(3.0 * (10**9 + 3))
    shared = shared_makespan("1f1b", 4, 1, 10**9, [1.0] * 4, [2.0] * 4, 0.0, Cores(1, 2, 1.0))
    assert shared == pytest.approx(3.0 * 10**9 * 2, rel=1e-6)
