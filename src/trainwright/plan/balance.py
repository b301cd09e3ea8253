"""The assignment of layers to stages with the shortest step: uneven where embedding, head or layers differ.

Where there are few assignments, all are listed. Where there are many, the search begins at the even one and at
the one whose slowest stage is fastest (dynamic programming over contiguous ranges of layers), and moves layers one
at a time from stage to stage as long as the bound of the step gets lower and memory suffices. Either way the most
promising are played, and the fastest are predicted like any other plan: what is returned is what `predict` says.
"""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from trainwright.plan import pipeline
from trainwright.plan.assignments import Assignments, one_row
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.table import Floats, Ints, Table

LEAST_GAIN = 1e-3
"""Fraction of a step that an uneven assignment must save to be worth its words."""

MOST_LISTED = 4096
"""Assignments that are all listed; beyond, they are searched for."""

MOST_MOVES = 1024
"""Moves of one layer that are tried at once; of more, those off the slowest ranks."""

MOST_STEPS = 64
"""Layers that are moved from one beginning."""

PLAYED = 128
PREDICTED = 6
"""Most promising assignments that are played; and of those, the fastest that are predicted."""

TRIED = 16
"""Of the moves that lower the cost, the cheapest, the first of which that fits is made."""

EVENNESS = 1e-4
"""Weight of the ranks' mean excess over the mean beside the bound: of equal bounds the evener is better."""


class Balanced(NamedTuple):
    """An assignment that is faster than the even one."""

    stage_layers: tuple[int, ...]
    step_s: float
    evaluation: Evaluation
    """Of the plan with this assignment, a table of one row."""


def balance(table: Table, row: int) -> Balanced | None:
    """The fastest assignment that was found for a row of a table, if it fits and saves `LEAST_GAIN` of a step."""
    if table.stage_layers or table.columns.pp[row] == 1:
        return None
    assignments = Assignments(Evaluation(one_row(table, row)))
    fastest = min(_promising(assignments), key=lambda sizes: assignments.evaluated(sizes).step_s(0), default=None)
    if fastest is None:
        return None
    best = assignments.evaluated(fastest)
    if best.step_s(0) >= (1 - LEAST_GAIN) * assignments.evaluation.step_s(0):
        return None
    return Balanced(tuple(fastest.tolist()), best.step_s(0), best)


def _promising(assignments: Assignments) -> list[Ints]:
    """Uneven assignments that fit, of the shortest played makespans, most promising first."""
    sizes = _listed(assignments) if _count(assignments) <= MOST_LISTED else _searched(assignments)
    sizes = sizes[(sizes != assignments.even).any(axis=1)]
    if not len(sizes):
        return []
    pieces = assignments.pieces(sizes)
    around_s = assignments.around_s(pieces)
    least_s = assignments.least_s(pieces) + around_s
    even_s = _played_s(assignments, assignments.even)
    even_s += float(assignments.around_s(assignments.pieces(assignments.even[None]))[0])
    best: list[tuple[float, int]] = []
    for place in np.argsort(least_s, kind="stable")[:PLAYED].tolist():
        worst_s = best[-1][0] if len(best) == PREDICTED else even_s
        if least_s[place] > worst_s:
            break
        step_s = _played_s(assignments, sizes[place]) + float(around_s[place])
        if step_s < worst_s and assignments.evaluated(sizes[place]).fits[0]:
            best = sorted([*best, (step_s, place)])[:PREDICTED]
    return [sizes[place] for _, place in best]


def _played_s(assignments: Assignments, sizes: Ints) -> float:
    return pipeline.makespan(assignments.pipe_of(sizes))


def _count(assignments: Assignments) -> int:
    """How many assignments there are."""
    stages = len(assignments.even)
    free = assignments.num_layers - max(stages - 2, 0)
    return math.comb(free + stages - 1, stages - 1)


def _listed(assignments: Assignments) -> Ints:
    """All assignments."""
    stages = len(assignments.even)
    inner = np.array([0, *[1] * (stages - 2), 0])
    free = assignments.num_layers - int(inner.sum())
    # Where stages - 1 bars stand among the layers that are free.
    bars = np.array(list(combinations(range(free + stages - 1), stages - 1)))
    walls = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), free + stages - 1)], axis=1)
    return np.diff(walls, axis=1) - 1 + inner


