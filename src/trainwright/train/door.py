"""What the trainer doesn't do yet, said before anything is started: one line with field, value and remedy.

The planner covers more than the trainer builds. This file imports no PyTorch, so that a command can ask it
without a second's wait; the workers ask it again.
"""

from operator import attrgetter

from trainwright.spec.errors import reject
from trainwright.spec.model import GroupedQueryAttention, ModelSpec
from trainwright.spec.run import Run

TRAINED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
TRAINED_PRECISIONS = ("bf16", "fp32", "fp64")
TRAINED_SCHEDULES = ("1f1b", "interleaved_1f1b", "gpipe", "breadth_first")
SCHEDULES_OF_EXPERTS = ("1f1b", "interleaved_1f1b", "gpipe", "breadth_first")
"""A backward pass goes through a layer once: one that is split in two would send tokens back twice."""
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
    if run.model.is_moe:
        _require_experts(run)
    if layout.cp > 1:
        reject("layout.cp", layout.cp, "is planned but not trained yet; set layout.cp=1")
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


def _require_experts(run: Run) -> None:
    """What isn't trained beside experts, whether or not it is without them."""
    cp, schedule = run.layout.cp, run.recipe.schedule
    if cp > 1:
        # Capacity goes by the order of a sequence's positions, which cp may deal out of order.
        reject("layout.cp", cp, "is planned but not trained yet with experts; set layout.cp=1")
    if schedule not in SCHEDULES_OF_EXPERTS:
        known = ", ".join(SCHEDULES_OF_EXPERTS)
        reject("recipe.schedule", schedule, f"is planned but not trained yet with experts; use {known}")


def _remedy(trained: object) -> str:
    """What to write into the run file instead."""
    if trained is None:
        return "leave it out"
    if isinstance(trained, bool):
        return f"set it to {str(trained).lower()}"
    return f"use {', '.join(trained) if isinstance(trained, tuple) else trained}"


def _require_model(spec: ModelSpec) -> None:
    _only("model.norm_placement", spec.norm_placement, "pre")
    for field in ("zero_centered_norm", "parallel_residual", "scaled_embedding"):
        _only(f"model.{field}", getattr(spec, field), False)
    _only("model.learned_positions", spec.learned_positions, 0)
    _only("model.logit_softcap", spec.logit_softcap, None)
    _only("model.mtp_depth", spec.mtp_depth, 0)
    if spec.rope is not None:
        _only("model.rope.local_theta", spec.rope.local_theta, None)
        if spec.rope.scaling is not None and spec.rope.scaling.kind == "yarn":
            reject("model.rope.scaling.kind", "yarn", "is not trained yet; use llama3, linear or no scaling")
    place = "model.layer_groups.pattern"
    for layer in spec.layer_counts():
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, GroupedQueryAttention):
            reject(f"{place}.attention.kind", attention.kind, "is not trained yet; use gqa")
        _only(f"{place}.attention.sinks", attention.sinks, False)
        _only(f"{place}.attention.logit_softcap", attention.logit_softcap, None)
        if attention.qk_norm == "all_heads":
            reject(f"{place}.attention.qk_norm", attention.qk_norm, "is not trained yet; use none or per_head")
        if mlp.activation not in TRAINED_ACTIVATIONS:
            reject(
                f"{place}.mlp.activation",
                mlp.activation,
                f"is not trained yet; use {', '.join(TRAINED_ACTIVATIONS)}",
            )


def _only(field: str, value: object, trained: object) -> None:
    if value != trained:
        reject(field, value, f"is not trained yet; only {trained} is")
