"""Which operations, or layers of each stage, are recomputed so that the fullest rank stays within a budget of
bytes: what `recompute = "budget"` asks. (PyTorch's `activation_memory_budget` asks the like of a compiled graph,
as a fraction of its activations.)

Whatever a recipe can say of recompute is a policy (`table.Policy`): nothing, every set of operations that the
model has, every layer, the first n layers of each stage. All of them are the rows of one table, which know their
peak; of those within the budget the fastest is taken, its schedule played. The answer is an ordinary recipe, which
the trainer carries out like one that a user wrote.
"""

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from trainwright.plan.evaluation import Evaluation
from trainwright.plan.table import Policy, Table
from trainwright.spec.answers import RecomputeChoice
from trainwright.spec.errors import reject
from trainwright.spec.recipe import RECOMPUTE_OPS, Recipe, RecomputeOp
from trainwright.spec.run import Run, recomputable
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages
from trainwright.spec.units import bytes_text


class Resolved(NamedTuple):
    """A run whose recompute is said, and how it was chosen where it wasn't."""

    run: Run
    choice: RecomputeChoice | None = None


def resolved(run: Run) -> Resolved:
    """`run` with its recompute chosen, where that is left to a budget; a checked run gives a checked one.

    Raises `InvalidSpec` where no choice stays within `recompute_budget_bytes`. Where the budget is the device's
    memory, and nothing fits, the choice is the smallest: that a run doesn't fit is an answer.
    """
    recipe = run.recipe
    if recipe.recompute != "budget":
        return Resolved(run)
    said = recipe.recompute_budget_bytes
    budget_bytes = run.cluster.device.memory_bytes if said is None else said
    made = policies(run)
    evaluation = Evaluation(_table(run, made))
    peak_bytes = evaluation.peak_bytes
    within = np.flatnonzero(peak_bytes <= budget_bytes)
    if not len(within):
        least = int(np.argmin(peak_bytes))
        if said is not None:
            reject(
                "recipe.recompute_budget_bytes",
                said,
                f"is less than any recompute leaves; the least is {int(np.ceil(peak_bytes[least]))} "
                f"({bytes_text(float(peak_bytes[least]))}) with {_assignment(made[least])}",
            )
        within = np.flatnonzero(peak_bytes == peak_bytes[least])
    chosen = made[_fastest(evaluation, within)]
    fits = int((peak_bytes <= budget_bytes).sum())
    choice = RecomputeChoice(budget_bytes=float(budget_bytes), considered=len(made), within=fits)
    return Resolved(run.changed(recipe=_with(recipe, chosen)).check(), choice)


def policies(run: Run) -> tuple[Policy, ...]:
    """All that a recipe can say of recompute for this run's model and stages, the fewest operations first."""
    layout, recipe = run.layout, run.recipe
    ops: list[RecomputeOp] = [op for op in RECOMPUTE_OPS if recomputable(run.model)[op]]
    if layout.cp > 1 and recipe.cp_method == "all_to_all" and "latent_up" in ops:
        ops.remove("latent_up")  # gives up nothing there
    sets: list[tuple[RecomputeOp, ...]] = [
        chosen for count in range(1, len(ops) + 1) for chosen in combinations(ops, count)
    ]
    stages = SCHEDULES[recipe.schedule].num_stages(layout.pp, layout.vpp)
    most = max(map(len, layers_of_stages(run.model.num_layers, stages, layout.stage_layers)))
    parts = [Policy("full", layers=layers) for layers in range(1, most)]
    return (Policy(), *(Policy("selective", ops) for ops in sets), *parts, Policy("full"))


def _table(run: Run, made: tuple[Policy, ...]) -> Table:
    """The run once for each policy."""
    one = Table.of_run(run.changed(recipe=_with(run.recipe, Policy())))
    columns = one.columns.take(np.zeros(len(made), dtype=np.intp))
    return replace(one, columns=replace(columns, policy=np.arange(len(made), dtype=np.int64)), policies=made)


def _with(recipe: Recipe, policy: Policy) -> Recipe:
    return recipe.changed(
        recompute=policy.recompute,
        recompute_ops=policy.ops,
        recompute_layers=policy.layers,
        recompute_budget_bytes=None,
    )


def _fastest(evaluation: Evaluation, rows: np.ndarray) -> int:
    """The row of the shortest step, of equal ones that of the lowest peak, then the first; schedules are played
    only while a row's bound leaves it in the race."""
    best = (np.inf, np.inf, -1)
    for row in sorted(rows.tolist(), key=lambda row: evaluation.bound_s[row]):
        if evaluation.bound_s[row] > best[0]:
            break
        best = min(best, (evaluation.step_s(row), float(evaluation.peak_bytes[row]), row))
    return best[2]


def _assignment(policy: Policy) -> str:
    """How a recipe says it."""
    text = f"recompute={policy.recompute}"
    if policy.recompute == "selective":
        text += f", recompute_ops={list(policy.ops)}"
    return text if policy.layers is None else f"{text}, recompute_layers={policy.layers}"
