"""How much work to do between two saves: Young's and Daly's rules, and the exact optimum of the complete form.

The optimum of dt / (exp((dt + w)/M) - 1) solves 1 - y = exp(-y - w/M) with y = dt/M, whatever restarts take; by
Lambert's function that is y = 1 + W(-exp(-1 - w/M)). Young's rule is its first term in w/M, Daly's has more. Saves
that are written beside the steps have it too, with the blocking copy for w, but are no closer than storage writes.
"""

import math

from trainwright.plan.goodput.closed_forms import complete
from trainwright.spec.saving import Saving


def young_s(mttf_s: float, blocked_s: float) -> float:
    """sqrt(2 w M) (Young, Communications of the ACM 17, 1974)."""
    return math.sqrt(2 * blocked_s * mttf_s)


def daly_s(mttf_s: float, blocked_s: float) -> float:
    """Daly's higher order, for w < 2M; M from there on."""
    if blocked_s >= 2 * mttf_s:
        return mttf_s
    root = math.sqrt(blocked_s / (2 * mttf_s))
    return math.sqrt(2 * blocked_s * mttf_s) * (1 + root / 3 + root**2 / 9) - blocked_s


def exact_s(mttf_s: float, blocked_s: float) -> float:
    """The optimum of the complete form, by Newton's iteration on y + log(1 - y) + w/M = 0 from below."""
    if blocked_s <= 0:
        return 0.0
    ratio = blocked_s / mttf_s
    if ratio < 1e-8:
        return daly_s(mttf_s, blocked_s)  # the same to the last digits, without the cancellation below
    if ratio > 30:
        return mttf_s  # W is below the last digit of 1
    y = min(math.sqrt(2 * ratio), 1 - math.exp(-1 - ratio))
    for _ in range(100):
        step = (y + math.log1p(-y) + ratio) * (1 - y) / y
        following = min(y + step, (1 + y) / 2)
        if abs(following - y) <= 1e-15 * y or not 0 < following < 1:
            break
        y = following
    return y * mttf_s


def best_s(saving: Saving, mttf_s: float) -> float:
    """The optimum, no less than a save takes."""
    return max(exact_s(mttf_s, saving.blocked_s), saving.least_interval_s)


def best_steps(saving: Saving, mttf_s: float, step_s: float) -> int:
    """The better of the whole numbers of steps beside the optimum."""
    below = max(1, math.floor(best_s(saving, mttf_s) / step_s))
    tried = [steps for steps in (below, below + 1) if steps * step_s >= saving.least_interval_s - 1e-9 * step_s]
    return max(tried or [below + 1], key=lambda steps: complete(saving, mttf_s, steps * step_s))
