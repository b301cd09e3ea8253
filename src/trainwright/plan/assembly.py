"""How pieces make stages and stages make ranks: counts that turn figures of pieces into figures of ranks.

All that a rank does and holds is a sum over pieces, so it is a row of counts times the figures. `Moment` rows are
what a rank holds at one time of the schedule, `Bound` rows the least time in which it can be done. Of rows where
one is at least another in every count, only the larger can be a maximum: the others are left out of a search.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.holding import holdings, undominated
from trainwright.plan.table import Floats, Ints, Table
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages


class Shape(NamedTuple):
    """What decides which pieces stand where: the key of a group of candidates."""

    schedule: str
    pp: int
    vpp: int
    recompute_layers: int | None
    kinds: tuple[int, ...]
    """Of every layer, in order, its place among the kinds."""
    mtp_depth: int
    has_copy: bool
    """The last stage reads the embedding's table too."""
    stage_layers: tuple[int, ...]

    @property
    def num_kinds(self) -> int:
        return max(self.kinds) + 1

    @property
    def head(self) -> int:
        """The head's place among the pieces; the embedding's is before it."""
        return 2 * self.num_kinds + 1


def shape_of(table: Table, schedule: str, pp: int, vpp: int, recompute_layers: int | None) -> Shape:
    """The shape of a table's candidates with that schedule."""
    kinds = table.model.layer_kinds
    return Shape(
        schedule,
        pp,
        vpp,
        recompute_layers,
        kinds,
        table.model.mtp_depth,
        table.model.embeds_last,
        table.stage_layers,
    )


@dataclass(frozen=True)
class Assembly:
    """Stages and ranks of a shape."""

    stages: Floats
    """Pieces on each stage, (stages, pieces)."""
    stage_of: Ints
    """Stage of each rank's chunks, (pp, vpp)."""
    ranks: Floats
    """Pieces on each rank, (pp, pieces)."""

    @cached_property
    def chunks(self) -> tuple[Floats, NDArray[np.bool_]]:
        """Stages with different pieces, (different ones, pieces), and which of them each rank holds, (pp,
        different ones)."""
        different, which = np.unique(self.stages, axis=0, return_inverse=True)
        return different, (which.ravel()[self.stage_of][:, :, None] == np.arange(len(different))).any(axis=1)


@lru_cache(maxsize=4096)
def assembly(shape: Shape) -> Assembly:
    """Which pieces stand on which stages and ranks."""
    schedule = SCHEDULES[shape.schedule]
    stage_of = np.array(schedule.stages(shape.pp, shape.vpp), dtype=np.int64)
    kinds, count = shape.num_kinds, schedule.num_stages(shape.pp, shape.vpp)
    stages = np.zeros((count, shape.head + 1 + (shape.mtp_depth > 0) + shape.has_copy))
    for stage, layers in enumerate(layers_of_stages(len(shape.kinds), count, shape.stage_layers)):
        for place, layer in enumerate(layers):
            again = shape.recompute_layers is None or place < shape.recompute_layers
            stages[stage, shape.kinds[layer] + kinds * again] += 1
    stages[0, shape.head - 1] += 1
    stages[-1, shape.head] += 1
    if shape.mtp_depth:
        stages[-1, shape.head + 1] += shape.mtp_depth
    if shape.has_copy:
        first, last = ({*np.argwhere(stage_of == stage)[:, 0].tolist()} for stage in (0, count - 1))
        stages[-1, -1] += not first & last
    return Assembly(stages, stage_of, stages[stage_of].sum(axis=1))


@dataclass(frozen=True)
class Moments:
    """Times at which a rank holds most: rows of counts, (moments, pieces)."""

    rank: Ints
    whole: Floats
    """Pieces that hold what they keep, once for every microbatch."""
    weight_only: Floats
    """Pieces that hold only what their weight gradient reads."""
    params: Floats
    """Pieces on the rank."""
    running: Floats
    """Pieces whose backward runs."""
    grown: Floats
    """Pieces that have gradients."""
    grown_after: Floats
    """Those that have them when that backward is over."""
    there: Floats
    """Pieces whose weights stay gathered, where they do from forward to backward."""
    alone: Floats
    """Pieces whose weight gradient runs by itself."""


@lru_cache(maxsize=4096)
def moments(shape: Shape, num_microbatches: int) -> Moments:
    """All moments of all ranks, for so many microbatches."""
    made = assembly(shape)
    held = holdings(shape.schedule, shape.pp, shape.vpp, num_microbatches)
    places = np.repeat(np.arange(shape.pp), [len(states) for states in held])
    chunks = made.stages[made.stage_of[places]]
    counts = np.concatenate(held).astype(np.float64).reshape(len(places), 7, shape.vpp)
    whole, weight_only, *rest = np.einsum("mkc,mcp->kmp", counts, chunks)
    return Moments(places, whole, weight_only, made.ranks[places], *rest)


@lru_cache(maxsize=4096)
def largest_moments(shape: Shape, num_microbatches: int) -> Moments:
    """Those of them that can be the peak."""
    every = moments(shape, num_microbatches)
    counts = [every.whole, every.weight_only, every.params, every.running > 0, every.grown, every.grown_after]
    kept = undominated(np.concatenate([*counts, every.there, every.alone], axis=1))
    return Moments(*(each[kept] for each in vars(every).values()))


@dataclass(frozen=True)
class Bounds:
    """Rows of counts whose products with acts' seconds bound the pipeline's time from below, (bounds, pieces)."""

    forward_before: Floats
    """Forward acts that a rank's first one waits for."""
    backward_after: Floats
    """Backward acts that follow its last one."""
    work: Floats
    """Pieces that a rank computes for each microbatch (half of them, where stages are held twice)."""
    sends: Ints
    """Ways of an activation or gradient in between."""
    acts: Floats
    """Acts, forward and backward, of a rank for each microbatch."""


@lru_cache(maxsize=4096)
def bounds(shape: Shape) -> Bounds:
    """Of every rank: the way of the first microbatch to it, its work, the way of the last gradient from it."""
    made = assembly(shape)
    stages, width = made.stages, made.stages.shape[1]
    halves = 2 if len(stages) < made.stage_of.size else 1
    # The stages before a rank's nearest chunk; where microbatches come from both ends, the nearer end's.
    ahead = made.stage_of.min(axis=1)
    before = np.cumsum(np.concatenate([np.zeros((1, width)), stages]), axis=0)[ahead]
    # A weight gradient may be the last act: then no gradient is on its way any more.
    splits = shape.schedule.startswith(("zb", "dualpipe"))
    after, sends = (0 * before, ahead) if splits else (before, 2 * ahead)
    table = np.concatenate([before, after, made.ranks / halves, sends[:, None]], axis=1)
    kept = undominated(table)
    chunks = made.stage_of.shape[1] / halves
    return Bounds(
        forward_before=table[kept, :width],
        backward_after=table[kept, width : 2 * width],
        work=table[kept, 2 * width : 3 * width],
        sends=table[kept, -1].astype(np.int64),
        acts=np.full(len(kept), 2.0 * chunks),
    )


@lru_cache(maxsize=4096)
def rank_types(shape: Shape) -> Floats:
    """Ranks with different pieces, (types, pieces)."""
    return np.unique(assembly(shape).ranks, axis=0)
