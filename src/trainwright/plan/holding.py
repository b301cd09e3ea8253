"""How many microbatches' activations a rank holds at once, read off its row of acts.

A forward adds a microbatch that is held whole, until its backward is over. An input gradient turns it into one of
which only what the weight gradient reads is held, until that is over. Chunks differ in bytes, so what a rank holds
at most is not one number: it is every state that no other state exceeds.
"""

from functools import lru_cache
from itertools import chain

import numpy as np

from trainwright.plan.table import Ints
from trainwright.spec.schedule import SCHEDULES, Rows

States = Ints
"""(states, 3 * vpp): of each chunk microbatches held whole, those held for the weight gradient alone, and whether
its backward runs."""

ENOUGH_ROUNDS = 2
"""Times pp microbatches: they fill every pipe, and more don't hold more."""


def holdings(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[States, ...]:
    """For each rank the states that no other state exceeds. Its peak is the largest, over them, of the sum of
    counts times bytes."""
    if SCHEDULES[schedule].forwards_first:
        # Backwards go chunk by chunk, the last one first, and leave nothing of a chunk.
        at = np.arange(vpp)[::-1, None]
        chunk = np.arange(vpp)[None, :]
        states = np.concatenate([num_microbatches * (chunk <= at), 0 * (chunk + at), chunk == at], axis=1)
        return (states.astype(np.int64),) * pp
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
    kind = np.frombuffer("".join([act.kind for act in acts]).encode(), dtype="S1")
    # Of a pair, which stand side by side, the second is of the turn of the first.
    second = np.array([act.paired for act in acts])
    second &= np.cumsum(second) % 2 == 0
    starts = np.flatnonzero(~second)
    of_chunk = np.array([act.chunk for act in acts])[:, None] == np.arange(vpp)

    def in_turns(*which: bytes) -> Ints:
        """How many acts of each turn are of these kinds, by chunk, (turns, vpp)."""
        return np.add.reduceat(np.isin(kind, which)[:, None] & of_chunk, starts, dtype=np.int64)

    adds, drops, splits, ends = in_turns(b"F"), in_turns(b"B", b"I"), in_turns(b"I"), in_turns(b"W")
    # A row leaves nothing behind, so the sums begin anew with each rank.
    whole = np.cumsum(adds - drops, axis=0) + drops
    weight_only = np.cumsum(splits - ends, axis=0) - splits + ends
    # A weight gradient needs no working set of its layer: what it reads is counted, what it makes is a gradient.
    states = np.concatenate([whole, weight_only, (drops > 0).astype(np.int64)], axis=1)
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])[starts]
    dropping = (drops + ends > 0).any(axis=1)
    return rank[dropping], states[dropping]


def undominated(rows: np.ndarray, group: Ints | None = None) -> Ints:
    """Places of the rows that no other row (of their group) reaches in every column; of equal ones the first."""
    group = np.zeros(len(rows), dtype=np.int64) if group is None else group
    # One that reaches another sums to more, or is equal: of those that are left, each group's first is reached by
    # none.
    left, kept = np.lexsort((-rows.sum(axis=1), group)), [np.zeros(0, dtype=np.intp)]
    while len(left):
        begins = np.diff(group[left], prepend=-1) > 0
        first = left[begins]
        kept.append(first)
        left = left[(rows[left] > rows[first[np.cumsum(begins) - 1]]).any(axis=1)]
    return np.sort(np.concatenate(kept))
