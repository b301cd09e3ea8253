"""How many devices finish in time: each number that makes sense is searched by itself.

Those are powers of two and three times powers of two of whole nodes; and then, beside the best of them, other
numbers of whole nodes that split the batch. What peak FLOP/s alone would take is
a floor below which a number needs no search. Nothing else is inferred from one number for another.
"""

import numpy as np

from trainwright.plan.balance import balance
from trainwright.plan.candidates import has_planes
from trainwright.plan.predict import prediction
from trainwright.plan.shortlist import shortlisted
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.question import Question
from trainwright.spec.sizing import MOST_DEVICES, Goal, Sizing, Tried
from trainwright.spec.units import SECONDS_PER_DAY

BALANCED = 5
"""Of the fastest plans for a number of devices, those whose layers are balanced: as many as `plan` shows."""

MOST_BETWEEN = 16
"""Numbers of devices that are searched between two others."""


def device_counts(cluster: ClusterSpec, most: float) -> list[int]:
    """Numbers of devices up to `most`, rising: of whole nodes, and of parts of one where there is but one."""
    node = cluster.node.devices
    most = min(most, cluster.max_devices)
    unit = node if node < most else 1
    counts = {unit * factor << power for factor in (1, 3) for power in range(64)}
    return sorted(count for count in counts if count <= most)


def counts_to_try(question: Question, goal: Goal) -> list[int]:
    """The numbers of devices that may be in time, and the largest that can't be, which shows what is missed.

    Raises `InvalidSpec` for a goal that can't be judged.
    """
    if question.tokens is None:
        raise InvalidSpec("--tokens: missing; --min needs a budget to finish")
    if goal.least == "cost" and question.cluster.usd_per_device_hour is None:
        raise InvalidSpec(
            f"--min cost: cluster {question.cluster.name} has no price; give one with --set "
            "cluster.usd_per_device_hour=2.5 or ask --min gpus"
        )
    counts = device_counts(question.cluster, goal.most_devices)
    late = [count for count in counts if floor_days(question, count) > goal.days]
    return counts[max(len(late) - 1, 0) :]


def counts_between(question: Question, sizing: Sizing) -> list[int]:
    """Numbers of whole nodes (of devices, inside one) that were not searched and may be better, rising: those that
    some layout splits the batch over, or `MOST_BETWEEN` of them as evenly as they go. They lie below the fewest
    devices in time, on both sides of the cheapest, or anywhere where none is in time."""
    counts = [each.devices for each in sizing.tried]
    if not counts:
        return []
    fewer, more = counts[0], counts[-1]
    if sizing.answer is not None:
        at = counts.index(sizing.answer.devices)
        fewer = counts[max(at - 1, 0)]
        more = counts[at if sizing.goal.least == "gpus" else min(at + 1, len(counts) - 1)]
    node = question.cluster.node.devices
    unit = node if fewer % node == more % node == 0 else 1
    between = [
        count
        for count in range(fewer + unit, more, unit)
        if count not in counts and has_planes(question.changed(devices=count))
    ]
    if len(between) <= MOST_BETWEEN:
        return between
    return [between[at] for at in np.linspace(0, len(between) - 1, MOST_BETWEEN).round().astype(int)]


def floor_days(question: Question, devices: int) -> float:
    """Days of the budget at the best rate that any of the cluster's curves reaches, all of the time."""
    recipe, cluster = question.recipe, question.cluster
    peak = cluster.peak(recipe.product_format(cluster))
    if peak is None:
        reject("recipe.precision", recipe.precision, f"{cluster.device.name} has no peak for it")
    rates = cluster.rates
    curves = [*rates.matmul.values(), *rates.attention_forward.values(), *rates.attention_backward.values()]
    reached = max(max(curve.fraction) for curve in curves) * max([1.0, *rates.sustained.values()])
    flops = question.model.flops_per_token(recipe.seq_len, "causal") * (question.tokens or 0)
    seconds = flops / (devices * peak * max(reached, 1.0)) * min(rates.time_factor, 1.0)
    return seconds / SECONDS_PER_DAY


def tried(question: Question, devices: int) -> Tried | None:
    """The fastest plan for a number of devices, of the fastest ones with their layers balanced; None where no
    layout is legal."""
    try:
        evaluation, best = shortlisted(question.changed(devices=devices, top=1), BALANCED)
    except InvalidSpec:
        return None
    if not best:
        return Tried(devices=devices, plan=None)
    found = [(evaluation, row) for row in best]
    found += [(each.evaluation, 0) for row in best if (each := balance(evaluation.table, row))]
    fastest, row = min(found, key=lambda each: each[0].step_s(each[1]))
    return Tried(devices=devices, plan=prediction(fastest, row, question.tokens))


def first_within(question: Question, days: float, least_devices: float) -> Tried | None:
    """The first number of devices from `least_devices` on that takes at most so many days."""
    for count in device_counts(question.cluster, MOST_DEVICES):
        found = tried(question, count) if count >= least_devices else None
        if found is not None and found.days <= days:
            return found
    return None
