"""Lower bounds of a pipeline's makespan, for many candidates at once and without playing.

A rank's row is done in order. So from any act on, the row takes its work up to a later act, at least; before, a
microbatch found its way to the first of them through the stages, and after, one finds it from the second to where
it ends. The bound is the longest such path, of every rank and a few acts that matter: a row's first act, its first
backward, its last forward, its last backward and its end. And a stage that lets only so many microbatches in
before the first of them is back takes their round trips one after another.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trainwright.plan.playing import rows_of, turns_of
from trainwright.plan.table import Floats, Ints
from trainwright.spec.schedule import SCHEDULES, Placement, Row, Rows

ENOUGH_ROUNDS = 4
"""Times pp microbatches, whose rows begin and end as every longer row does."""


def bounds(
    schedule: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward_s: Floats,
    input_s: Floats,
    weight_s: Floats,
    send_s: Floats,
    *,
    forward_ep_s: Floats | None = None,
    backward_ep_s: Floats | None = None,
    pair_hides: float = 0.0,
) -> Floats:
    """A lower bound of `makespan`, (candidates,), of acts' seconds (candidates, stages) and send_s (candidates,).

    They mean what they mean in a `Pipe`. 1F1B of equal stages and free sends reaches the bound.
    """
    shape = _shape(schedule, pp, vpp, num_microbatches)
    acts = np.concatenate([forward_s, input_s, weight_s], axis=1)
    work = acts @ shape.total.T - _hidden(
        shape, forward_s, input_s + weight_s, forward_ep_s, backward_ep_s, pair_hides
    )
    paths = _Paths(shape, forward_s, input_s, weight_s, send_s)
    starts = [
        paths.to_forward[:, shape.first_act],
        paths.to_backward[:, shape.first_backward] - acts @ shape.before_backward.T,
    ]
    stops = [
        np.zeros(1),
        paths.from_forward[:, shape.last_forward] - acts @ shape.after_forward.T,
        paths.from_backward[:, shape.last_backward] - acts @ shape.after_backward.T,
    ]
    # Where all backwards come last, the way from the first of them to the last forward is none.
    bound = np.where(shape.turns_back, starts[1] + work + stops[1], 0.0)
    for start, stop in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
        bound = np.maximum(bound, starts[start] + work + stops[stop])
    return np.maximum(bound.max(axis=1), paths.round_trips(shape.stages, shape.trips).max(axis=1))


class _Paths:
    """The least seconds of a microbatch on its way, each (candidates, stages)."""

    def __init__(
        self, shape: "Shape", forward_s: Floats, input_s: Floats, weight_s: Floats, send_s: Floats
    ) -> None:
        ways = shape.hops * send_s[:, None]
        # Where any backward is split, the next stage may have waited for the input gradient alone.
        late = weight_s if shape.splits else np.zeros_like(weight_s)
        backward_s = input_s + weight_s - late
        down, up = (np.cumsum(each, axis=1) - each + ways for each in (forward_s, backward_s))
        self.to_forward = down
        """From the start until a forward may begin."""
        back = up[:, -1:] + backward_s[:, -1:] - up - backward_s
        self.to_backward = down[:, -1:] + forward_s[:, -1:] + back
        """From the start until a backward may begin."""
        self.from_backward = up + np.maximum.accumulate(late - up, axis=1)
        """From a backward's end until its microbatch is done, here and on the stages before."""
        self.from_forward = self.to_backward[:, :1] - down - forward_s + backward_s[:, :1] + late[:, :1]
        """From a forward's end until its microbatch is done."""
        self._trip = self.to_backward - down + backward_s
        """From a forward's begin until its backward's end."""

    def round_trips(self, stages: Ints, trips: Ints) -> Floats:
        """From the start until all is done, where stages make so many trips in turn, (candidates, chunks)."""
        return self.to_forward[:, stages] + trips * self._trip[:, stages] + self.from_backward[:, stages]


def _hidden(
    shape: "Shape",
    forward_s: Floats,
    backward_s: Floats,
    forward_ep_s: Floats | None,
    backward_ep_s: Floats | None,
    pair_hides: float,
) -> Floats:
    """Seconds that pairs save each rank, (candidates, ranks)."""
    if forward_ep_s is None or backward_ep_s is None or not pair_hides:
        return np.zeros(1)
    ranks, forward, backward, counts = shape.pairs.T
    communication = forward_ep_s[:, forward] + backward_ep_s[:, backward]
    whole = forward_s[:, forward] + backward_s[:, backward]
    saved = pair_hides * np.minimum(communication, whole - communication) * counts
    return saved @ (ranks[:, None] == np.arange(len(shape.total)))


