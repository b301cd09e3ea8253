"""Why the winning plan won: what binds it, and for each of its choices what the best plan with another would cost.

Every sentence is computed from the judged table: the rival is the fastest candidate with the neighbouring value of
one field and anything else free; if none fits, the one that comes nearest says by how many bytes and why.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import prediction
from trainwright.plan.race import Race
from trainwright.plan.sizing import first_within
from trainwright.plan.table import ORDER, SCHEDULE, Table
from trainwright.plan.wording import choices_text, layout_text, policy_text
from trainwright.spec.answers import Prediction
from trainwright.spec.question import Question
from trainwright.spec.sizing import MOST_DEVICES
from trainwright.spec.units import bytes_text, seconds_text


class Alternative(NamedTuple):
    """A choice that was made and its neighbour, as text: `tp 4` and `tp 8`."""

    chosen: str
    other: str


FIELDS = ("tp", "cp", "pp", "ep", "dp", "vpp", "zero", "replicas", "policy", "micro_batch", "schedule", "order")
TARGET_DAYS = 90.0
"""A run longer than this is called long, and a number of devices that would take less is looked for."""

AS_FAST = 5e-4
"""Fraction of a step by which two plans may differ and be called as fast."""

FEW_ROUNDS = 4
"""With fewer microbatches than so many times pp, the batch is what a large bubble comes from."""

LARGE_BUBBLE = 0.05
"""Fraction of the step."""


def why(question: Question, race: Race, row: int, plan: Prediction, slowest: float = math.inf) -> list[str]:
    """Reasons for the plan at `row`, the weightiest first. Of plans that take longer than `slowest` times as long,
    not all are in the race."""
    evaluation = race.evaluation
    reasons = [_bound(plan), _headroom(plan), *_binds(race, row, plan), *_rules(question, plan)]
    rivals: dict[int, list[Alternative]] = {}
    for field in FIELDS:
        column = getattr(evaluation.table.columns, field)
        for other in _neighbours(column, int(column[row])):
            alternative = Alternative(
                *(_choice(evaluation.table, field, value) for value in (int(column[row]), other))
            )
            fastest = race.fastest((column == other) & evaluation.fits, 1, slowest * plan.step_s)
            if fastest:
                rivals.setdefault(fastest[0], []).append(alternative)
            elif slowest < math.inf:
                limit = f"takes less than {slowest:g} times as long"
                reasons.append(f"{alternative.chosen}, since no plan with {alternative.other} fits and {limit}")
            else:
                reasons.append(_does_not_fit(evaluation, alternative, column == other))
    reasons += [_loses(evaluation, plan, rival, alternatives) for rival, alternatives in rivals.items()]
    if plan.days is not None and plan.days > TARGET_DAYS:
        reasons.append(_too_small(question, plan.days))
    return reasons


def why_nothing_fits(question: Question, evaluation: Evaluation) -> list[str]:
    """How far the nearest candidate is from fitting, and what fills it."""
    nearest = int(np.argmin(evaluation.peak_bytes))
    plan = prediction(evaluation, nearest, question.tokens)
    causes = sorted(plan.ledger.bytes.items(), key=lambda item: -item[1])[:3]
    filled = ", ".join(f"{cause} {bytes_text(value)}" for cause, value in causes)
    return [
        f"nothing fits: none of {len(evaluation.fits):,} candidates stays within "
        f"{bytes_text(plan.capacity_bytes)}",
        f"the nearest, {choices_text(plan)}, "
        f"is short by {bytes_text(plan.short_by_bytes)}; largest cause: {plan.largest_bytes_cause} ({filled})",
        "--explain-infeasible tries what would help, and says what each remedy costs",
    ]


def _bound(plan: Prediction) -> str:
    seconds = plan.ledger.seconds
    step_s = plan.step_s
    compute = sum(seconds.get(cause, 0.0) for cause in ("matmul", "attention"))
    lost = sorted(
        ((cause, value) for cause, value in seconds.items() if cause not in ("matmul", "attention")),
        key=lambda item: -item[1],
    )
    parts = ", ".join(f"{cause} {value / step_s:.1%}" for cause, value in lost[:4] if value > 0)
    return f"matmul and attention take {compute / step_s:.1%} of the step; most of the rest goes to {parts}"


def _headroom(plan: Prediction) -> str:
    free = plan.capacity_bytes - plan.peak_bytes
    fullest = max(plan.stages, key=lambda stage: stage.ledger.total_bytes)
    where = f" on pipeline rank {fullest.pp_rank}" if plan.layout.pp > 1 else ""
    return (
        f"memory peaks at {bytes_text(plan.peak_bytes)} of {bytes_text(plan.capacity_bytes)}{where}, mostly "
        f"{plan.largest_bytes_cause}; {bytes_text(free)} stay free"
    )


def _binds(race: Race, row: int, plan: Prediction) -> Iterator[str]:
    """Whether memory is what keeps a faster plan out, and which one is next."""
    evaluation = race.evaluation
    next_row = race.leanest(~evaluation.fits, (1 - AS_FAST) * evaluation.step_s(row))
    if next_row is None:
        yield f"memory does not bind: of all {len(evaluation.fits):,} plans, fitting or not, none is faster"
        return
    rival = prediction(evaluation, next_row, None)
    less = f"{1 - rival.step_s / plan.step_s:.1%} less"
    yield (
        f"memory binds: {choices_text(rival)}, {_held_text(rival)} would take {less}, but is short "
        f"by {bytes_text(rival.short_by_bytes)}, mostly {rival.largest_bytes_cause}"
    )


def _held_text(plan: Prediction) -> str:
    """What else of a plan's recipe decides what it holds."""
    gathered = plan.recipe.zero == 3 and not plan.recipe.reshard_after_forward
    return f"micro-batch {plan.recipe.micro_batch}" + (", gathered until backward," if gathered else "")


