"""Who is slow: ranks that do the same work are held against one another by what they alone take for it.

In a step all wait for the slowest, so whole steps tell nothing; the seconds that a rank spends outside of
collectives do. Ranks of one pipeline stage do the same. A rank is slow where, over the last `WINDOW` steps, the
median of its seconds over those of the others of its stage, step by step, is above the factor, and it was the
slowest of them in most. Steps of little work tell nothing: which process has a core decides about them.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

WINDOW = 15
"""Steps: below the 20 in which it is to be named, and enough that half of them slow by chance is rare."""
MOST = 0.7
"""Of those steps in which it was the slowest."""
LEAST_S = 0.02
"""Of own work in a step: where four ranks share two cores, ratios of 15 steps of 10 ms are up to 1.4 by chance, of
50 ms up to 1.2 (docs/log.md)."""
CLEARED = 0.5
"""Of the way back from the factor to 1, where a rank that was told as slow is well again."""


class Slowness:
    """Told of every step once, of all ranks; `stages` are the ranks that do the same work."""

    def __init__(self, stages: Sequence[Sequence[int]], factor: float) -> None:
        self._stages, self._factor = stages, factor
        self._ratios: dict[int, deque[float]] = {}
        self._slowest: dict[int, deque[bool]] = {}
        self._told: set[int] = set()

    def step(self, own_s: Mapping[int, float]) -> dict[int, float]:
        """Ranks that are slow since this step, and how many times as long they take."""
        found: dict[int, float] = {}
        for stage in self._stages:
            if len(stage) < 2:
                continue
            for rank in stage:
                others = [own_s[other] for other in stage if other != rank]
                typical_s = statistics.median(others)
                ratios = self._ratios.setdefault(rank, deque(maxlen=WINDOW))
                slowest = self._slowest.setdefault(rank, deque(maxlen=WINDOW))
                ratios.append(own_s[rank] / typical_s if typical_s >= LEAST_S else 1.0)
                slowest.append(own_s[rank] > max(others))
                if len(ratios) < WINDOW:
                    continue
                ratio = statistics.median(ratios)
                if ratio > self._factor and sum(slowest) >= MOST * WINDOW and rank not in self._told:
                    self._told.add(rank)
                    found[rank] = ratio
                elif ratio < 1 + CLEARED * (self._factor - 1):
                    self._told.discard(rank)
        return found
