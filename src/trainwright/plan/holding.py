"""How many microbatches' activations a rank holds at once, read off its row of acts.

A forward adds a microbatch that is held whole, until its backward is over. An input gradient turns it into one of
which only what the weight gradient reads is held, until that is over. A chunk has no gradients before its first
backward makes them. Chunks differ in bytes, so what a rank holds at most is not one number: it is every state that
no other state exceeds.
"""

from functools import lru_cache
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.table import Ints
from trainwright.spec.schedule import SCHEDULES, Rows

States = Ints
"""(states, 7 * vpp): of each chunk microbatches held whole, those held for the weight gradient alone, whether its
backward runs, whether it has gradients, whether it has them when that backward is over, whether weights that were
gathered for it are of use yet, and whether a weight gradient of it runs by itself."""

ENOUGH_ROUNDS = 3
"""Times pp microbatches: two fill every pipe, after three all chunks that are full have gradients too."""


def holdings(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[States, ...]:
    """For each rank the states that no other state exceeds. Its peak is the largest, over them, of the sum of
    counts times bytes."""
    if SCHEDULES[schedule].forwards_first:
        # Backwards go chunk by chunk, the last one first, and leave nothing of a chunk.
        at = np.arange(vpp)[::-1, None]
        chunk = np.arange(vpp)[None, :]
        runs = chunk == at
        none = 0 * (chunk + at)
        first = [num_microbatches * (chunk <= at), none, runs, chunk > at, chunk >= at, chunk <= at, none]
        # A chunk's second backward finds a microbatch less, and gradients.
        second = [first[0] - runs, none, runs, chunk >= at, chunk >= at, chunk <= at, none]
        states = [np.concatenate(each, axis=1) for each in (first, second)[:num_microbatches]]
        return (np.concatenate(states).astype(np.int64),) * pp
    return _holdings(schedule, pp, vpp, min(num_microbatches, ENOUGH_ROUNDS * pp))


@lru_cache(maxsize=1024)
def _holdings(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[States, ...]:
    rank, states = peaks(SCHEDULES[schedule].rows(pp, vpp, num_microbatches), vpp)
    kept = undominated(states, rank)
    return tuple(np.split(states[kept], np.searchsorted(rank[kept], np.arange(1, pp))))


def peaks(rows: Rows, vpp: int) -> tuple[Ints, States]:
    """Ranks, and what they hold while a turn of their row runs that drops something: what the turn adds is there
    already, what it drops still is. A turn is an act, or two that are paired."""
    acts = [*chain.from_iterable(rows)]
    kinds, chunks, paired = (map(itemgetter(field), acts) for field in (0, 2, 3))
    kind = np.frombuffer("".join(kinds).encode(), dtype=np.uint8)
    chunk = np.fromiter(chunks, dtype=np.int64, count=len(acts))
    is_split, ends = kind == ord("I"), kind == ord("W")
    drops = is_split | (kind == ord("B"))

    def held(adds: NDArray[np.bool_], removes: NDArray[np.bool_]) -> Ints:
        """What is held of each chunk after each act, (vpp, acts): a row leaves nothing behind for the next."""
        changes = np.zeros((vpp, len(acts)), dtype=np.int64)
        changes[chunk, np.arange(len(acts))] = adds.astype(np.int64) - removes
        return changes.cumsum(axis=1)

    turns = np.flatnonzero(drops | ends)
    last = turns
    if any(paired):
        # Of a pair, whose acts stand side by side, the first one's turn is over with the second.
        both = np.fromiter(map(itemgetter(3), acts), dtype=np.int64, count=len(acts))
        last = turns + (both & both.cumsum())[turns]
    own = chunk[turns] == np.arange(vpp)[:, None]
    # A weight gradient needs no working set of its layer: what it reads is counted, what it makes is a gradient.
    running = own & drops[turns]
    whole = held(kind == ord("F"), drops).take(last, axis=1) + running
    weight_only = np.zeros_like(whole)
    if ends.any():
        weight_only = held(is_split, ends).take(last, axis=1) + own * (ends.astype(np.int64) - is_split)[turns]
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    # Weight gradients that a chunk has made before and after each turn; a row begins with none.
    begins = np.searchsorted(rank, rank[turns])
    makes = np.cumsum((chunk == np.arange(vpp)[:, None]) & ((drops & ~is_split) | ends), axis=1)
    earlier = np.where(begins > 0, makes.take(begins - 1, axis=1), 0)
    has_after = makes.take(turns, axis=1) > earlier
    makes_now = own & ((drops & ~is_split) | ends)[turns]
    has_before = makes.take(turns, axis=1) - makes_now > earlier
    # Weights are gathered for a forward, and given back after a backward.
    uses = (chunk == np.arange(vpp)[:, None]) & (kind != ord("W"))
    last_use = np.maximum.accumulate(np.where(uses, np.arange(1, len(acts) + 1), 0), axis=1)
    there = np.append(False, kind == ord("F")).take(last_use.take(last, axis=1)) | running
    alone = own & ends[turns]
    states = [whole, weight_only, running, has_before, has_after, there, alone]
    return rank[turns], np.concatenate(states).T.astype(np.int64)


def undominated(rows: np.ndarray, group: Ints | None = None) -> Ints:
    """Places of the rows that no other row (of their group) reaches in every column; of equal ones the first."""
    group = np.zeros(len(rows), dtype=np.int64) if group is None else group
    # One that reaches another sums to more, or is equal: of those that are left, each group's first is reached by
    # none.
    left, kept = np.lexsort((-rows.sum(axis=1), group)), [np.zeros(0, dtype=np.intp)]
    values, group = rows.T.take(left, axis=1), group[left]
    while len(left):
        begins = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
        kept.append(left[begins])
        largest = values[:, begins].repeat(np.diff(begins, append=len(left)), axis=1)
        again = np.flatnonzero((values > largest).any(axis=0))
        left, values, group = left[again], values.take(again, axis=1), group[again]
    return np.sort(np.concatenate(kept))
