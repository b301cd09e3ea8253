"""Plays a pipeline schedule on a node with fewer cores than ranks, as a laptop is.

While more ranks work than there are cores, all of them slow down; a rank that waits for its input leaves its core
to the others. Between two events (an act ends, an input arrives) every act goes on at the rate that its cores
allow.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainwright.plan.pipeline import Step, extrapolated, order_of


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
    """`pipeline.makespan` where ranks share cores. Rounds beyond the first few go at the last one's rate."""
    if not math.isfinite(sum(forward_s) + sum(backward_s) + send_s):
        return math.inf
    if pp == 1:
        slower = max(1.0, shared.per_stage / shared.cores)
        return num_microbatches * (sum(forward_s) + sum(backward_s)) * shared.stretch(slower)
    return extrapolated(
        lambda count: _play_shared(order_of(schedule, pp, vpp, count), pp, forward_s, backward_s, send_s, shared),
        pp,
        num_microbatches,
    )


def _play_shared(
    order: tuple[Step, ...],
    pp: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float,
    shared: Cores,
) -> float:
    rows: list[list[int]] = [[] for _ in range(pp)]
    for place, step in enumerate(order):
        rows[step.rank].append(place)
    at = [0] * pp
    left: dict[int, float] = {}
    """Seconds of work, as if alone, that are left of each rank's act."""
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
        stretch = shared.stretch(max(1.0, len(left) * shared.per_stage / shared.cores))
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
                ends[rows[rank][at[rank]]] = now
                at[rank] += 1
    return now
