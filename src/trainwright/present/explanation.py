"""Where a run's MFU went, for people: causes with their gaps, what to try; or what a log of step times says."""

from rich.console import Group, RenderableType

from trainwright.present.fronts import degrees_text
from trainwright.present.parts import bullets, facts, headline, section, table
from trainwright.spec.answers import Prediction
from trainwright.spec.explanation import Explanation, LogFit
from trainwright.spec.model import CONVENTION_TEXT
from trainwright.spec.units import bytes_text, scaled, seconds_text

COLUMNS = [
    ("", "<"),
    ("predicted", ">"),
    ("seen", ">"),
    ("gap", ">"),
    ("hidden", ">"),
    ("points", ">"),
    ("points", ">"),
]

LEAST_SHARE = 5e-4
"""Of the step: smaller causes have no line."""


def explanation_view(explanation: Explanation) -> RenderableType:
    """The step, its causes, and what to try against them."""
    found, prediction = explanation, explanation.prediction
    rows = [
        ("step", f"{seconds_text(found.seen.step_s)}, predicted {seconds_text(prediction.step_s)}"),
        (
            "MFU",
            f"{found.seen_mfu:.1%}, predicted {prediction.mfu:.1%}; HFU {found.seen_hfu:.1%}, predicted "
            f"{prediction.hfu:.1%}; of {scaled(prediction.peak_flops_per_s, 'FLOP/s')} "
            f"(dense {prediction.peak_format} peak)",
        ),
        (
            "per device",
            f"{scaled(found.seen_flops_per_s, 'FLOP/s')}, predicted "
            f"{scaled(prediction.flops_per_s_per_device, 'FLOP/s')}",
        ),
        ("counted", CONVENTION_TEXT[prediction.convention]),
    ]
    parts = [
        headline(f"{found.run_name} ({found.run_hash}): where the MFU went"),
        section(f"The run; seen: {found.seen.source} ({_count(found.seen.steps)})", facts(rows)),
        section(
            "By cause, what took most beyond its prediction first; points of MFU: predicted, seen", _table(found)
        ),
    ]
    helps = _advice(found) or ["no change of the run's fields that was tried makes the predicted step 1% shorter"]
    parts.append(section("What to try, as the planner says", bullets(helps)))
    if found.seen.collectives:
        kinds = sorted(found.seen.collectives.items(), key=lambda item: -item[1])
        parts.append(
            section(
                "Collectives of a step, hidden or not", facts((kind, seconds_text(value)) for kind, value in kinds)
            )
        )
    if found.seen.notes:
        parts.append(section("Notes", bullets(found.seen.notes)))
    return Group(*parts)


def _count(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''}"


def _table(found: Explanation) -> RenderableType:
    rows = [
        [
            each.name,
            seconds_text(each.predicted_s),
            seconds_text(each.seen_s),
            f"{'+' if each.gap_s >= 0 else '-'}{seconds_text(abs(each.gap_s))}",
            seconds_text(found.seen.hidden[each.name]) if each.name in found.seen.hidden else "",
            f"{-100 * found.lost(each, seen=False):+.2f}",
            f"{-100 * found.lost(each, seen=True):+.2f}",
        ]
        for each in found.causes
        if max(each.seen_s, each.predicted_s) > LEAST_SHARE * found.seen.step_s
    ]
    other = [f"{-100 * found.other(seen=seen):+.2f}" for seen in (False, True)]
    rows.append(["counted beside computed", "", "", "", "", *other])
    step = [seconds_text(found.prediction.step_s), seconds_text(found.seen.step_s)]
    rows.append(["step, MFU", *step, "", "", f"{100 * found.prediction.mfu:.2f}", f"{100 * found.seen_mfu:.2f}"])
    return table(COLUMNS, rows)


def _advice(found: Explanation) -> list[str]:
    """Every change once, beside the first cause that it is tried against."""
    said: dict[str, str] = {}
    for cause in found.causes:
        for each in cause.tries:
            said.setdefault(
                each.text, f"{cause.name}: {each.text}; the predicted step is {each.saves:.1%} shorter"
            )
    return list(said.values())


def log_fit_view(fit: LogFit) -> RenderableType:
    """What was seen, what fits it, what can't be said, and the plan that follows."""
    seen = [
        (
            f"global batch {each.global_batch:,}",
            f"{seconds_text(each.step_s)}, median of {each.steps} steady lines",
        )
        for each in fit.steps
    ]
    constants = [
        f"{each.name} x{each.value:.3f}: {each.what}"
        + (
            f"; at the border of its range ({each.low:g} to {each.high:.3g}), so that it explains only a part"
            if each.is_at_its_border
            else ""
        )
        for each in fit.constants
    ]
    parts = [
        headline(f"{fit.run_name} ({fit.run_hash}): what a log of {fit.framework} says"),
        section("Steady steps", facts(seen)),
        section("Fitted: factors on the rates of the run's cluster", bullets(constants or ["nothing"])),
        section(
            "Not to be said from step times",
            bullets([*fit.unidentified, "causes: a trace or a run's own telemetry has them"]),
        ),
        section("The run, and the fastest plan of as many devices, both by the fitted constants", _plans(fit)),
        section(
            f"MFU of {scaled(fit.after.peak_flops_per_s, 'FLOP/s')} (dense {fit.after.peak_format} peak): "
            f"{CONVENTION_TEXT[fit.after.convention]}"
        ),
    ]
    if fit.notes:
        parts.append(section("Notes", bullets(fit.notes)))
    return Group(*parts)


def _plans(fit: LogFit) -> RenderableType:
    columns = [("", "<"), ("layout", "<"), ("micro", ">"), ("zero", ">"), ("recompute", "<"), ("schedule", "<")]
    columns += [("step", ">"), ("MFU", ">"), ("peak", ">")]
    rows = [_plan("the run, before the fit", fit.before), _plan("the run", fit.after)]
    rows += [_plan("best", fit.best)] if fit.best is not None else [["best: nothing fits", *[""] * 8]]
    return table(columns, rows)


def _plan(name: str, plan: Prediction) -> list[str]:
    recipe = plan.recipe
    chosen = [
        str(recipe.micro_batch),
        str(recipe.zero),
        recipe.recompute,
        recipe.schedule if plan.layout.pp > 1 else "",
    ]
    return [
        name,
        degrees_text(plan),
        *chosen,
        seconds_text(plan.step_s),
        f"{plan.mfu:.1%}",
        bytes_text(plan.peak_bytes),
    ]
