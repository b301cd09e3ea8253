"""Runs with failures, played many at a time: the oracle of the closed forms, and where quantiles come from.

Each turn draws the time to the next failure of every run that isn't done, for failures have no memory. Work goes
on where the restart left it; saves of that stretch become durable, or not, by the arithmetic of their moments; and
the failure says from which tier the run comes back. A failure before the restart is over begins it again. Rows are
runs, one turn is a handful of array operations, so that a thousand runs of a thousand failures take a second. The
same seed gives the same numbers.
"""

from typing import NamedTuple

import numpy as np

from trainwright.spec.saving import Saving


class Played(NamedTuple):
    """What each run saw, one value a run."""

    wall_s: np.ndarray
    failures: np.ndarray
    strikes: np.ndarray
    """Failures that hit work and not a restart."""
    lost_s: np.ndarray
    """Time of work and saves that was thrown away."""


def play(saving: Saving, mttf_s: float, interval_s: float, useful_s: float, *, runs: int, seed: int) -> Played:
    """Runs of `useful_s` of work, with a save after each `interval_s` of it but the last.

    Shapes (runs,). Commits are counted in saves since the start; what comes from memory is at `reached`, what
    comes from storage at `stored`.
    """
    random = np.random.default_rng(seed)
    segment_s, every = interval_s + saving.blocked_s, saving.storage_every(interval_s)
    wall_s, lost_s = np.zeros(runs), np.zeros(runs)
    failures, strikes = np.zeros(runs, dtype=np.int64), np.zeros(runs, dtype=np.int64)
    reached, stored = np.zeros(runs, dtype=np.int64), np.zeros(runs, dtype=np.int64)
    restart_s = np.zeros(runs)
    memory_lag_s = saving.memory_durable_s if saving.kind == "memory" else saving.durable_s
    while len(left := np.flatnonzero(restart_s >= 0)):
        up_s = random.exponential(mttf_s, len(left))
        by_memory = random.random(len(left)) < saving.memory_share
        worked_s = up_s - restart_s[left]
        missing_s = useful_s - reached[left] * interval_s
        # The last stretch of work needs no save behind it.
        saves_left = np.ceil(missing_s / interval_s) - 1
        needed_s = missing_s + np.maximum(saves_left, 0) * saving.blocked_s
        done = worked_s >= needed_s
        wall_s[left] += np.where(done, restart_s[left] + needed_s, up_s)
        # Saves that are durable at the failure, in memory and in storage.
        begun = np.clip(worked_s, 0, needed_s)
        kept = np.floor(np.maximum(begun - memory_lag_s, 0) / segment_s).astype(np.int64)
        written = np.floor(np.maximum(begun - saving.durable_s, 0) / segment_s).astype(np.int64)
        # What a failure cut short of a write to storage is written again from memory, from the restart on.
        newest = (reached[left] + written) // every * every
        stored[left] = np.maximum(stored[left], np.where(begun >= saving.durable_s, newest, 0))
        before = reached[left]
        after = np.where(by_memory | (saving.kind != "memory"), before + kept, stored[left])
        failed = ~done
        failures[left] += failed
        strikes[left] += failed & (worked_s > 0)
        lost_s[left] += np.where(failed, begun - (after - before) * segment_s, 0.0)
        # A restart from storage that fails is one from storage again: memory is gone.
        from_storage = restart_s[left] == saving.recover_s
        is_memory = by_memory & ~((worked_s < 0) & from_storage)
        back_s = np.where(is_memory, saving.memory_recover_s, saving.recover_s)
        reached[left] = np.where(done, before, after)
        restart_s[left] = np.where(done, -1.0, back_s)
    return Played(wall_s, failures, strikes, lost_s)
