"""The effective training time ratio in closed form: the first order of a paper, and complete ones.

The complete form counts failures during saves and restarts too (Daly, Future Generation Computer Systems 22,
2006): with failures at random moments a segment of work and save, D = dt + w, takes M exp(u/M) (exp(D/M) - 1) on
average, each try being cut short with probability 1 - exp(-D/M).

A save that becomes durable p later: after a failure D + p must go well until there is a new commit, before that D.
The mean time from one commit to the next is M exp((u + p)/M) (exp(D/M) - 1): p costs what a longer restart does.
This is exact for p <= D, as one save is on its way at most.

Two tiers: a segment that fails is tried again alone where memory has the last state, with probability f; else all
are since the last commit in storage, of k. With failures during restarts followed up, the mean time to the next
commit from segment j on is E_j = a + rho E_(j+1) + (1 - rho) E, where E is that after a restart from storage. A
write to storage needs p without a failure, and begins again after one that memory serves: x = (M/f) (exp(f p/M) -
1)/D segments. So E is of k + x segments, the way from one commit to the next of k: a rho^-x (rho^-k - 1) / (1 -
rho), which without memory is the form above. What is on its way to memory counts as part of that restart.
"""

import math

from trainwright.spec.saving import Saving

FIRST_ORDER_LOAD = 0.12
"""Share of time that failures and saves may take until the first order is 1% off."""
FIRST_ORDER_SAVE = 0.1
"""And a save's share of the work between two."""


def mttf_s(failures_per_node_day: float, nodes: float) -> float:
    """Mean time to failure of a job: 86,400 / (N r)."""
    return 86400.0 / (failures_per_node_day * nodes)


def failures_alone(saving: Saving, mttf_s: float, interval_s: float) -> float:
    """1 - (u + dt/2 + p)/M, for two tiers the mean over them, and 0 where that is below (arXiv:2410.21680)."""
    from_storage_s = saving.recover_s + saving.storage_every(interval_s) * interval_s / 2 + saving.durable_s
    from_memory_s = saving.memory_recover_s + interval_s / 2 + saving.memory_durable_s
    lost_s = saving.memory_share * from_memory_s + (1 - saving.memory_share) * from_storage_s
    return max(0.0, 1 - lost_s / mttf_s)


def first_order(saving: Saving, mttf_s: float, interval_s: float) -> float:
    """(1 - (u + dt/2 + p)/M) / (1 + w/dt): with what saves take."""
    return failures_alone(saving, mttf_s, interval_s) / (1 + saving.blocked_s / interval_s)


def first_order_load(saving: Saving, mttf_s: float, interval_s: float) -> float:
    """(u + p + dt + w)/M, the share of time that must be small for the first order."""
    by_memory, by_storage = saving.memory_share, 1 - saving.memory_share
    every = saving.storage_every(interval_s)
    wait_s = by_memory * (saving.memory_recover_s + saving.memory_durable_s + interval_s)
    wait_s += by_storage * (saving.recover_s + saving.durable_s + every * interval_s)
    return (wait_s + saving.blocked_s) / mttf_s


def first_order_holds(saving: Saving, mttf_s: float, interval_s: float) -> bool:
    """Whether the first order is within about 1%."""
    is_rare = first_order_load(saving, mttf_s, interval_s) <= FIRST_ORDER_LOAD
    return is_rare and saving.blocked_s <= FIRST_ORDER_SAVE * interval_s


def complete(saving: Saving, mttf_s: float, interval_s: float) -> float:
    """The ratio for failures at random moments, whenever they strike; 0 where the run gets nowhere."""
    segment_s = interval_s + saving.blocked_s
    try:
        if saving.kind == "memory":
            commit_s = two_tiers_s(saving, mttf_s, segment_s, saving.storage_every(interval_s))
            return saving.storage_every(interval_s) * interval_s / commit_s
        away = math.exp((saving.recover_s + saving.durable_s) / mttf_s)
        return interval_s / (mttf_s * away * math.expm1(segment_s / mttf_s))
    except OverflowError:
        return 0.0


def two_tiers_s(saving: Saving, mttf_s: float, segment_s: float, every: int) -> float:
    """Mean time from one commit in storage to the next, `every` segments later."""
    share = saving.memory_share
    memory_s = saving.memory_recover_s + saving.memory_durable_s
    fails = -math.expm1(-segment_s / mttf_s)
    fails_again = -math.expm1(-memory_s / mttf_s)
    # Of a failure: seconds of restarts from memory, and the chances to be back at the segment, or at storage's.
    settled = 1 - fails_again * share
    away_s = share * mttf_s * fails_again / settled
    to_segment = share * (1 - fails_again) / settled
    to_storage = 1 - to_segment
    restart_s = mttf_s * math.expm1(saving.recover_s / mttf_s)
    passes = math.exp(-segment_s / mttf_s)
    kept = passes + fails * to_storage
    if kept == 0:
        return math.inf
    a = (mttf_s * fails + fails * (away_s + to_storage * restart_s)) / kept
    falls_back = fails * to_storage / kept
    if falls_back <= 0:
        return every * a
    served = share / mttf_s
    lag_s = math.expm1(served * saving.durable_s) / served if served > 0 else saving.durable_s
    log_rho = math.log1p(-falls_back) if falls_back < 0.5 else -segment_s / mttf_s - math.log(kept)
    return a * math.exp(-lag_s / segment_s * log_rho) * math.expm1(-every * log_rho) / falls_back


def lost_s(saving: Saving, mttf_s: float, interval_s: float) -> float:
    """Mean time that a failure of work throws away; the mean over the tiers, each as if it were alone."""
    segment_s, share = interval_s + saving.blocked_s, saving.memory_share
    every = saving.storage_every(interval_s)
    by_memory_s = since_save_s(mttf_s, segment_s, saving.memory_durable_s)
    return share * by_memory_s + (1 - share) * since_save_s(mttf_s, every * segment_s, saving.durable_s)


def since_save_s(mttf_s: float, segment_s: float, lag_s: float = 0.0) -> float:
    """Mean time since the last durable save when a failure strikes: M - D exp(-p/M) / (exp(D/M) - 1), which is
    D/2 + p where failures are rare."""
    ratio = segment_s / mttf_s
    if ratio < 1e-4:
        return segment_s * (1 / 2 - ratio / 12) + lag_s * (1 - ratio / 2)
    if ratio > 700:
        return mttf_s
    return mttf_s - segment_s * math.exp(-lag_s / mttf_s) / math.expm1(ratio)