@dataclass(frozen=True)
class Shape:
    """Of a schedule's rows what a bound needs: stages, (ranks,), and numbers of acts on each stage, (ranks, all
    stages' forwards, input gradients, weight gradients); a whole backward counts as its two parts."""

    first_act: Ints
    first_backward: Ints
    last_forward: Ints
    last_backward: Ints
    before_backward: Ints
    """Acts before the first backward."""
    after_forward: Ints
    """Acts after the last forward."""
    after_backward: Ints
    total: Ints
    turns_back: Ints
    """Whether a row's first backward comes before its last forward, (ranks,)."""
    pairs: Ints
    """Rank, forward's stage, backward's stage, and how often they are paired: (different pairs, 4)."""
    stages: Ints
    """Of every chunk of every rank, (chunks,)."""
    trips: Ints
    """Of every chunk, how many of its microbatches can't be under way at once, at least."""
    hops: Ints
    """Sends on a microbatch's way to each stage."""
    splits: bool
    """Whether there are input gradients apart from their weight gradients."""


@lru_cache(maxsize=1024)
def _shape(schedule: str, pp: int, vpp: int, num_microbatches: int) -> Shape:
    described = SCHEDULES[schedule]
    stages, num_stages = described.stages(pp, vpp), described.num_stages(pp, vpp)
    played = min(num_microbatches, ENOUGH_ROUNDS * pp)
    rows = rows_of(schedule, pp, vpp, played)
    parts = [_parts(row, held, num_stages) for row, held in zip(rows, stages, strict=True)]
    microbatches = num_microbatches * num_stages // (pp * vpp)
    leads = np.array([_lead(row, chunk) for row in rows for chunk in range(vpp)])
    if described.forwards_first:
        leads = np.full_like(leads, microbatches)
    marked, counts, turns_back = zip(*parts, strict=True)
    before_backward, after_forward, after_backward, total = np.array(counts).swapaxes(0, 1)
    # Each microbatch more is an act more of each kind on each stage, or on one of the two ranks that hold it.
    more = num_microbatches - played
    longer = (total > 0) * (more * num_stages // (pp * vpp))
    if described.forwards_first:
        before_backward = before_backward + longer * (before_backward > 0)
        after_forward = after_forward + longer * (after_forward > 0)
    rank_of = {stage: rank for chunk in range(vpp)[::-1] for rank in range(pp) for stage in [stages[rank][chunk]]}
    crossed = [rank_of[stage] != rank_of[stage - 1] for stage in range(1, num_stages)]
    first_act, first_backward, last_forward, last_backward = np.array(marked).T
    return Shape(
        first_act=first_act,
        first_backward=first_backward,
        last_forward=last_forward,
        last_backward=last_backward,
        before_backward=before_backward,
        after_forward=after_forward,
        after_backward=after_backward,
        total=total + longer,
        turns_back=np.array(turns_back),
        pairs=_pairs(rows, stages, more * num_stages // (pp * vpp)),
        stages=np.array(stages).ravel(),
        trips=(microbatches - 1) // leads + 1,
        hops=np.cumsum([0, *crossed]),
        splits=any(act.kind == "I" for act in rows[0]),
    )


def _parts(row: Row, held: tuple[int, ...], num_stages: int) -> tuple[list[int], Ints, bool]:
    """The stages that matter of a row, and the acts of its parts, as `Shape` has them."""
    kinds = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}

    def counted(acts: Row) -> Ints:
        counts = np.zeros(3 * num_stages, dtype=np.int64)
        for (act, chunk), number in Counter((act.kind, act.chunk) for act in acts).items():
            for kind in kinds[act]:
                counts[kind * num_stages + held[chunk]] += number
        return counts

    forwards = [at for at, act in enumerate(row) if act.kind == "F"]
    backwards = [at for at, act in enumerate(row) if act.kind in ("B", "I")]
    marked = [0, backwards[0], forwards[-1], backwards[-1]]
    parts = [row[: backwards[0]], row[forwards[-1] + 1 :], row[backwards[-1] + 1 :], row]
    return (
        [held[row[at].chunk] for at in marked],
        np.stack([counted(part) for part in parts]),
        backwards[0] < forwards[-1],
    )


def _lead(row: Row, chunk: int) -> int:
    """How many microbatches later a chunk's forward is done after a backward, in the row, at the most."""
    forwards = backwards = most = 0
    for act in row:
        if act.chunk == chunk:
            forwards += act.kind == "F"
            if act.kind in ("B", "I"):
                most = max(most, forwards - backwards)
                backwards += 1
    return most


def _pairs(rows: Rows, stages: Placement, more: int) -> Ints:
    """`Shape.pairs`, with so many more of each kind of pair than the rows have."""
    found = Counter(
        (rank, held[forward.chunk], held[backward.chunk])
        for rank, (row, held) in enumerate(zip(rows, stages, strict=True))
        for forward, backward in (turn for turn in turns_of(row) if len(turn) > 1)
    )
    return np.array([(*pair, count + more) for pair, count in found.items()], dtype=np.int64).reshape(-1, 4)
