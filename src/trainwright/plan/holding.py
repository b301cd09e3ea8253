"""How many microbatches' activations a rank holds at once, read off its row of acts.

A forward adds a microbatch that is held whole, until its backward is over. An input gradient turns it into one of
which only what the weight gradient reads is held, until that is over. Chunks differ in bytes, so what a rank holds
at most is not one number: it is every state that no other state exceeds.
"""

from functools import lru_cache

import numpy as np

from trainwright.plan.table import Ints
from trainwright.spec.schedule import SCHEDULES, Row

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
    rows = SCHEDULES[schedule].rows(pp, vpp, num_microbatches)
    states = (peaks(row, vpp) for row in rows)
    return tuple(each[undominated(each)] for each in states)


def peaks(row: Row, vpp: int) -> States:
    """What is held while each turn of a row runs that drops something: what it adds is there already, what it
    drops still is. A turn is an act, or two that are paired."""
    kinds = np.array([act.kind for act in row])
    chunk = np.array([act.chunk for act in row])
    paired = np.array([act.paired for act in row])
    # Of a pair, which stand side by side, the second is of the turn of the first.
    second = paired & (np.cumsum(paired) % 2 == 0)
    turn = np.cumsum(~second) - 1
    turns, hot = int(turn[-1]) + 1, np.eye(vpp, dtype=np.int64)[chunk]

    def in_turn(mask: np.ndarray) -> Ints:
        """How many acts of each turn are of a kind, by chunk."""
        total = np.zeros((turns, vpp), dtype=np.int64)
        np.add.at(total, turn[mask], hot[mask])
        return total

    adds, splits, ends = in_turn(kinds == "F"), in_turn(kinds == "I"), in_turn(kinds == "W")
    drops = in_turn(kinds == "B") + splits
    whole = np.cumsum(adds - drops, axis=0) + drops
    weight_only = np.cumsum(splits - ends, axis=0) - splits + ends
    # A weight gradient needs no working set of its layer: what it reads is counted, what it makes is a gradient.
    running = (drops > 0).astype(np.int64)
    return np.concatenate([whole, weight_only, running], axis=1)[(drops + ends > 0).any(axis=1)]


def undominated(rows: np.ndarray) -> Ints:
    """Places of the rows that no other row reaches in every column; of equal ones the first."""
    _, first = np.unique(rows, axis=0, return_index=True)
    places = np.sort(first)
    unique = rows[places]
    covers = ~np.eye(len(unique), dtype=np.bool_)
    for column in unique.T:
        covers &= column[None, :] >= column[:, None]
    return places[~covers.any(axis=1)]
