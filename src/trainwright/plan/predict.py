"""One run predicted: the table of length one, as a `Prediction`."""

from trainwright.plan.assembly import assembly
from trainwright.plan.causes import flops_recomputed, step_seconds
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.flops import computed_flops
from trainwright.plan.recompute_budget import resolved
from trainwright.plan.table import Table
from trainwright.spec.answers import Prediction, StageMemory
from trainwright.spec.cluster import Format
from trainwright.spec.errors import reject
from trainwright.spec.ledger import Ledger, SecondsCause
from trainwright.spec.model import FlopConvention
from trainwright.spec.run import Run
from trainwright.spec.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

CONVENTION: FlopConvention = "full"
"""What MFU counts, as most published figures do (PaLM, Megatron-LM)."""


def predict(run: Run) -> Prediction:
    """Memory, time and their causes for a run. Raises `InvalidSpec` where the run contradicts itself."""
    said, choice = resolved(run.check())
    tokens = None if run.budget is None else run.budget.tokens
    return prediction(Evaluation(Table.of_run(said)), 0, tokens).changed(recompute_choice=choice)


def prediction(evaluation: Evaluation, row: int, tokens: int | None) -> Prediction:
    """The `Prediction` of one row of a table."""
    table = evaluation.table
    layout, recipe = table.layout(row), table.recipe_of(row)
    stages = _stages(evaluation, row)
    fullest = max(stages, key=lambda stage: stage.ledger.total_bytes)
    seconds = _tidy(step_seconds(evaluation, row))
    fmt: Format = recipe.product_format(table.cluster)
    peak = table.cluster.peak(fmt)
    if peak is None:
        reject("recipe.precision", recipe.precision, f"{table.cluster.device.name} has no peak for it")
    flops = table.model.flops_per_token(recipe.seq_len, CONVENTION) * recipe.tokens_per_step / layout.world
    step_s = sum(seconds.values())
    again = flops_recomputed(evaluation, row)
    days = hours = cost = None
    if tokens is not None:
        total_s = -(-tokens // recipe.tokens_per_step) * step_s
        days, hours = total_s / SECONDS_PER_DAY, total_s * layout.world / SECONDS_PER_HOUR
        price = table.cluster.usd_per_device_hour
        cost = None if price is None else hours * price
    return Prediction(
        layout=layout,
        recipe=recipe,
        ledger=Ledger(seconds=seconds, bytes=fullest.ledger.bytes),
        stages=stages,
        mfu=flops / step_s / peak,
        hfu=(flops + again) / step_s / peak,
        convention=CONVENTION,
        peak_format=fmt,
        peak_flops_per_s=peak,
        model_flops_per_device=flops,
        computed=computed_flops(evaluation, row, CONVENTION),
        capacity_bytes=table.cluster.device.memory_bytes,
        gpu_hours=hours,
        days=days,
        cost_usd=cost,
    )


def _tidy(seconds: dict[SecondsCause, float]) -> dict[SecondsCause, float]:
    """Without the last digits' noise: a bubble of -1e-16 s is none."""
    return {cause: value if abs(value) > 1e-12 else 0.0 for cause, value in seconds.items()}


def _stages(evaluation: Evaluation, row: int) -> tuple[StageMemory, ...]:
    shape = evaluation.shape(row)
    layers = assembly(shape).ranks[:, : 2 * shape.num_kinds].sum(axis=1)
    return tuple(
        StageMemory(pp_rank=rank, layers=int(layers[rank]), ledger=Ledger(bytes=by_cause))
        for rank, by_cause in enumerate(evaluation.rank_bytes(row))
    )
