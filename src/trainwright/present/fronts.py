"""Plans beside one another, each best in its way: by time and memory, by days and dollars, by devices."""

from collections.abc import Sequence

from rich.console import Group, RenderableType

from trainwright.present.parts import bar, section, table
from trainwright.spec.answers import Prediction
from trainwright.spec.sizing import Sizing, Tried
from trainwright.spec.stages import sizes_text
from trainwright.spec.units import bytes_text, count_text, seconds_text

DEGREES = ("tp", "cp", "pp", "vpp", "ep", "dp")


def degrees_text(plan: Prediction) -> str:
    """Degrees above one: `tp 8, pp 16, dp 128`."""
    degrees = [(name, getattr(plan.layout, name)) for name in DEGREES]
    return ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one device"


def pareto_section(plans: Sequence[Prediction]) -> RenderableType:
    """Time against memory: each plan takes longer than the one above it, and leaves more room."""
    columns = [("layout", "<"), ("micro", ">"), ("zero", ">"), ("recompute", "<"), ("step", ">"), ("slower", ">")]
    columns += [("peak", ">"), ("free", ">")]
    settings = [_settings(plan) for plan in plans]
    rows = [
        [
            *_told_apart(own, [each for each in settings if each[:4] == own[:4]]),
            seconds_text(plan.step_s),
            f"+{plan.step_s / plans[0].step_s - 1:.1%}" if plan is not plans[0] else "",
            bytes_text(plan.peak_bytes),
            bytes_text(plan.capacity_bytes - plan.peak_bytes),
        ]
        for plan, own in zip(plans, settings, strict=True)
    ]
    return section("Time against memory: plans that no other beats in both", table(columns, rows))


def _settings(plan: Prediction) -> list[str]:
    """Four that have a column, and what else a search chooses."""
    recipe = plan.recipe
    gathered = "gathered until backward" if recipe.zero == 3 and not recipe.reshard_after_forward else ""
    replicas = f"in {recipe.dp_replicate} replicas" if recipe.dp_replicate > 1 else ""
    again = ", ".join(recipe.recompute_ops) if recipe.recompute == "selective" else ""
    return [
        degrees_text(plan),
        str(recipe.micro_batch),
        str(recipe.zero),
        _recompute_text(plan),
        *(gathered, replicas, recipe.schedule, again, plan.layout.order, sizes_text(plan.layout.stage_layers)),
    ]


def _told_apart(own: list[str], alike: list[list[str]]) -> list[str]:
    """The columns; with the layout what tells it from those that are alike in them."""
    differ = [each for each in range(4, len(own)) if len({other[each] for other in alike}) > 1]
    more = [own[each] for each in differ if own[each]]
    return [", ".join([own[0], *more]), *own[1:4]]


def _recompute_text(plan: Prediction) -> str:
    layers = plan.recipe.recompute_layers
    return plan.recipe.recompute if layers is None else f"{plan.recipe.recompute} of {layers}"


def sizing_view(sizing: Sizing) -> RenderableType:
    """The answer in a sentence, what every number of devices led to, and which of them no other beats."""
    wanted = {"gpus": "The fewest devices", "cost": "The lowest cost"}[sizing.goal.least]
    title = f"{wanted} in {sizing.goal.days:g} days, of up to {sizing.goal.most_devices:,} devices"
    searched = "Numbers of devices that were searched; * no other beats it in both days and cost"
    parts = [section(title, sizing.text), section(searched, _counts(sizing))]
    if sizing.illegal:
        parts.append(
            section(f"Without a layout for this batch: {', '.join(f'{each:,}' for each in sizing.illegal)}")
        )
    return Group(*parts)


def _counts(sizing: Sizing) -> RenderableType:
    columns = [("devices", ">"), ("", "<"), ("days", ">"), ("device-hours", ">"), ("USD", ">"), ("MFU", ">")]
    unbeaten = [each.devices for each in sizing.pareto]
    rows = [[f"{each.devices:,}", "*" if each.devices in unbeaten else "", *_count(each)] for each in sizing.tried]
    return table([*columns, ("", "<"), ("layout", "<")], rows)


def _count(each: Tried) -> list[str]:
    plan = each.plan
    if plan is None or plan.gpu_hours is None:
        return ["", "", "", "", "", "does not fit"]
    cost = "" if plan.cost_usd is None else count_text(plan.cost_usd)
    mfu = [f"{plan.mfu:.1%}", bar(plan.mfu, 10)]
    return [f"{each.days:,.1f}", count_text(plan.gpu_hours), cost, *mfu, degrees_text(plan)]
