"""What to try against a cause of a slow step: changes of the run's fields that the planner says help.

Each cause has changes that are known to act on it (the guides of Megatron-LM and TorchTitan name them; whether
one helps here is computed). A change is tried where it is legal; it is advice where it fits and the whole step is
shorter by `LEAST`, whatever it does to the cause alone."""

from collections.abc import Callable, Iterator
from typing import Any

from trainwright.plan.predict import predict
from trainwright.spec.answers import Prediction
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.explanation import RECOMPUTED, Try
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES

LEAST = 0.01
"""Of the predicted step."""
MOST = 3
"""Changes that are named for a cause."""

Change = dict[str, Any]
"""Values to set, by dotted field."""
Allowed = Callable[[Run], bool]


def tries(run: Run, cause: str, base: Prediction, allowed: Allowed = lambda run: True) -> tuple[Try, ...]:
    """The changes that help, the best first. `base` is the run's prediction; `allowed` says whether who will carry
    out the changed run can."""
    found: dict[str, Try] = {}
    for changes in CHANGES.get(cause, ()):
        for change in changes(run):
            tried = _tried(run, change, base, allowed)
            if tried is not None:
                found[tried.text] = tried
    return tuple(sorted(found.values(), key=lambda each: each.step_s)[:MOST])


def _tried(run: Run, change: Change, base: Prediction, allowed: Allowed) -> Try | None:
    try:
        changed = run.with_values(change.items()).check()
        if not allowed(changed):
            return None
        prediction = predict(changed)
    except InvalidSpec:
        return None
    # A changed batch has another step: what counts is the time of a token.
    step_s = prediction.step_s * run.recipe.tokens_per_step / changed.recipe.tokens_per_step
    if not prediction.fits or not step_s < (1 - LEAST) * base.step_s:
        return None
    return Try(fields=change, step_s=step_s, from_s=base.step_s)


def _micro_batches(run: Run) -> Iterator[Change]:
    for factor in (2, 4):
        yield {"recipe.micro_batch": run.recipe.micro_batch * factor}


def _smaller_micro_batch(run: Run) -> Iterator[Change]:
    if run.recipe.micro_batch % 2 == 0:
        yield {"recipe.micro_batch": run.recipe.micro_batch // 2}


def _lighter_recompute(run: Run) -> Iterator[Change]:
    if run.recipe.recompute != "none":
        yield {"recipe.recompute": "none"}
    if run.recipe.recompute == "full" and run.recipe.recompute_layers is None:
        yield {"recipe.recompute": "selective"}


def _faster_compute(run: Run) -> Iterator[Change]:
    recipe = run.recipe
    if not recipe.compile:
        yield {"recipe.compile": True}
    if recipe.attention_kernel != "flash" and not recipe.dropout:
        yield {"recipe.attention_kernel": "flash"}
    if recipe.loss_kernel != "fused":
        yield {"recipe.loss_kernel": "fused"}
    if run.model.is_moe and recipe.expert_matmuls != "grouped":
        yield {"recipe.expert_matmuls": "grouped"}


def _fewer_launches(run: Run) -> Iterator[Change]:
    if run.recipe.cuda_graphs != "full":
        yield {"recipe.cuda_graphs": "full"}
    if not run.recipe.compile:
        yield {"recipe.compile": True}


def _less(axis: str) -> Callable[[Run], Iterator[Change]]:
    """Half or a quarter of a degree, and as much more of dp."""

    def changes(run: Run) -> Iterator[Change]:
        degree = getattr(run.layout, axis)
        for factor in (2, 4):
            if degree % factor:
                continue
            change: Change = {f"layout.{axis}": degree // factor, "layout.dp": run.layout.dp * factor}
            if axis == "pp" and degree == factor:
                change["layout.vpp"] = 1
            yield change

    return changes


def _less_dp(run: Run) -> Iterator[Change]:
    for axis in ("tp", "cp", "pp"):
        if run.layout.dp % 2 == 0:
            yield {f"layout.{axis}": getattr(run.layout, axis) * 2, "layout.dp": run.layout.dp // 2}


def _less_ep(run: Run) -> Iterator[Change]:
    if run.layout.ep % 2 == 0:
        yield {"layout.ep": run.layout.ep // 2}


def _schedules(run: Run) -> Iterator[Change]:
    for vpp in (2, 4):
        yield {"layout.vpp": run.layout.vpp * vpp}
    for name in SCHEDULES:
        if name != run.recipe.schedule:
            yield {"recipe.schedule": name}
            yield {"recipe.schedule": name, "layout.vpp": 2}
            yield {"recipe.schedule": name, "layout.vpp": 1}


def _sharding(run: Run) -> Iterator[Change]:
    for zero in (0, 1, 2, 3):
        if zero != run.recipe.zero:
            yield {"recipe.zero": zero}
    if run.recipe.zero == 3 and run.recipe.reshard_after_forward:
        yield {"recipe.reshard_after_forward": False}
    node = run.cluster.node.devices
    if run.recipe.zero and run.layout.dp % node == 0 and run.layout.dp > node:
        yield {"recipe.dp_replicate": run.layout.dp // node}


def _overlap(axis: str) -> Callable[[Run], Iterator[Change]]:
    def changes(run: Run) -> Iterator[Change]:
        if not getattr(run.recipe.overlap, axis):
            yield {f"recipe.overlap.{axis}": True}

    return changes


def _cp_methods(run: Run) -> Iterator[Change]:
    for method in ("all_gather", "ring", "all_to_all"):
        if method != run.recipe.cp_method:
            yield {"recipe.cp_method": method}


def _sequence_parallel(run: Run) -> Iterator[Change]:
    if not run.recipe.sequence_parallel:
        yield {"recipe.sequence_parallel": True}


def _dispatch(run: Run) -> Iterator[Change]:
    if run.recipe.dispatch != "hierarchical":
        yield {"recipe.dispatch": "hierarchical"}


COMPUTE = (_micro_batches, _lighter_recompute, _faster_compute, _less("tp"))
PIPELINE = (_schedules, _smaller_micro_batch, _less("pp"), _overlap("pp"))

CHANGES: dict[str, tuple[Callable[[Run], Iterator[Change]], ...]] = {
    "compute": COMPUTE,
    "matmul": COMPUTE,
    RECOMPUTED: COMPUTE,
    "attention": (_faster_compute, _lighter_recompute),
    "elementwise": (_faster_compute, _lighter_recompute, _less("tp")),
    "tp": (_less("tp"), _overlap("tp"), _sequence_parallel),
    "cp": (_less("cp"), _cp_methods),
    "ep": (_less_ep, _overlap("ep"), _dispatch),
    "pp": PIPELINE,
    "bubble": PIPELINE,
    "dp": (_sharding, _overlap("dp"), _micro_batches, _less_dp),
    "optimizer": (_sharding, _less_dp),
    "host": (_fewer_launches, _micro_batches),
    "idle": (_fewer_launches, _micro_batches, _less("tp")),
}
"""By the causes of `spec/explanation.py`; what is not here (copies, unnamed) has no field that acts on it."""
