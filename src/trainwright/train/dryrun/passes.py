"""A whole step's counts from two shortened ones: all microbatches of a chunk but the first and the last are alike.

It imports no PyTorch, so that a command can refuse a number of microbatches without a second's wait.
"""

import math
from fractions import Fraction
from typing import TypeVar

from trainwright.spec.counts import Counts
from trainwright.spec.errors import reject
from trainwright.spec.model import MoeMlp
from trainwright.spec.run import Run

Key = TypeVar("Key")


def require_passes(run: Run, passes: int) -> None:
    """Refuse a number of microbatches from which a step can't be extended: where zero 2 reduces in rounds."""
    if run.recipe.zero != 2 or run.layout.vpp == 1 or run.recipe.schedule == "breadth_first":
        return
    if run.recipe.schedule != "interleaved_1f1b":
        why = f"can't be extended: {run.recipe.schedule} with zero=2 reduces in uneven rounds; leave it out"
        reject("--microbatches", passes, why)
    if passes % run.layout.pp:
        reject("--microbatches", passes, f"must be a multiple of pp={run.layout.pp}, a round of zero=2")


def require_even_choices(run: Run) -> None:
    """Refuse experts that a rank's tokens of a sequence can't all be given equally often: a dry run's choices are
    even, and the planner's numbers of rows are."""
    tokens = run.recipe.seq_len // (run.layout.cp * run.layout.tp)
    for layer in run.model.layer_counts():
        mlp = layer.mlp
        if isinstance(mlp, MoeMlp) and tokens * mlp.top_k % mlp.num_experts:
            chosen = f"{tokens:,} tokens of a rank choose {mlp.top_k} of {mlp.num_experts} experts"
            least = mlp.num_experts // math.gcd(mlp.num_experts, mlp.top_k) * run.layout.cp * run.layout.tp
            why = f"{chosen}, which can't be even, as a dry run's choices are; take a multiple of {least:,}"
            reject("recipe.seq_len", run.recipe.seq_len, why)


def extended(once: Counts, twice: Counts, more: Fraction) -> Counts:
    """The second of two shortened steps and `more` times what it has beyond the first."""

    def of(values: dict[Key, int], fewer: dict[Key, int]) -> dict[Key, int]:
        found = {key: value + more * (value - fewer.get(key, 0)) for key, value in values.items()}
        assert all(value.denominator == 1 for value in found.values()), "a step is made of equal parts"
        return {key: int(value) for key, value in found.items()}

    flops = of(
        {each.changed(flops=0): each.flops for each in twice.flops},
        {each.changed(flops=0): each.flops for each in once.flops},
    )
    messages = of(
        {each.changed(count=0): each.count for each in twice.collectives},
        {each.changed(count=0): each.count for each in once.collectives},
    )
    saved = of(
        {each.changed(bytes=0): each.bytes for each in twice.saved},
        {each.changed(bytes=0): each.bytes for each in once.saved},
    )
    return twice.changed(
        flops=tuple(each.changed(flops=value) for each, value in flops.items()),
        collectives=tuple(each.changed(count=value) for each, value in messages.items()),
        saved=tuple(each.changed(bytes=value) for each, value in saved.items()),
    )
