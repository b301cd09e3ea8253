"""Plays a pipeline schedule's rows, act by act: how long a step takes and how many microbatches are held.

An act starts when its rank is free and its input has arrived. Sooner or later a full pipe repeats itself: every
act of a round of pp microbatches ends as much later as its like in the round before. From there on nothing new
can happen, so the rounds that are left are added without playing them. `bounds` is what a search needs first: a
lower bound for many candidates at once.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainwright.plan.table import Floats
from trainwright.spec.schedule import SCHEDULES, Act, Rows

FIRST_ROUNDS = 4
"""Rounds of pp microbatches that are played before looking for repetition; doubled until it is found."""


MOST_ROUNDS = 64
"""Where no repetition is found by then, the rest goes at the last round's rate."""


class Step(NamedTuple):
    """An act in playing order."""

    rank: int
    stage: int
    is_forward: bool
    waits_for: int
    """Place in the order of the act on another stage whose output it needs; -1 for none."""
    sends: bool


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

    def play(count: int) -> float:
        order = order_of(schedule, pp, vpp, count)
        return _play(order, pp, forward_s, backward_s, send_s, blocking_sends)[1]

    played = FIRST_ROUNDS
    while schedule != "gpipe" and played < min(rounds, MOST_ROUNDS):
        # Rounds are left out in the middle, so that a rest of num_microbatches % pp stays at the end.
        order = order_of(schedule, pp, vpp, played * pp + rest)
        ends, last = _play(order, pp, forward_s, backward_s, send_s, blocking_sends)
        period_s = _period_s(order, ends, pp, vpp)
        if period_s is not None:
            return last + (rounds - played) * period_s
        played *= 2
    return extrapolated(play, pp, num_microbatches, rounds=played)


def extrapolated(
    play: Callable[[int], float], pp: int, num_microbatches: int, rounds: int = FIRST_ROUNDS
) -> float:
    """`play` of a number of microbatches: of all, or of some `rounds` with the rest at the last one's rate."""
    wanted, rest = divmod(num_microbatches, pp)
    if wanted <= rounds + 1:
        return play(num_microbatches)
    shorter, longer = (play(count * pp + rest) for count in (rounds, rounds + 1))
    return longer + (wanted - rounds - 1) * (longer - shorter)


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


@lru_cache(maxsize=256)
def order_of(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[Step, ...]:
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
