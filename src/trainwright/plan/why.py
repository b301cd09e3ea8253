"""Why the winning plan won: for each of its choices, what the best plan with another choice would cost.

Every sentence is computed from the evaluated table: the rival is the fastest candidate with the neighbouring value
of one field and anything else free; if none fits, the one that comes nearest says by how many bytes and why.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import prediction
from trainwright.plan.table import RECOMPUTE, SCHEDULE
from trainwright.spec.answers import Prediction
from trainwright.spec.question import Question
from trainwright.spec.units import bytes_text, seconds_text


class Alternative(NamedTuple):
    """A choice that was made and its neighbour, as text: `tp 4` and `tp 8`."""

    chosen: str
    other: str


FIELDS = ("tp", "cp", "pp", "dp", "vpp", "zero", "recompute", "micro_batch")
TARGET_DAYS = 90.0
"""A run longer than this is called long, and the devices that would bring it down to it are named."""


def why(question: Question, evaluation: Evaluation, row: int, plan: Prediction) -> list[str]:
    """Reasons for the plan at `row`, the weightiest first."""
    reasons = [_bound(plan), _headroom(plan)]
    rivals: dict[int, list[Alternative]] = {}
    for field in FIELDS:
        column = getattr(evaluation.table.columns, field)
        for other in _neighbours(column, int(column[row])):
            alternative = Alternative(_choice(field, int(column[row])), _choice(field, other))
            fastest = evaluation.fastest((column == other) & evaluation.fits, 1)
            if fastest:
                rivals.setdefault(fastest[0], []).append(alternative)
            else:
                reasons.append(_does_not_fit(evaluation, alternative, column == other))
    reasons += [_loses(evaluation, plan, rival, alternatives) for rival, alternatives in rivals.items()]
    if plan.days is not None and plan.days > TARGET_DAYS:
        reasons.append(_too_small(question, plan, plan.days))
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
        f"the nearest, {_layout_text(plan)} with zero {plan.recipe.zero} and recompute {plan.recipe.recompute}, "
        f"is short by {bytes_text(plan.short_by_bytes)}; largest cause: {plan.largest_bytes_cause} ({filled})",
        "more devices, a smaller micro batch, a shorter sequence or a device with more memory would help",
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
    if slower < 5e-4:
        return f"{chosen}, though {others} ({_layout_text(rival)}) is as fast"
    loses = rival.ledger - plan.ledger
    cause = max(loses.seconds, key=lambda each: loses.seconds[each])
    return (
        f"{chosen}: the best plan with {others} ({_layout_text(rival)}) takes {seconds_text(rival.step_s)}, "
        f"{slower:+.1%}; it loses most in {cause} ({seconds_text(loses.seconds[cause])})"
    )


def _choice(field: str, value: int) -> str:
    if field == "recompute":
        return f"recompute {RECOMPUTE[value]}"
    if field == "schedule":
        return f"schedule {SCHEDULE[value]}"
    return f"{field} {value}"


def _layout_text(plan: Prediction) -> str:
    """Degrees above one: `tp 8, pp 16, dp 128`."""
    degrees = [(axis, getattr(plan.layout, axis)) for axis in ("tp", "cp", "pp", "vpp", "dp")]
    return ", ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "one device"


def _too_small(question: Question, plan: Prediction, days: float) -> str:
    devices = question.devices * days / TARGET_DAYS
    return (
        f"{question.tokens:,} tokens take {days:.0f} days on {question.devices:,} devices: the cluster is small "
        f"for the budget; at this rate about {devices:,.0f} devices would take {TARGET_DAYS:.0f} days"
    )
