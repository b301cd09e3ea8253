"""Plays a pipeline schedule's rows, act by act: how long a step takes and how many microbatches are held.

An act starts when its rank is free and its input has arrived. Sooner or later a full pipe repeats itself: every
act of a round of pp microbatches ends as much later as its like in the round before. From there on nothing new
can happen, so the rounds that are left are added without playing them. `bounds` is what a search needs first: a
lower bound for many candidates at once.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainwright.plan.table import Floats
from trainwright.spec.schedule import SCHEDULES, Act, Rows

FIRST_ROUNDS = 4
"""Rounds of pp microbatches that are played before looking for repetition; doubled until it is found."""


def makespan(
    schedule: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float,
    *,
    blocking_sends: bool = False,
) -> float:
    """Seconds from the first act to the last.

    forward_s, backward_s: seconds of an act on each of the pp * vpp stages; send_s: seconds of one activation's
    (or gradient's) way to the next rank. With blocking_sends the sender waits for it too.
    """
    if pp == 1:
        return num_microbatches * (sum(forward_s) + sum(backward_s))
    rounds, rest = divmod(num_microbatches, pp)
    played = FIRST_ROUNDS
    while schedule != "gpipe" and played < rounds:
        # Rounds are left out in the middle, so that a rest of num_microbatches % pp stays at the end.
        order = _order(schedule, pp, vpp, played * pp + rest)
        ends, last = _play(order, pp, forward_s, backward_s, send_s, blocking_sends)
        period_s = _period_s(order, ends, pp, vpp)
        if period_s is not None:
            return last + (rounds - played) * period_s
        played *= 2
    order = _order(schedule, pp, vpp, num_microbatches)
    return _play(order, pp, forward_s, backward_s, send_s, blocking_sends)[1]


class Cores(NamedTuple):
    """A node that has fewer cores than ranks."""

    per_stage: float
    """Ranks of the node that work when a pipeline rank's do: its tensor and data-parallel peers, and itself."""
    cores: int
    compute_share: float
    """Part of an act's seconds that wants a core; the rest is communication."""


def shared_makespan(
    schedule: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float,
    shared: Cores,
) -> float:
    """`makespan` where ranks share cores: while more of them work than there are cores, all of them slow down.

    Plays from event to event; between two events every act at work goes on at the rate that its cores allow.
    """
    order = _order(schedule, pp, vpp, num_microbatches)
    rows: list[list[int]] = [[] for _ in range(pp)]
    for place, step in enumerate(order):
        rows[step.rank].append(place)
    at = [0] * pp
    left: dict[int, float] = {}
    """Seconds of alone-work that are left of each rank's act."""
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(order):
        wakes = []
        for rank in range(pp):
            if rank in left or at[rank] == len(rows[rank]):
                continue
            step = order[rows[rank][at[rank]]]
            arrival = 0.0 if step.waits_for < 0 else ends.get(step.waits_for, math.inf) + send_s
            if arrival <= now:
                left[rank] = (forward_s if step.is_forward else backward_s)[step.stage]
            elif arrival < math.inf:
                wakes.append(arrival)
        slower = max(1.0, len(left) * shared.per_stage / shared.cores)
        stretch = shared.compute_share * slower + 1 - shared.compute_share
        soonest = min([now + each * stretch for each in left.values()] + wakes)
        passed, now = (soonest - now) / stretch, soonest
        for rank in list(left):
            left[rank] -= passed
            if left[rank] <= 1e-12:
                del left[rank]
                ends[rows[rank][at[rank]]] = now
                at[rank] += 1
    return now


def bounds(
    pp: int, vpp: int, num_microbatches: int, forward_s: Floats, backward_s: Floats, send_s: Floats
) -> Floats:
    """A lower bound of `makespan`, (candidates,), from acts of shape (candidates, pp * vpp).

    For each rank: the way of the first microbatch to it, all its work, and the way of the last gradient from it.
    Equal stages and free sends reach the bound under 1F1B.
    """
    candidates = len(forward_s)
    forward = forward_s.reshape(candidates, vpp, pp)
    backward = backward_s.reshape(candidates, vpp, pp)
    work = num_microbatches * (forward + backward).sum(axis=1)
    # Rank r first waits for its chunk 0, and after its last act of chunk 0 the gradient still goes to rank 0.
    hops = np.arange(pp) * send_s[:, None]
    before = np.cumsum(forward[:, 0, :], axis=1) - forward[:, 0, :] + hops
    after = np.cumsum(backward[:, 0, :], axis=1) - backward[:, 0, :] + hops
    return (before + work + after).max(axis=1)


def in_flight(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """For each rank and chunk, microbatches whose activations the rank holds when it holds most in all."""
    if schedule == "gpipe":
        return ((num_microbatches,) * vpp,) * pp
    # Two rounds fill the pipe; more don't hold more.
    played = min(num_microbatches, 2 * pp)
    return tuple(_most_held(row, vpp) for row in _rows(schedule, pp, vpp, played))


@lru_cache(maxsize=4096)
def _most_held(row: tuple[Act, ...], vpp: int) -> tuple[int, ...]:
    held, most = [0] * vpp, [0] * vpp
    for act in row:
        held[act.chunk] += 1 if act.kind == "F" else -1
        if sum(held) > sum(most):
            most = list(held)
    return tuple(most)


@lru_cache(maxsize=256)
def _rows(schedule: str, pp: int, vpp: int, num_microbatches: int) -> Rows:
    return SCHEDULES[schedule](pp, vpp, num_microbatches)


class Step(NamedTuple):
    """An act in playing order."""

    rank: int
    stage: int
    is_forward: bool
    waits_for: int
    """Place in the order of the act on another stage whose output it needs; -1 for none."""
    sends: bool


@lru_cache(maxsize=256)
def _order(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[Step, ...]:
    """All ranks' acts in an order in which each comes after what it waits for."""
    rows = _rows(schedule, pp, vpp, num_microbatches)
    last = pp * vpp - 1
    places: dict[tuple[bool, int, int], int] = {}
    at = [0] * pp
    order: list[Step] = []
    total = sum(map(len, rows))
    while len(order) < total:
        before = len(order)
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, microbatch, chunk = row[at[rank]]
                is_forward, stage = kind == "F", chunk * pp + rank
                waits, ahead = (stage > 0, stage - 1) if is_forward else (stage < last, stage + 1)
                place = places.get((is_forward, microbatch, ahead)) if waits else -1
                if place is None:
                    break
                places[is_forward, microbatch, stage] = len(order)
                order.append(Step(rank, stage, is_forward, place, stage < last if is_forward else stage > 0))
                at[rank] += 1
        assert len(order) > before, f"schedule {schedule} deadlocks at {pp=} {vpp=} {num_microbatches=}"
    return tuple(order)


def _play(
    order: tuple[Step, ...],
    pp: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float,
    blocking_sends: bool,
) -> tuple[list[float], float]:
    """When each act ends, and when the last rank is free."""
    free = [0.0] * pp
    ends: list[float] = []
    for rank, stage, is_forward, waits_for, sends in order:
        start = free[rank]
        if waits_for >= 0:
            arrival = ends[waits_for] + send_s
            if arrival > start:
                start = arrival
        end = start + (forward_s[stage] if is_forward else backward_s[stage])
        ends.append(end)
        free[rank] = end + send_s if sends and blocking_sends else end
    return ends, max(free)


def _period_s(order: tuple[Step, ...], ends: list[float], pp: int, vpp: int) -> float | None:
    """Seconds by which every act of the last round before the pipe drains ends after its like one round earlier;
    None where they differ, as while a slow path still catches up."""
    of_rank: list[list[tuple[bool, float]]] = [[] for _ in range(pp)]
    for step, end in zip(order, ends, strict=True):
        of_rank[step.rank].append((step.is_forward, end))
    acts = 2 * pp * vpp
    shifts = []
    for row in of_rank:
        drain = max(place for place, (is_forward, _) in enumerate(row) if is_forward) + 2
        shifts += [row[place][1] - row[place - acts][1] for place in range(drain - acts, drain)]
    return shifts[0] if max(shifts) - min(shifts) <= 1e-9 * shifts[0] else None
