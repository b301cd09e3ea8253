"""Parts that attention, MLPs and the head share: projections with their casts, norms, and the ways into and out of
tensor-parallel regions.

With sequence parallelism a gathered input is not kept: its shard is, and backward gathers it again
(arXiv:2205.05198 s4.2.2). Under fp8 and fp4 recipes a projection reads cast copies of its input: one with scales
along what its product sums, which it drops, and one with scales along the tokens, which it keeps for the weight
gradient. Where backward gathers the input again, its shard is kept as it is, and cast there.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.agreement import ALONG_OUTPUT, Again, Cut, agreements
from trainwright.plan.operations import Collective, Elementwise, Matmul, Operation, Saved
from trainwright.plan.table import FULL, Floats, Table, marks
from trainwright.spec.cluster import CollectiveOp

NORM = marks("norm")
ACTIVATION = marks("activation")

EMBEDDING = "embedding"
"""Leaves a lookup, which is no matmul."""

WIDE_BYTES = {"bf16": 2, "fp32": 4}
"""Of a value in an emulated product."""

ROUNDING_BYTES, ROUNDING_KERNELS = 25, 8
"""Traffic of rounding a bf16 value by operators one after another (train/precision/quantized.py): its magnitude (4
bytes), the block's largest (2), scaled to fp32 (6), kept within range (8), rounded (5)."""
WIDENING_BYTES, WIDENING_KERNELS = 19, 5
"""And of making it bf16 again: looked up two at a time (7), times its scale in fp32 (6), rounded to bf16 (6)."""

FUSED_SHOWN = 0.53
"""Of the traffic of sums that a matmul adds up itself, what makes it longer: fits 183 matmuls of A100
(MooreThreads/SimuMax configs/system/a100_pcie.json) to 1.4% in the median."""


def of(table: Table, value: float) -> Floats:
    """`value` for every row."""
    return np.full(len(table.columns), float(value))


def normed(table: Table) -> int:
    """Marks under which what a branch reads is made again by its norm: none where its norms stand behind it."""
    return 0 if table.model.norm_placement == "post" else NORM


def norm(table: Table, again: int = 0) -> Elementwise:
    """A norm of the residual stream: keeps its input, and a statistic per token in fp32 at least."""
    residual_bytes = table.residual_tokens * table.model.d_model * table.recipe.compute_bytes
    # LayerNorm keeps a mean too.
    numbers = 2 if table.model.norm == "layernorm" else 1
    statistics = numbers * statistic_bytes(table) * table.residual_tokens
    saved = (
        Saved(residual_bytes, again & ~NORM),
        Saved(statistics, again & ~NORM, is_statistic=True),
    )
    return Elementwise("norm", 2 * residual_bytes, 3 * residual_bytes, saved, again)


def statistic_bytes(table: Table) -> int:
    """Of a number that a norm keeps: fp32 at least, but of a CPU's LayerNorm the format of its input."""
    size = table.recipe.compute_bytes
    return size if table.model.norm == "layernorm" and table.cluster.device.kind == "cpu" else max(size, 4)


def residual(table: Table, again: int = 0) -> Elementwise:
    """A branch is added to the residual stream; with dropout its mask is kept, a byte per value."""
    values = table.residual_tokens * table.model.d_model
    moved = 3 * values * table.recipe.compute_bytes
    mask = (Saved(values, again),) if table.recipe.dropout else ()
    return Elementwise("residual", moved + values * bool(mask), moved + values * bool(mask), mask, again)


