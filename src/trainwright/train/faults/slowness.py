"""Who is slow: ranks that do the same work are held against one another by what they alone take for it.

In a step all wait for the slowest, so whole steps tell nothing; the seconds that a rank spends outside of
collectives do. Ranks of one pipeline stage do the same. A rank is slow where over the last `WINDOW` steps its
seconds are above the factor times those of the others of its stage, in the geometric mean without the `TRIMMED`
least and most, and it was the slowest in most of them. Steps of little work tell nothing: which process has a core
decides about them.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

WINDOW, TRIMMED = 18, 4
"""Steps: below the 20 in which it is to be named. Of the seconds that four ranks took on two cores, which differ
by a sixth from step to step and by a factor now and then, this names a rank that is 1.5 times slow in 99% of
cases, and another one about once in 10,000 steps; medians and shorter windows did worse (docs/log.md)."""
MOST = 0.55
"""Of those steps in which it was the slowest."""
LEAST_S = 0.02
"""Of own work in a step."""
CLEARED = 0.5
"""Of the way back from the factor to 1, where a rank that was told as slow is well again."""


class Slowness:
    """Told of every step once, of all ranks; `stages` are the ranks that do the same work."""

    def __init__(self, stages: Sequence[Sequence[int]], factor: float) -> None:
        self._stages, self._factor = [stage for stage in stages if len(stage) > 1], factor
        self._ratios = {rank: deque[float](maxlen=WINDOW) for stage in self._stages for rank in stage}
        self._slowest = {rank: deque[bool](maxlen=WINDOW) for rank in self._ratios}
        self._told: set[int] = set()

    def step(self, own_s: Mapping[int, float]) -> dict[int, float]:
        """Ranks that are slow since this step, and how many times as long they take."""
        found: dict[int, float] = {}
        for stage in self._stages:
            for rank in stage:
                others = [own_s[other] for other in stage if other != rank]
                typical_s = statistics.median(others)
                counts = typical_s >= LEAST_S and own_s[rank] > 0
                ratios, slowest = self._ratios[rank], self._slowest[rank]
                ratios.append(math.log(own_s[rank] / typical_s) if counts else 0.0)
                slowest.append(own_s[rank] > max(others))
                if len(ratios) < WINDOW:
                    continue
                ratio = math.exp(statistics.fmean(sorted(ratios)[TRIMMED:-TRIMMED]))
                if rank in self._told:
                    if ratio < 1 + CLEARED * (self._factor - 1):
                        self._told.discard(rank)
                elif ratio > self._factor and sum(slowest) >= MOST * WINDOW:
                    self._told.add(rank)
                    found[rank] = ratio
        return found
