"""How many steps apart saves are at least, so that one has ended before the next begins, and so that waiting for
them stays below a bound (CheckFreq, Mohan et al., FAST 2021, s4.2).

The planner asks with predicted seconds, the trainer with measured ones.
"""

import math

GROWTH = 2
"""Steps by which CheckFreq widens the interval while what it measures is above the bound."""


def steps_to_write(whole_s: float, blocked_s: float, step_s: float) -> int:
    """Steps until a save has ended that takes `whole_s`, for `blocked_s` of which a step waits."""
    return max(1, math.ceil((whole_s - blocked_s) / step_s))


def steps_to_bound(blocked_s: float, step_s: float, bound: float) -> int:
    """Steps over which `blocked_s` is at most `bound` of their time."""
    return max(1, math.ceil(blocked_s / (bound * step_s)))


def checkfreq_steps(whole_s: float, blocked_s: float, step_s: float, bound: float) -> int:
    """The interval that CheckFreq ends with, if steps only lose what they wait: `steps_to_write`, then `GROWTH`
    more while the overhead is above `bound`."""
    first = steps_to_write(whole_s, blocked_s, step_s)
    missing = max(0, steps_to_bound(blocked_s, step_s, bound) - first)
    return first + GROWTH * math.ceil(missing / GROWTH)
