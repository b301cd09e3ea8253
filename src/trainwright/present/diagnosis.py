"""Why nothing fits, for people: the nearest plans with what fills them, and the remedies that were tried."""

from rich.console import Group, RenderableType

from trainwright.present.fronts import degrees_text
from trainwright.present.parts import bullets, section, table
from trainwright.spec.answers import Prediction
from trainwright.spec.diagnosis import Diagnosis, Remedy
from trainwright.spec.units import bytes_text, seconds_text

LARGEST = 3
"""Causes of a plan's bytes that are named."""


def diagnosis_view(diagnosis: Diagnosis) -> RenderableType:
    """What misses how much, and what helps; or how much room there is."""
    if diagnosis.feasible:
        return section("It fits", bullets(_rooms(diagnosis)))
    shown = [section("The nearest plans, and what fills them", table(NEAREST, map(_nearest, diagnosis.nearest)))]
    if diagnosis.tried:
        searched = f"searched already, and not enough: {', '.join(diagnosis.tried)}"
        shown.append(section("Remedies", bullets([searched, _cheapest_text(diagnosis)])))
    else:
        shown.append(section("Remedies", bullets([_cheapest_text(diagnosis)])))
    if diagnosis.remedies:
        shown.append(section("Tried", table(REMEDIES, map(_remedy, diagnosis.remedies))))
    return Group(*shown)


def _rooms(diagnosis: Diagnosis) -> list[str]:
    plans = {"fastest": diagnosis.nearest[0], "roomiest": diagnosis.nearest[-1]}
    rooms = [
        f"the {name} ({degrees_text(plan)}) takes {seconds_text(plan.step_s)} and leaves {_free(plan)}"
        for name, plan in plans.items()
    ]
    return [f"{diagnosis.feasible:,} of {diagnosis.considered:,} plans fit", *rooms]


def _free(plan: Prediction) -> str:
    return f"{bytes_text(plan.capacity_bytes - plan.peak_bytes)} of {bytes_text(plan.capacity_bytes)}"


def _cheapest_text(diagnosis: Diagnosis) -> str:
    cheapest = diagnosis.cheapest
    if cheapest is None:
        return "no single remedy is enough"
    plan = cheapest.plan
    return f"cheapest: {cheapest.name}, with a step of {seconds_text(plan.step_s)} ({degrees_text(plan)})"


NEAREST = [("layout", "<"), ("zero", ">"), ("recompute", "<"), ("short by", ">"), ("largest causes", "<")]
REMEDIES = [
    ("remedy", "<"),
    ("fits", "<"),
    ("step", ">"),
    ("tokens/s/device", ">"),
    ("short by", ">"),
    ("layout", "<"),
]


def _nearest(plan: Prediction) -> list[str]:
    largest = sorted(plan.ledger.bytes.items(), key=lambda item: -item[1])[:LARGEST]
    causes = ", ".join(f"{cause} {bytes_text(value)}" for cause, value in largest)
    missing = bytes_text(plan.short_by_bytes)
    return [degrees_text(plan), str(plan.recipe.zero), plan.recipe.recompute, missing, causes]


def _remedy(remedy: Remedy) -> list[str]:
    plan = remedy.plan
    name = remedy.name if remedy.same_job else f"{remedy.name} (another job)"
    if not plan.fits:
        return [name, "no", "", "", bytes_text(plan.short_by_bytes), degrees_text(plan)]
    speed = f"{plan.tokens_per_s_per_device:,.1f}"
    return [name, "yes", seconds_text(plan.step_s), speed, "", degrees_text(plan)]
