"""Schedules that do all forwards first, played a stage at a time: microbatches stream through it in turn.

A stage takes them in the same order as the stage before it, each when it has arrived and the one before is done: a
flow shop, as where equal jobs go through machines in a row. With t seconds each, the k-th is over at t * (k + 1)
plus the largest, over the j <= k, of arrival_j - t * j: one running maximum for all microbatches.
"""

from collections.abc import Sequence

import numpy as np


def flow_makespan(
    pp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float,
    *,
    blocking_sends: bool,
) -> float:
    """Seconds until the last rank is free; stage s is rank s % pp's.

    Every microbatch goes forward through all stages, a rank's stages one after another, and then all back. With
    blocking_sends a rank waits for its sends.
    """
    last = len(forward_s) - 1
    way_s = send_s if pp > 1 else 0.0
    passes = [(stage, forward_s[stage], stage < last) for stage in range(last + 1)]
    passes += [(stage, backward_s[stage], stage > 0) for stage in range(last, -1, -1)]
    free = [0.0] * pp
    places = np.arange(num_microbatches)
    arrivals = np.full(num_microbatches, -np.inf)
    for stage, act_s, sends in passes:
        blocked_s = way_s if blocking_sends and sends else 0.0
        took_s = act_s + blocked_s
        arrivals[0] = max(arrivals[0], free[stage % pp])
        frees = np.maximum.accumulate(arrivals - took_s * places) + took_s * (places + 1)
        free[stage % pp] = float(frees[-1])
        # The last stage's outputs are its own backward's inputs: there as soon as the rank is free.
        arrivals = frees - blocked_s + way_s if sends else np.full(num_microbatches, -np.inf)
    return max(free)