def projection(
    table: Table,
    name: str,
    k: float,
    n: Floats,
    *,
    reads: int = 0,
    again: int = 0,
    gathered: bool = True,
    save_input: bool = True,
    cast_input: bool | None = None,
    cut: Cut = ALONG_OUTPUT,
    whole: int | None = None,
    output_again: bool = False,
) -> tuple[Operation, ...]:
    """A projection of the residual stream (whose shard is saved), or of a latent that every rank holds whole.

    reads: marks under which its input is made again in backward, and so not kept. cast_input: whether it is the
    first to read its input in a low format; where it saves it, unless said otherwise. cut: which ranks have parts
    of its tensors. whole: marks under which its block runs again with copies of its input; those of `again` unless
    said otherwise. output_again: what is made again is its output, and not what it keeps.
    """
    saved = ()
    if save_input:
        saved = kept_input(table, k, reads, again, gathered=gathered, is_cast_again=not output_again)
    matmul = Matmul(name, table.tokens, of(table, k), n, saved, again, shares_input=not save_input)
    is_first = save_input if cast_input is None else cast_input
    there = input_again(table, again if whole is None else whole) if gathered else None
    asked = agreements(table, matmul, cut, is_first=is_first, there=there)
    return (*asked, *casts(table, matmul, cast_input=is_first), matmul)


def input_again(table: Table, whole: int) -> Again:
    """Where backward has the normed input of a block: gathered, or made by its norm; not if the whole block is
    recomputed, under these marks."""
    return Again(is_gathered_again(table), normed(table), whole)


def kept_input(
    table: Table, k: Floats | float, reads: int, again: int, *, gathered: bool, is_cast_again: bool = True
) -> tuple[Saved, ...]:
    """What a projection keeps of its input, (tokens, k), for the weight gradient. gathered: the input comes out of
    a gather over tp, where there is one. Where the projection itself runs again, its input is kept as it came, in
    the place of a cast copy, or beside it."""
    size = table.recipe.compute_bytes
    plain: Floats = (table.residual_tokens if gathered else table.tokens) * k * size
    if not table.recipe.is_low_precision:
        return (Saved(plain, reads),)
    again &= ~FULL
    dropped_by = reads | again if is_cast_again else reads
    copy, is_shard = quantized(table, table.tokens, k, dropped_by), is_gathered_again(table) & gathered
    kept = [copy._replace(bytes=np.where(is_shard, 0.0, copy.bytes))]
    if is_shard.any():
        kept.append(Saved(np.where(is_shard, plain, 0.0), reads))
    if again:
        kept.append(Saved(np.where(is_shard, 0.0, plain), reads, only_under=again))
    return tuple(kept)


def is_gathered_again(table: Table) -> NDArray[np.bool_]:
    """Rows in which backward gathers over tp what projections of the residual stream read."""
    return (table.columns.tp > 1) & table.recipe.sequence_parallel


def quantized(
    table: Table, rows: Floats, k: Floats | float, dropped_by: int, groups: Floats | float = 1.0
) -> Saved:
    """A low-precision copy of `groups` tensors of (rows, k) with scales along the rows, of which a transform has
    whole groups."""
    low = table.recipe.low_precision
    assert low is not None, "the recipe has a low precision"
    if low.hadamard:
        rows = np.ceil(rows / low.hadamard) * low.hadamard
    return Saved(groups * low.activation.num_bytes(rows, k), dropped_by, is_quantized=True)


def casts(table: Table, matmul: Matmul, *, cast_input: bool = True) -> tuple[Elementwise, ...]:
    """Casts of a matmul's input forward and of its output's gradient backward, each in both orientations that the
    matmuls read. Emulated, each product's operands are made wide again: read as they were cast, and written."""
    recipe = table.recipe
    low = recipe.low_precision
    if low is None:
        return ()
    groups = 1.0 if matmul.groups is None else matmul.groups
    inputs, outputs, weights = matmul.m * matmul.k * groups, matmul.m * matmul.n * groups, matmul.weights
    per_input, per_output = (
        recipe.compute_bytes + 2 * each.value_bytes for each in (low.activation, low.gradient)
    )
    name, again = matmul.name, matmul.again
    if not recipe.emulate_precision:
        forward, backward = inputs * per_input * cast_input, outputs * per_output
        return (Elementwise(f"cast {name}", forward, backward, again=again, quantizes=True),)
    once = 1 if low.activation.is_per_tensor else 2  # One rounding serves both orientations.
    rounded = Elementwise(
        f"cast {name}",
        inputs * once * ROUNDING_BYTES * cast_input,
        outputs * once * ROUNDING_BYTES,
        again=again,
        kernels=ROUNDING_KERNELS,
        quantizes=True,
    )
    read = WIDENING_BYTES + 2 * (WIDE_BYTES[recipe.product_format(table.cluster)] - 2)
    forward, backward = (inputs + weights) * read, (2 * outputs + inputs + weights) * read
    widened = Elementwise(
        f"widen {name}", forward, backward, again=again, kernels=2 * WIDENING_KERNELS, quantizes=True
    )
    return (rounded, widened)


