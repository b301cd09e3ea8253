"""What the trainer doesn't do yet, said before anything is started: one line with field, value and remedy.

The planner covers more than the trainer builds. This file imports no PyTorch, so that a command can ask it
without a second's wait; the workers ask it again.
"""

from operator import attrgetter

from trainwright.spec.errors import reject
from trainwright.spec.model import MoeMlp
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.window import StepWindow, require_inside

WARM_UP = 2
"""Steps that are slower than the rest, and in which memory is looked at (`train/watch.py`)."""
TRAINED_KERNELS = ("flash", "unfused")
TRAINED_PRECISIONS = ("bf16", "fp32", "fp64", *LOW_PRECISION)
MOST_BETA2_OF_BF16 = 1 - 2**-8
"""A second moment falls by 1 - beta2 at the most; bf16's spacing is up to 2^-7 of a value, of which half is
rounded away."""
TRAINED_CHOICES = {
    "fused_accumulation": False,
    "cuda_graphs": "none",
    "dispatch": "all_to_all",
    "dispatch_fp8": False,
    "activations_fp8": False,
    "optimizer.offload": False,
}
"""Fields of the recipe of which one value is trained: what the trainer does, or that it doesn't do a thing. A test
holds all fields of the recipe against this file, so that none is let through and ignored."""


def require_trainable(run: Run) -> None:
    """Raise `InvalidSpec` at the first field of a checked run that `train` can't carry out."""
    layout, recipe = run.layout, run.recipe
    for field, trained in TRAINED_CHOICES.items():
        value = attrgetter(field)(recipe)
        if value != trained:
            reject(f"recipe.{field}", value, f"is planned but not trained yet; {_remedy(trained)}")
    if recipe.recompute == "budget":
        why = "is resolved by the planner first (plan.recompute_budget.resolved), as every command does"
        reject("recipe.recompute", "budget", why)
    if recipe.compile and SCHEDULES[recipe.schedule].splits_backward:
        why = (
            f"is not trained yet with schedule={recipe.schedule}, which splits what is in a graph; set it to false"
        )
        reject("recipe.compile", True, why)
    if recipe.compile and recipe.is_low_precision:
        why = f"is not trained yet with precision={recipe.precision}, which runs as it is; set it to false"
        reject("recipe.compile", True, why)
    if recipe.precision not in TRAINED_PRECISIONS:
        known = ", ".join(TRAINED_PRECISIONS)
        reject("recipe.precision", recipe.precision, f"is planned but not trained yet; use {known}")
    if recipe.attention_kernel not in TRAINED_KERNELS:
        why = f"is planned but not trained yet; use {', '.join(TRAINED_KERNELS)}"
        reject("recipe.attention_kernel", recipe.attention_kernel, why)
    if recipe.dropout and recipe.attention_kernel != "unfused":
        why = "is not trained yet with flash attention, which has no weights to drop; set attention_kernel=unfused"
        reject("recipe.dropout", recipe.dropout, why)
    if layout.cp > 1 and recipe.cp_method != "all_to_all" and recipe.attention_kernel == "unfused":
        why = "adds up parts of flash attention; use all_to_all, or attention_kernel=flash"
        reject("recipe.cp_method", recipe.cp_method, why)
    if recipe.overlap.tp and layout.tp > 1:
        _require_plain_matmuls(recipe)
    if recipe.overlap.ep and not any(
        isinstance(layer.mlp, MoeMlp) and layer.mlp.d_ff_shared for layer in run.model.layer_counts()
    ):
        why = f"is trained behind shared experts alone, and {run.model.name} has none; set it to false"
        reject("recipe.overlap.ep", True, why)
    if recipe.gradient_format == "bf16":
        if recipe.activation_format != "bf16":
            why = f"is not trained yet with precision={recipe.precision}, whose gradients stay so; use fp32"
            reject("recipe.gradient_format", "bf16", why)
        if recipe.zero and layout.dp * layout.cp > recipe.dp_replicate:
            why = f"is not trained yet with zero={recipe.zero}, which sums shards in fp32; use fp32 or zero=0"
            reject("recipe.gradient_format", "bf16", why)
    _require_moments(recipe)
    if recipe.gather_fp8:
        _require_gathered_codes(run)
    makes_up = recipe.recompute == "selective" and "latent_up" in recipe.recompute_ops
    if makes_up and layout.cp > 1 and recipe.cp_method == "all_to_all":
        why = "gives up nothing with latent_up, as attention keeps the heads that came; use all_gather or ring"
        reject("recipe.cp_method", recipe.cp_method, why)
    if layout.cp > 1 and recipe.cp_method != "all_to_all":
        for layer in run.model.layer_counts():
            for field in ("sinks", "logit_softcap"):
                if getattr(layer.attention, field, None):
                    remedy = f"can't be merged with attention's {field} yet; use all_to_all"
                    reject("recipe.cp_method", recipe.cp_method, remedy)
    if recipe.zero and layout.dp * layout.cp > recipe.dp_replicate and not recipe.overlap.dp:
        reject("recipe.overlap.dp", False, "needs recipe.zero=0: sharded gathers always run beside compute")


