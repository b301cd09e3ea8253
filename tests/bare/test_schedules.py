"""Schedules as rows: every act once, in an order that ends; the papers' bubbles and peaks; PyTorch's own order."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.plan.holding import holdings
from trainwright.plan.pipeline import Pipe, Played, makespan, timeline
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.schedule import SCHEDULES, Act, Rows
from trainwright.spec.schedules.notation import written

CHUNKS = {
    "interleaved_1f1b": (2, 3, 8),
    "breadth_first": (2, 3),
    "zb_v": (2,),
    "dualpipe": (2,),
    "dualpipe_v": (2,),
}


def shapes(schedule: str, most_pp: int = 16) -> Iterator[tuple[int, int, int]]:
    """(pp, vpp, num_microbatches) of many sizes that the schedule accepts."""
    for pp in range(1, most_pp + 1):
        for vpp in CHUNKS.get(schedule, (1,)):
            for microbatches in sorted(
                {1, 2, 3, 5, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 2, 3 * pp, 5 * pp + 2}
            ):
                try:
                    SCHEDULES[schedule].check(pp, vpp, microbatches)
                except InvalidSpec:
                    continue
                yield pp, vpp, microbatches


def unit_pipe(schedule: str, pp: int, vpp: int, microbatches: int, **seconds: Any) -> Pipe:
    """Every act takes one second of each of its parts."""
    ones = [1.0] * SCHEDULES[schedule].num_stages(pp, vpp)
    given = {"forward_s": ones, "input_s": ones, "weight_s": ones, "send_s": 0.0} | seconds
    return Pipe(schedule, pp, vpp, microbatches, **given)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_do_every_act_once(schedule: str) -> None:
    checked = 0
    for pp, vpp, microbatches in shapes(schedule):
        described = SCHEDULES[schedule]
        rows, stages = described.rows(pp, vpp, microbatches), described.stages(pp, vpp)
        done = Counter(
            (part, act.microbatch, stages[rank][act.chunk])
            for rank, row in enumerate(rows)
            for act in row
            for part in ("IW" if act.kind == "B" else act.kind)
        )
        num_stages = described.num_stages(pp, vpp)
        assert len(rows) == pp
        assert set(done.values()) == {1}
        assert len(done) == 3 * microbatches * num_stages
        assert described.splits_backward or not any(act.kind in "IW" for row in rows for act in row)
        checked += 1
    assert checked >= 30


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_in_an_order_that_ends(schedule: str) -> None:
    """Ranks do their rows, each act when what it reads is there: F of the stage before; the same stage's own F and
    the backward of the stage after; the same stage's I."""
    for pp, vpp, microbatches in shapes(schedule):
        described = SCHEDULES[schedule]
        stages, last = described.stages(pp, vpp), described.num_stages(pp, vpp) - 1
        done: set[tuple[str, int, int]] = set()
        left = [list(row) for row in described.rows(pp, vpp, microbatches)]

        def reads(act: Act, stage: int, last: int) -> set[tuple[str, int, int]]:
            if act.kind == "F":
                return {("F", act.microbatch, stage - 1)} if stage else set()
            if act.kind == "W":
                return {("I", act.microbatch, stage)}
            after = {("I", act.microbatch, stage + 1)} if stage < last else set()
            return {("F", act.microbatch, stage), *after}

        while any(left):
            before = len(done)
            for held, row in zip(stages, left, strict=True):
                while row:
                    turn = row[: 1 + row[0].paired]
                    if not all(reads(act, held[act.chunk], last) <= done for act in turn):
                        break
                    del row[: len(turn)]
                    done |= {
                        ("I" if act.kind == "B" else act.kind, act.microbatch, held[act.chunk]) for act in turn
                    }
            assert len(done) > before, f"{schedule} {pp=} {vpp=} {microbatches=} waits in a circle"


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v"])
def test_pairs_are_a_forward_and_a_backward_of_other_microbatches(schedule: str) -> None:
    for pp, vpp, microbatches in shapes(schedule):
        for row in SCHEDULES[schedule].rows(pp, vpp, microbatches):
            paired = [act for act in row if act.paired]
            for forward, backward in zip(paired[::2], paired[1::2], strict=True):
                assert (forward.kind, backward.kind) == ("F", "B")
                assert (forward.chunk, forward.microbatch) != (backward.chunk, backward.microbatch)
                assert row.index(backward) == row.index(forward) + 1


