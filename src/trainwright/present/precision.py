"""Low precision for people: what each module computes in, and what it buys a plan, with what keeps it from the
ratio of the peaks."""

from collections.abc import Iterator

from rich.console import Group, RenderableType

from trainwright.present.parts import bullets, facts, section, table
from trainwright.spec.answers import Prediction
from trainwright.spec.gain import PrecisionGain
from trainwright.spec.model import ModelSpec
from trainwright.spec.modules import modules_of, operands_of, recipe_text
from trainwright.spec.recipe import Recipe
from trainwright.spec.units import bytes_text, count_text, scaled, seconds_text


def modules_view(model: ModelSpec, recipe: Recipe) -> RenderableType:
    """Each kind of module with its formats, and why."""
    rows = [[row.name, str(row.modules), *operands_of(row), row.why] for row in modules_of(model, recipe)]
    columns = [("module", "<"), ("", ">"), ("input", "<"), ("weight", "<"), ("gradient", "<"), ("why", "<")]
    kept = "masters fp64" if recipe.precision == "fp64" else "masters fp32"
    below = f"{kept}, gradients {recipe.gradient_format}, moments {recipe.optimizer.moments}"
    products = "Fprop multiplies input and weight, Dgrad gradient and weight, Wgrad gradient and input"
    return section("Precision", bullets([recipe_text(recipe), products, below]), table(columns, rows))


def gain_view(gain: PrecisionGain) -> RenderableType:
    """Time, memory and dollars beside those without, and why not more."""
    name, ratio = gain.plan.recipe.precision, gain.peak_ratio
    if gain.without is None or gain.speedup is None:
        return section(f"What {name} buys: a plan that fits; without it none does", bullets(_reasons(gain)))
    before = gain.without.recipe.precision
    title, why = f"What {name} buys: {gain.speedup:.2f}x the speed of {before}", f"Why it isn't {ratio:.2f}x"
    if gain.plan.recipe.emulate_precision:
        title, why = f"What {name} costs, emulated: {gain.speedup:.2f}x the speed of {before}", "Why"
    return Group(
        section(f"{title}; peak FLOP/s are {ratio:.2f}x", facts(_facts(gain, gain.without))),
        section(f"{why}: what each cause takes beyond its part", _causes(gain, gain.without)),
        section("Matmuls of a rank in both formats", _matmuls(gain, before)),
        section("Behind that", bullets(_reasons(gain))),
    )


def _facts(gain: PrecisionGain, plain: Prediction) -> Iterator[tuple[str, str]]:
    plan, before = gain.plan, plain.recipe.precision
    yield "step", f"{seconds_text(plain.step_s)} in {before}, {seconds_text(plan.step_s)} now"
    yield "memory", f"peak {bytes_text(plain.peak_bytes)} in {before}, {bytes_text(plan.peak_bytes)} now"
    changed = [
        f"{cause} {bytes_text(plain.ledger.bytes.get(cause, 0.0))} to {bytes_text(value)}"
        for cause, value in plan.ledger.bytes.items()
        if round(value) != round(plain.ledger.bytes.get(cause, 0.0))
    ]
    yield "", ", ".join(changed)
    dollars = [gain.usd_per_trillion_tokens(each) for each in (plain, plan)]
    if dollars[0] is not None and dollars[1] is not None:
        saved = dollars[0] - dollars[1]
        each = f"{count_text(dollars[0])} USD in {before}, {count_text(dollars[1])} now"
        yield "a trillion tokens", f"{each}: {count_text(abs(saved))} {'less' if saved >= 0 else 'more'}"
    if plain.cost_usd is not None and plan.cost_usd is not None:
        yield "the budget", f"{count_text(plain.cost_usd)} USD in {before}, {count_text(plan.cost_usd)} now"
    if gain.alike is not None:
        fits = "" if gain.alike.fits else f", and is short by {bytes_text(gain.alike.short_by_bytes)}"
        yield (
            f"{before}'s best",
            f"{_choices(plain)}; the plan's own takes {seconds_text(gain.alike.step_s)}{fits}",
        )


def _choices(plan: Prediction) -> str:
    layout, recipe = plan.layout, plan.recipe
    degrees = " x ".join(f"{axis} {layout.degree(axis)}" for axis in ("tp", "cp", "pp", "dp"))
    return f"{degrees}, zero {recipe.zero}, micro-batch {recipe.micro_batch}, recompute {recipe.recompute}"


def _causes(gain: PrecisionGain, plain: Prediction) -> RenderableType:
    before, now, ratio = plain.recipe.precision, gain.plan.recipe.precision, gain.peak_ratio
    rows = [
        [
            each.cause,
            seconds_text(each.plain_s),
            seconds_text(each.low_s),
            seconds_text(each.plain_s / ratio),
            seconds_text(each.beyond_s(ratio)),
        ]
        for each in sorted(gain.causes, key=lambda each: -each.beyond_s(ratio))
    ]
    whole = [plain.step_s, gain.plan.step_s, plain.step_s / ratio, gain.plan.step_s - plain.step_s / ratio]
    rows.append(["the step", *map(seconds_text, whole)])
    return table([("cause", "<"), (before, ">"), (now, ">"), (f"at {ratio:.2f}x", ">"), ("beyond", ">")], rows)


def _matmuls(gain: PrecisionGain, before: str) -> RenderableType:
    rows = [
        [
            each.name,
            f"{each.m:,.0f} x {each.k:,.0f} x {each.n:,.0f}"
            + (f", {each.groups:,.0f} experts" * (each.groups > 1)),
            scaled(each.plain_flops_per_s, "FLOP/s"),
            scaled(each.low_flops_per_s, "FLOP/s"),
            f"{each.speedup:.2f}x",
            f"{each.share:.1%}",
        ]
        for each in gain.matmuls
    ]
    now = gain.plan.recipe.precision
    columns = [("", "<"), ("m x k x n", ">"), (before, ">"), (now, ">"), ("faster", ">"), ("of matmuls", ">")]
    return table(columns, rows)


def _reasons(gain: PrecisionGain) -> Iterator[str]:
    share, ratio = gain.low_flops_share, gain.peak_ratio
    yield (
        f"{share:.1%} of the FLOPs that a rank computes are matmuls of linear layers and experts; attention, head "
        f"and routers stay as they were, so that FLOPs at peak allow {1 / (1 - share + share / ratio):.2f}x"
    )
    layer = gain.layer
    yield (
        f"a layer keeps {bytes_text(layer.low_bytes)} for backward of a microbatch in place of "
        f"{bytes_text(layer.plain_bytes)} in this layout, where nothing is recomputed"
    )
    if gain.gathers is not None:
        each = gain.gathers
        yield (
            f"weights are gathered in {gain.plan.recipe.activation_format}, {bytes_text(each.plain_bytes)} on the "
            f"fullest rank; recipe.gather_fp8=true gathers {bytes_text(each.low_bytes)} and makes the step "
            f"{seconds_text(each.step_s)}"
        )