def require_recordable(
    run: Run, steps: int, profiled: StepWindow | None, snapshot: StepWindow | None, steps_done: int = 0
) -> None:
    """Raise `InvalidSpec` where a window of steps can't be recorded, of a run that goes on after `steps_done`."""
    if profiled is not None:
        require_inside(profiled, "--profile", steps_done + WARM_UP + 1, steps)
    if snapshot is None:
        return
    require_inside(snapshot, "--memory-snapshot", steps_done + 1, steps)
    if run.cluster.device.kind == "cpu":
        why = "PyTorch records allocations of GPUs alone, and this run's devices are CPUs; leave it out"
        reject("--memory-snapshot", str(snapshot), why)


def _require_gathered_codes(run: Run) -> None:
    layout, recipe, low = run.layout, run.recipe, run.recipe.low_precision
    assert low is not None
    if not recipe.zero or layout.dp * layout.cp == recipe.dp_replicate:
        shards = layout.dp * layout.cp // recipe.dp_replicate
        nothing = f"with zero={recipe.zero} over {shards} rank(s) none is"
        why = f"is of parameters that are sharded, and {nothing}; set it to false"
        reject("recipe.gather_fp8", True, why)
    if low.weight.values == "e2m1":
        two = f"precision={recipe.precision}, two of whose values share a byte"
        why = f"is not trained yet with {two}; set it to false"
        reject("recipe.gather_fp8", True, why)
    if recipe.precision_fallback:
        why = "leaves no weights in bf16 for layers that fall back; set it or precision_fallback to false"
        reject("recipe.gather_fp8", True, why)


def _require_plain_matmuls(recipe: Recipe) -> None:
    """Of blocks whose matmuls run in parts (`train/parallel/collective_matmul.py`)."""
    for field, value, is_other in (
        ("precision", recipe.precision, recipe.is_low_precision),
        ("compile", True, recipe.compile),
    ):
        if is_other:
            why = f"is not trained yet with recipe.{field}={str(value).lower()}, whose matmuls stay whole"
            reject("recipe.overlap.tp", True, f"{why}; set it to false")


def _require_moments(recipe: Recipe) -> None:
    optimizer = recipe.optimizer
    if optimizer.moments != "fp32" and recipe.precision == "fp64":
        reject("recipe.optimizer.moments", optimizer.moments, "is not for fp64 runs, which keep fp64; use fp32")
    if optimizer.moments == "bf16" and optimizer.beta2 > MOST_BETA2_OF_BF16:
        reject(
            "recipe.optimizer.beta2",
            optimizer.beta2,
            f"is too near 1 for moments=bf16, whose rounding would keep the second moment from falling; use at "
            f"most {MOST_BETA2_OF_BF16} or moments=fp32",
        )


def _remedy(trained: object) -> str:
    """What to write into the run file instead."""
    if trained is None:
        return "leave it out"
    if isinstance(trained, bool):
        return f"set it to {str(trained).lower()}"
    return f"use {', '.join(trained) if isinstance(trained, tuple) else trained}"