def test_where_stages_lie() -> None:
    placed = {
        name: SCHEDULES[name].stages(4, 2) for name in ("interleaved_1f1b", "zb_v", "dualpipe", "dualpipe_v")
    }
    assert placed["interleaved_1f1b"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert placed["zb_v"] == placed["dualpipe_v"] == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert placed["dualpipe"] == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert [SCHEDULES[name].num_stages(4, 2) for name in placed] == [8, 8, 4, 8]


def test_dualpipe_sends_the_first_half_of_the_microbatches_down() -> None:
    for rank, row in enumerate(SCHEDULES["dualpipe"].rows(4, 2, 10)):
        assert {(act.chunk, act.microbatch < 5) for act in row} == {(0, True), (1, False)}, rank


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "microbatches", "message"),
    [
        (
            "1f1b",
            4,
            2,
            8,
            r"recipe\.schedule='1f1b': runs one chunk per rank; layout\.vpp=2 needs interleaved_1f1b",
        ),
        ("zb_h1", 4, 2, 8, r"recipe\.schedule='zb_h1': runs one chunk per rank"),
        ("interleaved_1f1b", 4, 1, 8, r"recipe\.schedule='interleaved_1f1b': needs layout\.vpp above 1; use 1f1b"),
        ("interleaved_1f1b", 4, 2, 6, r"num_microbatches=6: interleaved_1f1b needs a multiple of pp=4; change "),
        ("breadth_first", 4, 1, 8, r"recipe\.schedule='breadth_first': needs layout\.vpp above 1; use gpipe"),
        ("zb_v", 4, 3, 8, r"layout\.vpp=3: zb_v has two chunks per rank; set layout\.vpp=2"),
        ("dualpipe_v", 4, 2, 7, r"num_microbatches=7: dualpipe_v needs 2\*pp=8 or more; change "),
        ("dualpipe", 4, 2, 9, r"num_microbatches=9: dualpipe needs an even number, half of them for each way"),
        ("dualpipe", 3, 2, 8, r"layout\.pp=3: must be even: dualpipe goes through the pipe from both ends"),
    ],
)
def test_what_a_schedule_can_not_do(schedule: str, pp: int, vpp: int, microbatches: int, message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        SCHEDULES[schedule].check(pp, vpp, microbatches)


def test_rows_are_written_as_papers_draw_them() -> None:
    row = written([("F0 F1", 1), ("F1&B0", 1), ("I1 F0", 2), ("W", 1), ("W1", 1)])
    assert row == (
        Act("F", 0, 0),
        Act("F", 0, 1),
        Act("F", 1, 1, paired=True),
        Act("B", 0, 0, paired=True),
        Act("I", 0, 1),
        Act("F", 1, 0),
        Act("I", 1, 1),
        Act("F", 2, 0),
        Act("W", 0, 1),
        Act("W", 1, 1),
    )


def idle(played: tuple[Played, ...], rank: int, until_s: float) -> float:
    """Seconds up to `until_s` in which a rank does nothing; pairs count once."""
    return until_s - sum(
        end - start for start, end in {(act.start_s, act.end_s) for act in played if act.rank == rank}
    )


MANY = [(2, 8), (4, 8), (4, 24), (8, 16), (8, 48), (16, 64)]


@pytest.mark.parametrize(("pp", "microbatches"), MANY)
@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    [
        # arXiv:2104.04473 s2.2: (p - 1)(F + B), over v chunks per rank the v-th part of it (here F is a chunk's).
        ("gpipe", 1, lambda pp: 3 * (pp - 1)),
        ("1f1b", 1, lambda pp: 3 * (pp - 1)),
        ("interleaved_1f1b", 2, lambda pp: 3 * (pp - 1)),
        ("interleaved_1f1b", 4, lambda pp: 3 * (pp - 1)),
        ("breadth_first", 4, lambda pp: 3 * (pp - 1)),
        # arXiv:2401.10241 s2.3: (p - 1)(F + I - W).
        ("zb_h1", 1, lambda pp: pp - 1),
        # arXiv:2412.19437 table 2: (PP/2 - 1)(F&B + B - 3W); folded, over twice as many ranks.
        ("dualpipe", 2, lambda pp: 2 * (pp // 2 - 1)),
        ("dualpipe_v", 2, lambda pp: 2 * (pp - 1)),
    ],
)
def test_bubbles_of_the_papers(schedule: str, vpp: int, bubble: Any, pp: int, microbatches: int) -> None:
    pipe = unit_pipe(schedule, pp, vpp, microbatches)
    work = 3 * microbatches * SCHEDULES[schedule].num_stages(pp, vpp) / pp
    assert makespan(pipe) == pytest.approx(work + bubble(pp), rel=1e-12)


@pytest.mark.parametrize("pp", [4, 8, 16])
@pytest.mark.parametrize("hides", [0.2, 0.5, 1.0])
def test_bubble_of_dualpipe_whose_pairs_are_shorter(pp: int, hides: float) -> None:
    """As the paper's table has it, for F = I. Ranks in the middle, which both ways reach last, wait most."""
    half = [0.5] * pp
    pipe = unit_pipe("dualpipe", pp, 2, 4 * pp, forward_ep_s=half, backward_ep_s=half, pair_hides=hides)
    pair = 3 - hides
    played, whole_s = timeline(pipe), makespan(pipe)
    assert max(idle(played, rank, whole_s) for rank in range(pp)) == pytest.approx((pp / 2 - 1) * (pair + 2 - 3))


@pytest.mark.parametrize(("pp", "microbatches"), MANY)
def test_zb_v_has_no_bubble_between_a_ranks_first_and_last_act(pp: int, microbatches: int) -> None:
    """Which is what arXiv:2401.10241 s5 calls one; a step of all ranks is longer by how much later they begin."""
    pipe = unit_pipe("zb_v", pp, 2, microbatches)
    played = timeline(pipe)
    for rank in range(pp):
        acts = [act for act in played if act.rank == rank]
        assert acts[0].start_s == rank
        assert acts[-1].end_s - acts[0].start_s == 6 * microbatches
    assert makespan(pipe) == 6 * microbatches + pp - 1


def most_held(schedule: str, pp: int, vpp: int, microbatches: int) -> list[tuple[int, int]]:
    """Of each rank the most chunks' microbatches held whole, and held in any way."""
    states = holdings(schedule, pp, vpp, microbatches)
    return [(int(rank[:, :vpp].sum(axis=1).max()), int(rank[:, : 2 * vpp].sum(axis=1).max())) for rank in states]


@pytest.mark.parametrize(("pp", "microbatches"), [*MANY, (8, 3)])
def test_peaks_of_the_papers(pp: int, microbatches: int) -> None:
    def least(count: int) -> int:
        return min(count, microbatches)

    assert most_held("gpipe", pp, 1, microbatches) == [(microbatches,) * 2] * pp
    assert most_held("1f1b", pp, 1, microbatches) == [(least(pp - rank),) * 2 for rank in range(pp)]
    # With its weight gradients put off every rank holds as much as 1F1B's first.
    assert most_held("zb_h1", pp, 1, microbatches) == [(least(pp - rank), least(pp)) for rank in range(pp)]
    if microbatches >= 2 * pp:
        assert most_held("zb_v", pp, 2, microbatches) == [(2 * pp, 2 * pp)] * pp
        assert {whole for whole, _ in most_held("dualpipe_v", pp, 2, microbatches)} == {2 * pp + 1}
        if pp > 2:
            assert {whole for whole, _ in most_held("dualpipe", pp, 2, microbatches)} == {pp + 1}
    if microbatches % pp == 0:
        # arXiv:2205.05198 s4.2.3: 1 + (p - 1) / (p m) of what 1F1B's first rank holds.
        first = most_held("interleaved_1f1b", pp, 4, microbatches)[0][0]
        assert first == 4 * pp + pp - 1 if microbatches > pp else 4 * pp


def order_of_torch(
    schedule: str, pp: int, vpp: int, microbatches: int, rank: int
) -> list[list[tuple[str, int, int]]]:
    """PyTorch's turns of a rank: (kind, stage, microbatch)."""
    from torch.distributed.pipelining import schedules

    named: dict[str, Any] = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "breadth_first": schedules.ScheduleLoopedBFS,
        "zb_h1": schedules.ScheduleInterleavedZeroBubble,
        "zb_v": schedules.ScheduleZBVZeroBubble,
        "dualpipe_v": schedules.ScheduleDualPipeV,
    }
    settings = SimpleNamespace(
        pp_group_size=pp,
        num_stages=pp * vpp,
        n_local_stages=vpp,
        _stages=range(vpp),
        microbatches_per_round=pp,
        _n_microbatches=microbatches,
    )
    actions = named[schedule]._calculate_single_rank_operations(settings, rank)
    turns = [action.sub_actions or (action,) for action in actions if action is not None]
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [(kinds[one.computation_type.name], one.stage_index, one.microbatch_index) for one in turn]
        for turn in turns
    ]


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [("interleaved_1f1b", 3), ("breadth_first", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)],
)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 4), (2, 4), (4, 8), (4, 20), (8, 16)])
def test_rows_are_in_the_order_of_pytorch(schedule: str, vpp: int, pp: int, microbatches: int) -> None:
    pytest.importorskip("torch")
    rows: Rows = SCHEDULES[schedule].rows(pp, vpp, microbatches)
    stages = SCHEDULES[schedule].stages(pp, vpp)
    for rank, row in enumerate(rows):
        theirs = order_of_torch(schedule, pp, vpp, microbatches, rank)
        assert [act.paired for act in row] == [len(turn) > 1 for turn in theirs for _ in turn]
        ours = [(act.kind, stages[rank][act.chunk], act.microbatch) for act in row]
        assert ours == [one for turn in theirs for one in turn]