def entry(table: Table, where: str, again: int = 0, *, keeps: int | None = None) -> tuple[Operation, ...]:
    """Into a tensor-parallel region. With sequence parallelism the input is gathered, in backward once more
    for the weight gradient, and its gradient is reduce-scattered; without, its gradient is all-reduced. keeps: the
    marks under which it needn't be gathered once more, those of `again` unless said otherwise."""
    message, goes_round = table.tokens * table.model.d_model * table.recipe.compute_bytes, table.recipe.overlap.tp
    if table.recipe.sequence_parallel:
        ways: tuple[tuple[CollectiveOp, ...], ...] = (("all_gather",), ("reduce_scatter",))
        gather = Collective(f"{where} in", "tp", *ways, message, again, goes_round=goes_round)
        # Of a block that is recomputed whole the gathered input is there for the weight gradients too.
        absent = again if keeps is None else keeps
        once_more = Collective(
            f"{where} in once more", "tp", (), ("all_gather",), message, absent=absent, goes_round=goes_round
        )
        return (gather, once_more, _reorder(table, message, forward=1, backward=2))
    return (Collective(f"{where} in", "tp", (), ("all_reduce",), message, again),)


def ending(table: Table, whole: int) -> dict[str, Any]:
    """What stands at the end of an MLP that is recomputed as a whole under these marks. In a recomputed layer a
    norm or a mask may follow."""
    follows = table.model.norm_placement != "pre" or bool(table.recipe.dropout)
    return {"ends_under": whole & ~FULL if follows else whole, "again_anew": whole | ACTIVATION}


def leave(
    table: Table, where: str, again: int = 0, *, ends: dict[str, Any] | None = None
) -> tuple[Operation, ...]:
    """Out of a tensor-parallel region: partial sums are added up. ends: what `ending` says, where it stands at
    one."""
    last = {"goes_round": table.recipe.overlap.tp and where != EMBEDDING, **(ends or {})}
    message = table.tokens * table.model.d_model * table.recipe.compute_bytes
    if table.recipe.sequence_parallel:
        scatter = Collective(f"{where} out", "tp", ("reduce_scatter",), ("all_gather",), message, again, **last)
        return (_reorder(table, message, forward=1, backward=1), scatter)
    return (Collective(f"{where} out", "tp", ("all_reduce",), (), message, again, **last),)


def _reorder(table: Table, message: Floats, *, forward: int, backward: int) -> Elementwise:
    """Collectives join parts end to end; sequences of a microbatch beyond the first need a copy to lie right."""
    moved = 2 * message * ((table.columns.tp > 1) & (table.columns.micro_batch > 1))
    return Elementwise("reorder", forward * moved, backward * moved, kernels=0)


def accumulation(table: Table, params: Floats) -> Elementwise:
    """Each microbatch's weight gradients are added to those of the step: read, and the sum read and written;
    inside the matmuls that make them, the part of it that stays visible."""
    moved = params * (table.recipe.compute_bytes + 2 * table.recipe.gradient_bytes)
    if table.recipe.fused_accumulation:
        moved = FUSED_SHOWN * params * 2 * table.recipe.gradient_bytes
    return Elementwise("gradient accumulation", 0 * moved, moved, kernels=0, streams=True, of_weights=True)
