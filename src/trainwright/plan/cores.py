"""Plays a pipeline schedule on a node with fewer cores than ranks, as a laptop is.

While more ranks work than there are cores, all of them slow down; a rank that waits for its input leaves its core
to the others. Between two events (an act ends, an input arrives) every act goes on at the rate that its cores
allow.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainwright.plan.pipeline import FIRST_ROUNDS, Pipe, extrapolated
from trainwright.plan.playing import Order, order_of


class Cores(NamedTuple):
    """A node that has fewer cores than ranks."""

    per_stage: float
    """Ranks of the node that work when a pipeline rank's do: its tensor and data-parallel peers, and itself."""
    cores: int
    compute_share: float
    """Part of an act's seconds that wants a core; the rest is communication."""

    def stretch(self, ranks_per_core: float) -> float:
        """How many times longer an act takes when that many ranks want each core, 1 or more."""
        return self.compute_share * ranks_per_core + 1 - self.compute_share


def shared_makespan(pipe: Pipe, cores: Cores) -> float:
    """`pipeline.makespan` where ranks share cores. Rounds beyond the first few go at the last one's rate."""
    if not pipe.is_finite:
        return math.inf
    if pipe.pp == 1 and not pipe.pair_hides:
        slower = max(1.0, cores.per_stage / cores.cores)
        work = sum(pipe.forward_s) + sum(pipe.input_s) + sum(pipe.weight_s)
        return pipe.num_microbatches * work * cores.stretch(slower)

    def played_s(count: int) -> float:
        order = order_of(pipe.schedule, pipe.pp, pipe.vpp, count)
        return _play_shared(order, pipe.seconds_of(order.works), pipe.send_s, cores)

    return extrapolated(pipe, played_s, FIRST_ROUNDS)


def _play_shared(order: Order, seconds: Sequence[float], send_s: float, cores: Cores) -> float:
    at = [0] * len(order.rows)
    left: dict[int, float] = {}
    """Seconds of work, as if alone, that are left of each rank's turn."""
    ends = {0: -math.inf}
    now = 0.0
    while len(ends) <= len(order.turns):
        wakes = []
        for rank, row in enumerate(order.rows):
            if rank in left or at[rank] == len(row):
                continue
            _, work, *waits, _ = order.turns[row[at[rank]] - 1]
            arrival = max(ends.get(waited, math.inf) for waited in waits) + send_s
            if arrival <= now:
                left[rank] = seconds[work]
            elif arrival < math.inf:
                wakes.append(arrival)
        stretch = cores.stretch(max(1.0, len(left) * cores.per_stage / cores.cores))
        least = min(left.values(), default=math.inf)
        wake = min(wakes, default=math.inf)
        if wake < now + least * stretch:
            least, now = (wake - now) / stretch, wake
            left = {rank: each - least for rank, each in left.items()}
            continue
        now += least * stretch
        for rank, each in list(left.items()):
            left[rank] = each - least
            if each <= least * (1 + 1e-12):
                del left[rank]
                ends[order.rows[rank][at[rank]]] = now
                at[rank] += 1
    return now