def _rules(question: Question, plan: Prediction) -> Iterator[str]:
    """Limits of the question that the plan stands at."""
    layout, recipe = plan.layout, plan.recipe
    if layout.tp == question.cluster.fabric.link_domain > 1:
        yield f"tp {layout.tp} is all of the scale-up domain, beyond which tp is not searched"
    microbatches = recipe.global_batch // (recipe.micro_batch * layout.dp)
    bubble = plan.ledger.seconds.get("bubble", 0.0) / plan.step_s
    if layout.pp > 1 and microbatches < FEW_ROUNDS * layout.pp and bubble > LARGE_BUBBLE:
        made = f"{microbatches} microbatch{'es' if microbatches > 1 else ''} for {layout.pp} pipeline ranks"
        waits = f"so the bubble is {bubble:.1%} of the step"
        yield f"the batch binds: {recipe.global_batch:,} sequences make {made}, {waits}"


def _neighbours(column: NDArray[np.int64], value: int) -> Iterator[int]:
    """The next smaller and the next larger value that occur in the table."""
    smaller, larger = column[column < value], column[column > value]
    if len(smaller):
        yield int(smaller.max())
    if len(larger):
        yield int(larger.min())


def _does_not_fit(evaluation: Evaluation, alternative: Alternative, among: NDArray[np.bool_]) -> str:
    nearest = int(np.flatnonzero(among)[np.argmin(evaluation.peak_bytes[among])])
    rival = prediction(evaluation, nearest, None)
    return (
        f"{alternative.chosen}, since no plan with {alternative.other} fits: short by "
        f"{bytes_text(rival.short_by_bytes)}, mostly {rival.largest_bytes_cause}"
    )


def _loses(evaluation: Evaluation, plan: Prediction, rival_row: int, alternatives: list[Alternative]) -> str:
    """What the fastest plan with other choices costs, and where."""
    rival = prediction(evaluation, rival_row, None)
    chosen = ", ".join(dict.fromkeys(each.chosen for each in alternatives))
    others = " or ".join(each.other for each in alternatives)
    slower = rival.step_s / plan.step_s - 1
    if slower < -AS_FAST:
        return f"{chosen}, though {others} ({layout_text(rival)}) is {-slower:.1%} faster while stages are even"
    if slower < AS_FAST:
        return f"{chosen}, though {others} ({layout_text(rival)}) is as fast"
    loses = rival.ledger - plan.ledger
    cause = max(loses.seconds, key=lambda each: loses.seconds[each])
    return (
        f"{chosen}: the best plan with {others} ({layout_text(rival)}) takes {seconds_text(rival.step_s)}, "
        f"{slower:+.1%}; it loses most in {cause} ({seconds_text(loses.seconds[cause])})"
    )


def _choice(table: Table, field: str, value: int) -> str:
    if field == "policy":
        return policy_text(table.policies[value])
    if field == "schedule":
        return f"schedule {SCHEDULE[value]}"
    if field == "order":
        return f"order {ORDER[value]}"
    return f"{field} {value}"


def _too_small(question: Question, days: float) -> str:
    said = (
        f"{question.tokens:,} tokens take {days:,.0f} days on {question.devices:,} devices: the cluster is small "
        "for the budget"
    )
    larger = first_within(question, TARGET_DAYS, question.devices * days / TARGET_DAYS)
    if larger is None:
        return f"{said}; no number up to {MOST_DEVICES:,} that splits this batch takes less than {TARGET_DAYS:.0f}"
    return f"{said}; {larger.devices:,} take {larger.days:.0f}"
