"""What the trainer doesn't do yet, said before anything is started: one line with field, value and remedy.

The planner covers more than the trainer builds. This file imports no PyTorch, so that a command can ask it
without a second's wait; the workers ask it again.
"""

from operator import attrgetter

from trainwright.spec.errors import reject
from trainwright.spec.model import DenseMlp, ModelSpec
from trainwright.spec.run import Run

TRAINED_PRECISIONS = ("bf16", "fp32", "fp64")
TRAINED_SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe", "breadth_first")
TRAINED_CHOICES = {
    "gradient_format": "fp32",
    "fused_accumulation": False,
    "recompute_ops": ("attention",),
    "cp_method": "all_gather",
    "attention_kernel": "flash",
    "dropout": 0.0,
    "loss_kernel": "plain",
    "loss_chunks": 1,
    "cuda_graphs": "none",
    "capacity_factor": None,
    "expert_imbalance": 1.0,
    "expert_matmuls": "grouped",
    "dispatch": "all_to_all",
    "dispatch_fp8": False,
    "gather_fp8": False,
    "activations_fp8": False,
    "optimizer.name": "adamw",
    "optimizer.moments": "fp32",
    "optimizer.offload": False,
    "overlap.tp": False,
    "overlap.ep": False,
}
"""Fields of the recipe of which one value is trained: what the trainer does, or that it doesn't do a thing. A test
holds all fields of the recipe against this file, so that none is let through and ignored."""


def require_trainable(run: Run) -> None:
    """Raise `InvalidSpec` at the first field of a checked run that `train` can't carry out."""
    _require_model(run.model)
    layout, recipe = run.layout, run.recipe
    for axis in ("cp", "ep", "etp"):
        if getattr(layout, axis) > 1:
            reject(f"layout.{axis}", getattr(layout, axis), f"is planned but not trained yet; set layout.{axis}=1")
    for field, trained in TRAINED_CHOICES.items():
        value = attrgetter(field)(recipe)
        if value != trained:
            reject(f"recipe.{field}", value, f"is planned but not trained yet; {_remedy(trained)}")
    for field, known in {"precision": TRAINED_PRECISIONS, "schedule": TRAINED_SCHEDULES}.items():
        if getattr(recipe, field) not in known:
            value = getattr(recipe, field)
            reject(f"recipe.{field}", value, f"is planned but not trained yet; use {', '.join(known)}")
    if recipe.zero and layout.dp > recipe.dp_replicate and not recipe.overlap.dp:
        reject("recipe.overlap.dp", False, "needs recipe.zero=0: sharded gathers always run beside compute")


def _remedy(trained: object) -> str:
    """What to write into the run file instead."""
    if trained is None:
        return "leave it out"
    if isinstance(trained, bool):
        return f"set it to {str(trained).lower()}"
    return f"use {', '.join(trained) if isinstance(trained, tuple) else trained}"


def _require_model(spec: ModelSpec) -> None:
    for layer in spec.layer_counts():
        if not isinstance(layer.mlp, DenseMlp):
            reject("model.layer_groups.pattern.mlp.kind", layer.mlp.kind, "is not trained yet; use dense")
