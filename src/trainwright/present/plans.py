"""What the planner answers, for people: the winning plan in words, memory and time by cause, the runners-up,
and why."""

from rich.console import Group, RenderableType

from trainwright.present.parts import bars, bullets, facts, headline, section, table
from trainwright.spec.answers import Answer, Prediction
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.layout import Layout
from trainwright.spec.model import CONVENTION_TEXT, ModelSpec
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run
from trainwright.spec.units import bytes_text, count_text, scaled, seconds_text

SHARDED_TEXT = {
    0: "nothing sharded over dp (zero 0)",
    1: "optimizer state sharded over dp (zero 1)",
    2: "optimizer state and gradients sharded over dp (zero 2)",
    3: "parameters, gradients and optimizer state sharded over dp (zero 3)",
}
RECOMPUTE_TEXT = {
    "none": "nothing recomputed",
    "selective": "attention recomputed in backward",
    "full": "every layer recomputed in backward",
}


def answer_view(question: Question, answer: Answer, search_s: float) -> RenderableType:
    """The answer of a search: the fastest plan in full, a table of the others, why."""
    searched = f"{answer.considered:,} plans considered, {answer.feasible:,} fit, in {seconds_text(search_s)}"
    parts: list[RenderableType] = [_headline(question.model, question.cluster, question.devices, question.recipe)]
    if answer.plans:
        parts.append(_plan(answer.plans[0], question.tokens, question.model.is_moe))
        if len(answer.plans) > 1:
            parts.append(section(f"The {len(answer.plans)} fastest ({searched})", _ranking(answer.plans)))
        else:
            parts.append(section(f"Searched: {searched}"))
    else:
        parts.append(section(f"Nothing is feasible: {searched}"))
    if answer.why:
        parts.append(section("Why", bullets(answer.why)))
    return Group(*parts)


def prediction_view(run: Run, prediction: Prediction) -> RenderableType:
    """One run as predicted."""
    tokens = run.budget.tokens if run.budget else None
    parts = [
        _headline(run.model, run.cluster, run.layout.world, run.recipe),
        _plan(prediction, tokens, run.model.is_moe),
    ]
    if not prediction.fits:
        parts.append(
            section(
                f"It does not fit: {bytes_text(prediction.short_by_bytes)} are missing on the fullest rank; "
                f"largest cause: {prediction.largest_bytes_cause}",
            )
        )
    return Group(*parts)


def _headline(model: ModelSpec, cluster: ClusterSpec, devices: int, recipe: Recipe) -> RenderableType:
    below = (
        f"{count_text(model.params)} parameters, {recipe.precision}, sequences of {recipe.seq_len:,} tokens, "
        f"{recipe.global_batch:,} of them ({count_text(recipe.tokens_per_step)} tokens) per step"
    )
    return headline(f"{model.name} on {devices:,} x {cluster.device.name} ({cluster.name})", below)


def _plan(plan: Prediction, tokens: int | None, is_moe: bool) -> RenderableType:
    return Group(
        section("Plan", facts(_plan_facts(plan, tokens, is_moe))),
        section(
            f"Memory of the fullest rank at its peak: {bytes_text(plan.peak_bytes)} of "
            f"{bytes_text(plan.capacity_bytes)}",
            bars(
                [(name, value, bytes_text(value)) for name, value in _shown(plan.ledger.bytes)],
                plan.capacity_bytes,
            ),
        ),
        section(
            f"Time of a step: {seconds_text(plan.step_s)}",
            bars([(name, value, seconds_text(value)) for name, value in _shown(plan.ledger.seconds)], plan.step_s),
        ),
    )


def _plan_facts(plan: Prediction, tokens: int | None, is_moe: bool) -> list[tuple[str, str]]:
    layout, recipe = plan.layout, plan.recipe
    per_device = plan.tokens_per_s_per_device
    peak = f"{scaled(plan.peak_flops_per_s, 'FLOP/s')} (dense {plan.peak_format} peak)"
    rows = [
        ("layout", layout_text(layout, is_moe)),
        ("recipe", recipe_text(recipe, layout)),
        ("step", seconds_text(plan.step_s)),
        ("speed", f"{count_text(per_device * layout.world)} tokens/s, {per_device:,.1f} per device"),
        ("work", f"{scaled(plan.flops_per_s_per_device, 'FLOP/s')} per device"),
        ("MFU", f"{plan.mfu:.1%} of {peak}; HFU {plan.hfu:.1%}"),
        ("", f"counted: {CONVENTION_TEXT[plan.convention]}"),
    ]
    if tokens is not None:
        rows.append(("budget", budget_text(plan, tokens)))
    return rows


def layout_text(layout: Layout, is_moe: bool) -> str:
    """The degrees in words; those of experts only where there are experts."""
    text = f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x dp {layout.dp}"
    if layout.vpp > 1:
        text += f", {layout.vpp} model chunks on each pipeline rank (vpp {layout.vpp})"
    if is_moe:
        text += f"; experts: ep {layout.ep} x etp {layout.etp}"
    return text


def recipe_text(recipe: Recipe, layout: Layout) -> str:
    """The choices of a recipe in words."""
    microbatches = recipe.global_batch // (recipe.micro_batch * layout.dp)
    parts = [
        f"micro-batch {recipe.micro_batch}",
        f"{microbatches:,} microbatch{'es' if microbatches > 1 else ''} per step and rank",
        SHARDED_TEXT[recipe.zero] if layout.dp * layout.cp > 1 else "no data parallelism",
        RECOMPUTE_TEXT[recipe.recompute],
    ]
    if layout.pp > 1:
        parts.append(f"{recipe.schedule} schedule")
    return ", ".join(parts)


def budget_text(plan: Prediction, tokens: int) -> str:
    """What the whole token budget takes."""
    parts = []
    if plan.gpu_hours is not None:
        parts.append(f"{count_text(plan.gpu_hours)} device-hours")
    if plan.days is not None:
        parts.append(f"{plan.days:,.1f} days")
    if plan.cost_usd is not None:
        parts.append(f"{count_text(plan.cost_usd)} USD")
    return f"{count_text(tokens)} tokens: " + ", ".join(parts)


def _shown(causes: dict) -> list[tuple[str, float]]:
    """The causes that have anything, largest first."""
    return sorted(((name, value) for name, value in causes.items() if value > 0), key=lambda row: -row[1])


def _ranking(plans: tuple[Prediction, ...]) -> RenderableType:
    moe = any(plan.layout.ep > 1 for plan in plans)
    degrees = ["tp", "cp", "pp", "vpp", *(["ep"] if moe else []), "dp"]
    columns = [(name, ">") for name in degrees]
    columns += [("micro", ">"), ("zero", ">"), ("recompute", "<")]
    columns += [("step", ">"), ("MFU", ">"), ("peak", ">")]
    rows = [
        [
            *(str(getattr(plan.layout, name)) for name in degrees),
            str(plan.recipe.micro_batch),
            str(plan.recipe.zero),
            plan.recipe.recompute,
            seconds_text(plan.step_s),
            f"{plan.mfu:.1%}",
            bytes_text(plan.peak_bytes),
        ]
        for plan in plans
    ]
    return table(columns, rows)