def _searched(assignments: Assignments) -> Ints:
    """Assignments on the way down from every beginning, and those around where it ends."""
    found = [assignments.even]
    for beginning in (assignments.even, bottleneck(assignments)):
        found += _descent(assignments, beginning)
    return np.unique(np.array(found), axis=0)


def _descent(assignments: Assignments, beginning: Ints) -> Iterator[Ints]:
    """Assignments of ever lower cost, each a layer's move from the last; then the cheapest around the last."""
    at, cost = beginning, float(_cost(assignments, beginning[None])[0])
    for _ in range(MOST_STEPS):
        yield at
        moves = _moves(assignments, at)
        costs = _cost(assignments, moves) if len(moves) else np.zeros(0)
        cheapest = np.argsort(costs, kind="stable")
        better = [place for place in cheapest[:TRIED].tolist() if costs[place] < cost]
        taken = next((place for place in better if assignments.evaluated(moves[place]).fits[0]), None)
        if taken is None:
            yield from moves[cheapest[:PLAYED]]
            return
        at, cost = moves[taken], float(costs[taken])


def _cost(assignments: Assignments, sizes: Ints) -> Floats:
    """Seconds that a step takes at least, and a little for each rank that does more than the mean."""
    pieces = assignments.pieces(sizes)
    ranks_s = assignments.ranks_s(pieces)
    uneven_s = np.maximum(ranks_s - ranks_s.mean(axis=1, keepdims=True), 0).mean(axis=1)
    least_s = assignments.least_s(pieces) + assignments.around_s(pieces)
    return least_s + EVENNESS * assignments.pipe.num_microbatches * uneven_s


def _moves(assignments: Assignments, at: Ints) -> Ints:
    """Assignments that differ from `at` by one layer that another stage has."""
    least = np.array([0, *[1] * (len(at) - 2), 0])
    givers, takers = np.flatnonzero(at > least), np.arange(len(at))
    if len(givers) * len(takers) > MOST_MOVES:
        stage_s = assignments.stages_s(at)
        some = max(int(MOST_MOVES**0.5), 1)
        givers = givers[np.argsort(-stage_s[givers], kind="stable")[:some]]
        takers = takers[np.argsort(stage_s, kind="stable")[: MOST_MOVES // len(givers)]]
    pairs = [(giver, taker) for giver in givers.tolist() for taker in takers.tolist() if giver != taker]
    moved = np.repeat(at[None], len(pairs), axis=0)
    if pairs:
        places = np.arange(len(pairs))
        giver, taker = np.array(pairs).T
        moved[places, giver] -= 1
        moved[places, taker] += 1
    return moved


def bottleneck(assignments: Assignments) -> Ints:
    """The assignment whose slowest stage takes least, and of those the one with the least sum of squares."""
    layers_s, others_s = assignments.ranges_s()
    slowest_s = _ranges(layers_s, others_s, math.inf, squares=False)[0]
    return _ranges(layers_s, others_s, slowest_s * (1 + 1e-12), squares=True)[1]


def _ranges(layers_s: Floats, others_s: Floats, most_s: float, *, squares: bool) -> tuple[float, Ints]:
    """The least largest stage, or sum of squares, with no stage above `most_s`; and the layers of each stage."""
    count, last = len(layers_s), len(others_s) - 1
    starts, ends = np.indices(layers_s.shape)
    best = np.where(np.arange(count) == 0, 0.0, math.inf)
    """Of the first layers, as many as the place says, on the stages so far."""
    choices = []
    for stage, other_s in enumerate(others_s.tolist()):
        allowed = ends >= starts if stage in (0, last) else ends > starts
        stage_s = np.where(allowed & (layers_s + other_s <= most_s), layers_s + other_s, math.inf)
        total = best[:, None] + stage_s**2 if squares else np.maximum(best[:, None], stage_s)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    sizes, end = [], count - 1
    for choice in reversed(choices):
        sizes.append(end - int(choice[end]))
        end = int(choice[end])
    return float(best[-1]), np.array(sizes[::-1])
