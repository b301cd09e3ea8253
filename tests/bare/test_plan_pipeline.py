"""Playing schedules: against closed forms, against the whole playing, and against the rows themselves."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainwright.plan.bounds import bounds
from trainwright.plan.cores import Cores, shared_makespan
from trainwright.plan.holding import holdings
from trainwright.plan.pipeline import Pipe, makespan, timeline
from trainwright.plan.repetition import steady_of
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.schedule import SCHEDULES, Act, Rows, Schedule
from trainwright.spec.schedules.acts import alternated, looped

CHUNKS = {
    "interleaved_1f1b": (2, 3, 4),
    "breadth_first": (2, 3),
    "zb_v": (2,),
    "dualpipe": (2,),
    "dualpipe_v": (2,),
}


def plain(schedule: str, pp: int, vpp: int, microbatches: int, **fields: Any) -> Pipe:
    """Forward takes a second, backward two, half of it for the weights."""
    ones = [1.0] * SCHEDULES[schedule].num_stages(pp, vpp)
    return Pipe(
        schedule,
        pp,
        vpp,
        microbatches,
        **({"forward_s": ones, "input_s": ones, "weight_s": ones, "send_s": 0} | fields),
    )


def drawn(schedule: str, draw: random.Random, most_pp: int, rounds: list[int]) -> Pipe:
    """A pipe of random size and seconds that the schedule accepts."""
    described = SCHEDULES[schedule]
    while True:
        pp, vpp = draw.randint(1, most_pp), draw.choice(CHUNKS.get(schedule, (1,)))
        microbatches = pp * draw.choice(rounds) + draw.choice([0, 0, draw.randrange(pp)])
        try:
            described.check(pp, vpp, microbatches)
        except InvalidSpec:
            continue
        break
    # Stages are equal, or differ as they do where layers don't divide, or anyhow.
    draw_s = draw.choice(
        [lambda: 1.0, lambda: draw.choice([1.0, 1.0, 1.14, 0.86]), lambda: draw.uniform(0.2, 2.0)]
    )
    forward, inputs, weights = ([draw_s() for _ in range(described.num_stages(pp, vpp))] for _ in range(3))
    forward[-1] *= draw.choice([1.0, draw.uniform(1.0, 1.4)])
    return Pipe(
        schedule,
        pp,
        vpp,
        microbatches,
        forward,
        inputs,
        weights,
        send_s=draw.choice([0.0, 0.02, 0.3, 1.5]),
        blocking_sends=draw.choice([False, True]),
        forward_ep_s=[draw.random() * each for each in forward],
        backward_ep_s=[draw.random() * each for each in inputs],
        pair_hides=draw.choice([0.0, 0.6, 1.0]),
    )


def brute_force(pipe: Pipe) -> dict[tuple[int, Act], tuple[float, float]]:
    """An independent playing: repeat over all acts until no start moves (longest path by relaxation). Starts and
    ends by rank and act."""
    described = SCHEDULES[pipe.schedule]
    rows = described.rows(pipe.pp, pipe.vpp, pipe.num_microbatches)
    stages, last = described.stages(pipe.pp, pipe.vpp), described.num_stages(pipe.pp, pipe.vpp) - 1
    at = {
        (act.kind == "F", act.microbatch, stages[rank][act.chunk]): (rank, act)
        for rank, row in enumerate(rows)
        for act in row
        if act.kind != "W"
    }
    seconds = {
        "F": pipe.forward_s,
        "I": pipe.input_s,
        "W": pipe.weight_s,
        "B": np.add(pipe.input_s, pipe.weight_s).tolist(),
    }

    def neighbour(rank: int, act: Act, way: int) -> tuple[int, Act] | None:
        """The act that `act` waits for (way -1) or that waits for it (way 1), where it is another rank's."""
        stage = stages[rank][act.chunk] + (way if act.kind == "F" else -way)
        if act.kind == "W" or not 0 <= stage <= last:
            return None
        return at[act.kind == "F", act.microbatch, stage]

    def took(rank: int, turn: tuple[Act, ...]) -> float:
        alone = sum(seconds[act.kind][stages[rank][act.chunk]] for act in turn)
        if len(turn) == 1:
            return alone
        forward, backward = (stages[rank][act.chunk] for act in turn)
        communication = pipe.forward_ep_s[forward] + pipe.backward_ep_s[backward]
        return alone - pipe.pair_hides * min(communication, alone - communication)

    times: dict[tuple[int, Act], tuple[float, float]] = {}
    changed, passes = True, 0
    while changed:
        changed, passes = False, passes + 1
        assert passes <= sum(map(len, rows)) + 1, "the rows wait for one another in a circle"
        for rank, row in enumerate(rows):
            free, place = 0.0, 0
            while place < len(row):
                turn = row[place : place + 1 + row[place].paired]
                place += len(turn)
                start, sends = free, False
                for act in turn:
                    before = neighbour(rank, act, -1)
                    if before:
                        way = pipe.send_s if before[0] != rank else 0.0
                        start = max(start, times.get(before, (0.0, 0.0))[1] + way)
                    after = neighbour(rank, act, 1)
                    sends |= after is not None and after[0] != rank
                end = start + took(rank, turn)
                free = end + (pipe.send_s if sends and pipe.blocking_sends else 0.0)
                changed |= any(times.get((rank, act)) != (start, end) for act in turn)
                times |= {(rank, act): (start, end) for act in turn}
    return times


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 1), (2, 5), (4, 4), (4, 9), (8, 40), (16, 16)])
def test_1f1b_of_equal_stages_takes_m_plus_p_minus_1_rounds(pp: int, microbatches: int) -> None:
    assert makespan(plain("1f1b", pp, 1, microbatches)) == pytest.approx((microbatches + pp - 1) * 3.0, rel=1e-12)


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (4, 4, 32), (8, 2, 16)])
def test_interleaving_divides_the_bubble(pp: int, vpp: int, microbatches: int) -> None:
    seconds = makespan(plain("interleaved_1f1b", pp, vpp, microbatches))
    assert seconds == pytest.approx((microbatches * vpp + pp - 1) * 3.0, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_playing_equals_relaxation_over_the_rows(schedule: str) -> None:
    draw = random.Random(schedule)
    for _ in range(40):
        pipe = drawn(schedule, draw, 5, [1, 2, 3])
        times, played = brute_force(pipe), timeline(pipe)
        assert len(played) == len(times)
        stages = SCHEDULES[schedule].stages(pipe.pp, pipe.vpp)
        assert all(act.stage == stages[act.rank][act.act.chunk] for act in played)
        ours = [(act.start_s, act.end_s) for act in played]
        np.testing.assert_allclose(ours, [times[act.rank, act.act] for act in played], rtol=1e-12, atol=1e-12)
        assert makespan(pipe) == pytest.approx(max(end for _, end in times.values()), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skipped_rounds_equal_the_whole_playing(schedule: str) -> None:
    draw = random.Random(schedule)
    for _ in range(60):
        pipe = drawn(schedule, draw, 8, [5, 8, 11, 23])
        assert makespan(pipe) == pytest.approx(max(act.end_s for act in timeline(pipe)), rel=1e-9)


@pytest.mark.parametrize("schedule", sorted(name for name in SCHEDULES if not SCHEDULES[name].forwards_first))
def test_rows_of_four_rounds_repeat(schedule: str) -> None:
    """Or the test above would compare the whole playing with itself."""
    for pp in (2, 4, 8, 16):
        for vpp in CHUNKS.get(schedule, (1,)):
            steady = steady_of(schedule, pp, vpp, 4 * pp)
            assert steady is not None
            assert len(steady.places) >= 2


def test_a_slow_path_that_still_catches_up_is_no_repetition() -> None:
    """Rank 1 is a little slower than rank 0, whose lead grows for long until rank 0 waits for it."""
    pipe = plain("1f1b", 8, 1, 2000, forward_s=[1.0] * 7 + [1.001], send_s=0.5)
    assert makespan(pipe) == pytest.approx(max(act.end_s for act in timeline(pipe)), rel=1e-9)


def test_rows_whose_inputs_lie_several_rounds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r is 3 * (pp - 1 - r) forwards ahead of its backwards, so a gradient waits for rounds until it is used:
    what comes next depends on more than the last round."""

    def eager(pp: int, vpp: int, num_microbatches: int) -> Rows:
        forwards = [Act("F", m, 0) for m in range(num_microbatches)]
        backwards = [Act("B", m, 0) for m in range(num_microbatches)]
        return tuple(tuple(alternated(forwards, backwards, 3 * (pp - 1 - rank))) for rank in range(pp))

    monkeypatch.setitem(SCHEDULES, "eager", Schedule(eager, looped, SCHEDULES["1f1b"].check))
    steady = steady_of("eager", 4, 1, 64)
    assert steady is not None
    assert steady.reach == 3
    draw = random.Random(0)
    for _ in range(60):
        pipe = replace(drawn("eager", draw, 5, [20, 45]), pair_hides=0.0)
        assert makespan(pipe) == pytest.approx(max(act.end_s for act in timeline(pipe)), rel=1e-9)


NEAR = {
    "1f1b": 0.985,
    "interleaved_1f1b": 0.974,
    "gpipe": 0.954,
    "breadth_first": 0.945,
    "zb_h1": 0.982,
    "zb_v": 0.985,
    "dualpipe": 0.922,
    "dualpipe_v": 0.929,
}
"""What the bound over the makespan is on average, for the pipes below."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_are_below_and_near(schedule: str) -> None:
    draw = random.Random(schedule)
    ratios = []
    for _ in range(100):
        pipe = replace(drawn(schedule, draw, 8, [1, 2, 4, 9]), blocking_sends=False)
        forward_s, input_s, weight_s = (
            np.array([each] * 2) for each in (pipe.forward_s, pipe.input_s, pipe.weight_s)
        )
        bound = bounds(
            schedule,
            pipe.pp,
            pipe.vpp,
            pipe.num_microbatches,
            forward_s,
            input_s,
            weight_s,
            np.full(2, pipe.send_s),
            forward_ep_s=np.array([pipe.forward_ep_s] * 2),
            backward_ep_s=np.array([pipe.backward_ep_s] * 2),
            pair_hides=pipe.pair_hides,
        )
        assert bound[0] == bound[1] <= makespan(pipe) * (1 + 1e-12)
        ratios.append(bound[0] / makespan(pipe))
    assert np.mean(ratios) > NEAR[schedule]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_equal_stages_reach_the_bound(schedule: str) -> None:
    for pp in (1, 2, 4, 8):
        vpp = CHUNKS.get(schedule, (1,))[0]
        for microbatches in (pp, 2 * pp, 6 * pp):
            pipe = plain(schedule, pp, vpp, microbatches)
            ones = np.array([pipe.forward_s])
            bound = bounds(schedule, pp, vpp, microbatches, ones, ones, ones, np.zeros(1))
            assert bound[0] == pytest.approx(makespan(pipe), rel=1e-12)


def states_walked(row: tuple[Act, ...], vpp: int) -> set[tuple[int, ...]]:
    """Of every turn of a row with a backward what is held while it runs, whose backward it is, which chunks have
    gradients while it runs and after, which stay gathered, and whose weight gradient runs. A pair is one turn:
    what its forward makes and what its backward needs are there together."""
    whole, rest, seen, grown, there = [0] * vpp, [0] * vpp, set(), set(), set()
    place = 0
    while place < len(row):
        turn = row[place : place + 1 + row[place].paired]
        place += len(turn)
        for act in turn:
            whole[act.chunk] += act.kind == "F"
            there |= {act.chunk} if act.kind != "W" else set()
        # A weight gradient drops what it read, and has no working set.
        chunks = {act.chunk for act in turn if act.kind in "BI"}
        if any(act.kind != "F" for act in turn):
            after = grown | {act.chunk for act in turn if act.kind in "BW"}
            alone = {act.chunk for act in turn if act.kind == "W"}
            marks = (int(chunk in some) for some in (chunks, grown, after, there, alone) for chunk in range(vpp))
            seen.add((*whole, *rest, *marks))
            grown = after
        for act in turn:
            there -= {act.chunk} if act.kind in "BI" else set()
            whole[act.chunk] -= act.kind in "BI"
            rest[act.chunk] += {"I": 1, "W": -1}.get(act.kind, 0)
    assert not any(whole + rest)
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_holdings_are_the_states_that_no_other_exceeds(schedule: str) -> None:
    """As many microbatches as there are, though `holdings` looks at a few rounds."""
    draw = random.Random(schedule)
    for _ in range(40):
        pipe = drawn(schedule, draw, 8, [1, 2, 4, 7])
        shape = (pipe.pp, pipe.vpp, pipe.num_microbatches)
        for row, held in zip(SCHEDULES[schedule].rows(*shape), holdings(schedule, *shape), strict=True):
            walked, states = states_walked(row, pipe.vpp), [*map(tuple, held.tolist())]
            assert set(states) <= walked
            assert len(set(states)) == len(states)
            bytes_of = [draw.uniform(0, 3) for _ in range(7 * pipe.vpp)]
            # All states are below one that is kept, and no kept one is below another.
            for state in walked:
                above = [each for each in states if all(x >= y for x, y in zip(each, state, strict=True))]
                assert above == [state] if state in states else above
            peak, kept = (max(np.dot(each, bytes_of) for each in some) for some in (walked, states))
            assert kept == peak


@pytest.mark.parametrize(("pp", "microbatches"), [(4, 2), (4, 4), (4, 40), (8, 64)])
def test_1f1b_holds_at_most_pp_minus_rank(pp: int, microbatches: int) -> None:
    for rank, states in enumerate(holdings("1f1b", pp, 1, microbatches)):
        most = pp - rank
        if microbatches > most:
            assert states.tolist() == [[most, 0, 1, 1, 1, 1, 0]]
        else:  # The first backward, which finds no gradients, and the second.
            assert states.tolist() == [[microbatches, 0, 1, 0, 1, 1, 0], [microbatches - 1, 0, 1, 1, 1, 1, 0]]


def test_enough_cores_change_nothing_and_one_core_does_all_work_in_turn() -> None:
    seconds = {"forward_s": [1.0, 1.5, 1.0, 2.0], "input_s": [1.0, 1.5, 1.0, 2.0]}
    pipe = plain("1f1b", 4, 1, 6, **seconds, send_s=0.1)
    assert shared_makespan(pipe, Cores(1, 4, 1.0)) == pytest.approx(makespan(pipe))
    free = replace(pipe, send_s=0.0)
    work = 6 * (5.5 + 5.5 + 4.0)
    assert shared_makespan(free, Cores(1, 1, 1.0)) == pytest.approx(work)
    assert max(work / 2, makespan(free)) <= shared_makespan(free, Cores(1, 2, 1.0)) < work


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cores_enough_for_all_ranks_change_no_schedule(schedule: str) -> None:
    draw = random.Random(schedule)
    for _ in range(10):
        pipe = replace(drawn(schedule, draw, 6, [1, 2, 3]), blocking_sends=False)
        assert shared_makespan(pipe, Cores(1, 8, 1.0)) == pytest.approx(makespan(pipe), rel=1e-9)


def test_ranks_in_step_share_cores_by_their_number() -> None:
    """Four data-parallel ranks on two cores: compute takes twice as long, communication as long as before."""
    seconds = shared_makespan(plain("1f1b", 1, 1, 3), Cores(4, 2, 0.75))
    assert seconds == pytest.approx(3 * 3.0 * (0.75 * 2 + 0.25))


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_v", 2), ("dualpipe", 2)]
)
def test_a_billion_microbatches_take_no_longer_to_predict(schedule: str, vpp: int) -> None:
    few = makespan(plain(schedule, 4, vpp, 100))
    work = 3.0 * SCHEDULES[schedule].num_stages(4, vpp) / 4
    assert makespan(plain(schedule, 4, vpp, 10**9)) == pytest.approx(few + work * (10**9 - 100), rel=1e-12)


def test_a_billion_microbatches_on_few_cores() -> None:
    shared = shared_makespan(plain("1f1b", 4, 1, 10**9), Cores(1, 2, 1.0))
    assert shared == pytest.approx(3.0 * 10**9 * 2, rel=1e-6)


def test_an_endless_act_makes_an_endless_step() -> None:
    for schedule in ("1f1b", "gpipe"):
        pipe = plain(schedule, 2, 1, 400, send_s=float("inf"))
        assert makespan(pipe) == shared_makespan(pipe, Cores(1, 1, 1.0)) == float("inf")
