"""What the planner answers, for people: the winning plan in words, memory and time by cause, the runners-up,
and why."""

from rich.console import Group, RenderableType

from trainwright.present.diagnosis import diagnosis_view
from trainwright.present.fronts import pareto_section, sizing_view
from trainwright.present.parts import bars, bullets, facts, headline, section, table
from trainwright.present.waterfall import waterfall_section
from trainwright.spec.answers import Answer, Prediction, RecomputeChoice
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.diagnosis import Diagnosis
from trainwright.spec.layout import Layout
from trainwright.spec.model import CONVENTION_TEXT, ModelSpec
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run
from trainwright.spec.sizing import Sizing
from trainwright.spec.stages import sizes_text
from trainwright.spec.units import SECONDS_PER_DAY, bytes_text, count_text, scaled, seconds_text

SHARDED_TEXT = {
    0: "nothing sharded over dp (zero 0)",
    1: "optimizer state sharded over dp (zero 1)",
    2: "optimizer state and gradients sharded over dp (zero 2)",
    3: "parameters, gradients and optimizer state sharded over dp (zero 3)",
}
RECOMPUTED_TEXT = {
    "attention": "attention",
    "norm": "norms",
    "activation": "activations",
    "latent_up": "up-projections of latents",
    "mlp": "MLPs",
    "moe": "experts with their dispatch",
}


def plan_view(
    question: Question, answer: Answer, search_s: float, sizing: Sizing | None, diagnosis: Diagnosis | None
) -> RenderableType:
    """All that `plan` answers: how many devices, where that was asked; the plans; why nothing fits."""
    parts = [] if sizing is None else [sizing_view(sizing)]
    if sizing is None or answer.plans:
        parts.append(answer_view(question, answer, search_s))
    if diagnosis is not None:
        parts.append(diagnosis_view(diagnosis))
    return Group(*parts)


def answer_view(question: Question, answer: Answer, search_s: float) -> RenderableType:
    """The answer of a search: the fastest plan in full, a table of the others, why."""
    judged = f"{answer.judged:,} of them judged, " if answer.judged < answer.considered else ""
    searched = (
        f"{answer.considered:,} plans considered, {judged}{answer.feasible:,} fit, in {seconds_text(search_s)}"
    )
    parts: list[RenderableType] = [_headline(question.model, question.cluster, question.devices, question.recipe)]
    if answer.plans:
        parts.append(_plan(answer.plans[0], question.tokens, question.model.is_moe))
        if len(answer.plans) > 1:
            parts.append(section(f"The {len(answer.plans)} fastest ({searched})", _ranking(answer.plans)))
        else:
            parts.append(section(f"Searched: {searched}"))
        if len(answer.pareto) > 1:
            parts.append(pareto_section(answer.pareto))
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
        waterfall_section(prediction),
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
        *([("stages", f"{sizes_text(layout.stage_layers)} layers")] if layout.stage_layers else []),
        ("recipe", recipe_text(recipe, layout)),
        *_recompute_facts(plan.recompute_choice),
        ("step", seconds_text(plan.step_s)),
        *_band_facts(plan),
        ("speed", f"{count_text(per_device * layout.world)} tokens/s, {per_device:,.1f} per device"),
        ("work", f"{scaled(plan.flops_per_s_per_device, 'FLOP/s')} per device"),
        ("MFU", f"{plan.mfu:.1%} of {peak}; HFU {plan.hfu:.1%}"),
        ("", f"counted: {CONVENTION_TEXT[plan.convention]}"),
    ]
    if tokens is not None:
        rows.append(("budget", budget_text(plan, tokens)))
        rows += failures_facts(plan)
    return rows


def _recompute_facts(choice: RecomputeChoice | None) -> list[tuple[str, str]]:
    """How the recompute was chosen, where it was left to a budget."""
    if choice is None:
        return []
    ways = f"{choice.considered:,} ways to recompute, of which {choice.within:,} stay"
    told = "the fastest" if choice.within else "the smallest"
    return [("", f"recompute is {told} of {ways} within {bytes_text(choice.budget_bytes)}")]


def _band_facts(plan: Prediction) -> list[tuple[str, str]]:
    """Where measured steps lie, and what makes that less certain."""
    if plan.band is None:
        return []
    band = plan.band
    between = f"{seconds_text(band.low_s)} to {seconds_text(band.high_s)}"
    rows = [("", f"{between} holds {band.share:.0%} of measured steps of such runs")]
    return rows + [("", f"note: {note}") for note in band.notes]


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
        _sharded_text(recipe) if layout.dp * layout.cp > 1 else "no data parallelism",
        recompute_text(recipe),
    ]
    if layout.pp > 1:
        parts.append(f"{recipe.schedule} schedule")
    return ", ".join(parts)


def _sharded_text(recipe: Recipe) -> str:
    text = SHARDED_TEXT[recipe.zero]
    if recipe.zero == 3 and not recipe.reshard_after_forward:
        text += ", gathered until backward"
    return text if recipe.dp_replicate == 1 else f"{text} in {recipe.dp_replicate} replicas (HSDP)"


def recompute_text(recipe: Recipe) -> str:
    """What is computed again in backward, in words."""
    if recipe.recompute == "none":
        return "nothing recomputed"
    if recipe.recompute == "budget":
        return "recomputed as a budget of bytes asks"
    if recipe.recompute == "selective":
        return f"{', '.join(RECOMPUTED_TEXT[op] for op in recipe.recompute_ops)} recomputed in backward"
    if recipe.recompute_layers is None:
        return "every layer recomputed in backward"
    return f"{recipe.recompute_layers} layer(s) of each stage recomputed in backward"


def budget_text(plan: Prediction, tokens: int) -> str:
    """What the whole token budget takes."""
    return f"{count_text(tokens)} tokens: {_totals_text(plan.gpu_hours, plan.days, plan.cost_usd)}"


def failures_facts(plan: Prediction) -> list[tuple[str, str]]:
    """What it takes where nodes fail, and how that was reckoned."""
    failing = plan.with_failures
    if failing is None:
        return []
    totals = _totals_text(failing.gpu_hours, failing.days, failing.cost_usd)
    often = f"a failure every {seconds_text(failing.mttf_s)}, a save every {seconds_text(failing.interval_s)}"
    return [("", f"with failures: {totals}"), ("", f"({often}: {failing.ettr:.1%} of the time counts)")]


def _totals_text(gpu_hours: float | None, days: float | None, cost_usd: float | None) -> str:
    parts = []
    if gpu_hours is not None:
        parts.append(f"{_amount_text(gpu_hours)} device-hours")
    if days is not None:
        parts.append(f"{days:,.1f} days" if days >= 0.05 else seconds_text(days * SECONDS_PER_DAY))
    if cost_usd is not None:
        parts.append(f"{_amount_text(cost_usd)} USD")
    return ", ".join(parts)


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


def _amount_text(amount: float) -> str:
    """Whole, but of small ones two digits."""
    return count_text(amount) if amount >= 10 or not amount else f"{amount:.2g}"
