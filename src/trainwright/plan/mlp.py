"""The MLP of one layer: dense, or a router with experts, shared experts beside them.

Experts run on the tokens that reach their rank: with balanced routing as many copies as the rank sends out itself;
with a capacity factor that many times more, padded; dropless, the busiest rank has `Recipe.expert_imbalance` times
the mean, and the others wait for it. Routing weights are applied between the activation and the down projection.
Tokens leave from the sequence-parallel region, so that tp ranks dispatch different ones; ranks of one expert (etp)
gather one another's tokens.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from trainwright.plan.agreement import ALONG_INPUT, OF_EXPERTS, OUT_OF_EXPERTS, agreements
from trainwright.plan.linear import (
    ACTIVATION,
    casts,
    ending,
    entry,
    is_gathered_again,
    leave,
    normed,
    of,
    projection,
    quantized,
)
from trainwright.plan.operations import Collective, Dispatch, Elementwise, Matmul, Operation, Saved
from trainwright.plan.table import FULL, Floats, Table, marks
from trainwright.spec.model import DenseMlp, MoeMlp

MLP = FULL | marks("mlp")
MOE = FULL | marks("moe")
SHARED = "shared experts"


def dense_operations(
    table: Table, mlp: DenseMlp, whole: int = MLP, where: str = "mlp", *, follows: bool = False
) -> tuple[Operation, ...]:
    """From the normed input to the down projection, with the collectives of tp around it. follows: something reads
    its output, and keeps it, inside of what is recomputed."""
    width = mlp.d_ff / table.columns.tp
    d_model = table.model.d_model
    # Shared experts read what the router has saved; a cast copy comes on top where backward doesn't gather it.
    first, of_shared = where != SHARED, "shared " if where == SHARED else ""
    up = projection(
        table,
        f"{of_shared}up",
        d_model,
        width,
        reads=FULL | normed(table),
        again=whole,
        save_input=first,
        cast_input=True,
        whole=whole if first else FULL,
    )
    if not first and table.recipe.is_low_precision:
        copy = quantized(table, table.tokens, d_model, whole | normed(table))
        copy = copy._replace(bytes=np.where(is_gathered_again(table), 0.0, copy.bytes))
        up = (*up[:-1], replace(up[-1], saved=(copy,), shares_input=False))
    gate = (
        projection(table, f"{of_shared}gate", d_model, width, again=whole, save_input=False) if mlp.gated else ()
    )
    last = whole if follows else FULL
    ends: dict[str, Any] = {"again_anew": whole | ACTIVATION} if follows else ending(table, whole)
    down = Matmul(f"{of_shared}down", table.tokens, width, of(table, d_model), again=last, **ends)
    return (
        *entry(table, where, whole, keeps=whole if first else FULL),
        *up,
        *gate,
        activation(table, table.tokens, width, gated=mlp.gated, whole=whole),
        *agreements(table, down, ALONG_INPUT),
        *casts(table, down),
        down,
        *leave(table, where, last, ends=ends),
    )


def activation(
    table: Table, rows: Floats, width: Floats, *, gated: bool, whole: int, groups: Floats | float = 1.0
) -> Elementwise:
    """Saved: what the activation reads (gate and up, or one), and the product that the down projection reads.
    `groups` experts have so many rows each."""
    size, matrices = table.recipe.compute_bytes, 2 if gated else 1
    recipe, values = table.recipe, rows * width * groups
    product = Saved(values * size, whole | ACTIVATION)
    if recipe.is_low_precision:
        product = quantized(table, rows, width, whole | ACTIVATION, groups)
    read = matrices * values * (recipe.matmul_bytes if recipe.activations_fp8 else size)
    saved = (Saved(read, whole), product)
    moved = values * size
    return Elementwise("activation", (matrices + 1) * moved, (2 * matrices + 1) * moved, saved, whole | ACTIVATION)


def moe_operations(table: Table, mlp: MoeMlp) -> tuple[Operation, ...]:
    """Router, dispatch, experts, combination; shared experts see every token."""
    recipe, d_model, size = table.recipe, table.model.d_model, table.recipe.compute_bytes
    tokens, etp = table.residual_tokens, table.columns.etp
    sent = tokens * mlp.top_k * (recipe.capacity_factor or 1.0)
    rows = tokens * mlp.top_k * load(table) * etp
    experts = mlp.num_experts / table.columns.ep
    width = mlp.d_ff / etp
    copy_bytes = d_model * size
    router = Matmul(
        "router",
        tokens,
        of(table, d_model),
        of(table, mlp.num_experts),
        (
            Saved(tokens * d_model * size, FULL | normed(table)),
            Saved(tokens * mlp.num_experts * max(size, 4), MOE),
        ),
        MOE,
        in_low_precision=False,
    )
    choice = Elementwise(
        "routing", 24 * tokens * mlp.num_experts, 16 * tokens * mlp.num_experts, again=MOE, kernels=12
    )
    # Into the order of experts and back; a second time where a rank holds several. Kernels of hierarchical
    # dispatch do the first themselves.
    first = 0 if recipe.dispatch == "hierarchical" else 4
    moved = first * sent * copy_bytes + 4 * rows * copy_bytes * (experts > 1)
    permute = Elementwise("permute", moved, moved, again=MOE, kernels=6)
    copies = mlp.top_k * (recipe.capacity_factor or 1.0)
    low_bytes = d_model * recipe.matmul_bytes if recipe.dispatch_fp8 else copy_bytes
    out = Dispatch("dispatch", tokens, copies, low_bytes, copy_bytes, MOE, mlp.num_experts)
    back = Dispatch("combine", tokens, copies, copy_bytes, low_bytes, MOE)
    return (
        router,
        choice,
        permute,
        out,
        *_gather_over_etp(table, rows * copy_bytes, "all_gather", "reduce_scatter"),
        *_experts(table, mlp, rows, experts, width),
        *_gather_over_etp(table, rows * copy_bytes, "reduce_scatter", "all_gather"),
        back,
        *_shared(table, mlp),
    )


def load(table: Table) -> Floats:
    """Tokens of the busiest rank's experts, over the mean: no rank can have all of more than its ep group's."""
    recipe = table.recipe
    if recipe.capacity_factor is not None:
        return np.full(len(table.columns), recipe.capacity_factor)
    return np.minimum(recipe.expert_imbalance, table.columns.ep).astype(np.float64)


def _experts(table: Table, mlp: MoeMlp, rows: Floats, experts: Floats, width: Floats) -> tuple[Operation, ...]:
    d_model, recipe = table.model.d_model, table.recipe
    each = rows / experts
    saved = (Saved(rows * d_model * recipe.compute_bytes, MOE),)
    if recipe.is_low_precision:
        saved = (quantized(table, each, d_model, MOE, experts),)
    alike = {"groups": experts, "has_bias": mlp.bias, "is_sequential": recipe.expert_matmuls == "sequential"}
    up = Matmul("expert up", each, of(table, d_model), width, saved, MOE, **alike)
    gate = ()
    if mlp.gated:
        gate = (Matmul("expert gate", each, of(table, d_model), width, (), MOE, shares_input=True, **alike),)
    down = Matmul("expert down", each, width, of(table, d_model), (), MOE, again_anew=ACTIVATION, **alike)
    biased = _biases(table, mlp, rows, width)
    gate_casts = tuple(cast for matmul in gate for cast in casts(table, matmul, cast_input=False))
    gate_asks = tuple(ask for matmul in gate for ask in agreements(table, matmul, OF_EXPERTS, is_first=False))
    return (
        *agreements(table, up, OF_EXPERTS),
        *casts(table, up),
        up,
        *gate_asks,
        *gate_casts,
        *gate,
        activation(table, each, width, gated=mlp.gated, whole=MOE, groups=experts),
        *agreements(table, down, OUT_OF_EXPERTS),
        *casts(table, down),
        down,
        *biased,
    )


def _biases(table: Table, mlp: MoeMlp, rows: Floats, width: Floats) -> tuple[Elementwise, ...]:
    """Biases of experts are passes of their own, unlike those of plain matmuls; clamps of gpt-oss' activation too.
    Backward sums gradients over the tokens of each expert."""
    size, matrices = table.recipe.compute_bytes, 1 + mlp.gated
    passes = []
    if mlp.bias:
        outputs = rows * (matrices * width + table.model.d_model) * size
        passes.append(Elementwise("expert biases", 2 * outputs, outputs, again=MOE, kernels=3))
    if mlp.activation == "swiglu_clamped":
        inner = rows * matrices * width * size
        passes.append(Elementwise("clamps", 2 * inner, 3 * inner, again=MOE, kernels=2))
    return tuple(passes)


def _gather_over_etp(table: Table, message: Floats, forward: str, backward: str) -> tuple[Operation, ...]:
    if not np.any(table.columns.etp > 1):
        return ()
    return (Collective("expert tokens", "tp", (forward,), (backward,), message, MOE, over_experts=True),)  # pyright: ignore[reportArgumentType]


def _shared(table: Table, mlp: MoeMlp) -> tuple[Operation, ...]:
    if not mlp.d_ff_shared:
        return ()
    dense = DenseMlp(d_ff=mlp.d_ff_shared, gated=mlp.gated, activation=mlp.activation)
    if not mlp.shared_gate:
        return dense_operations(table, dense, MOE, SHARED)
    # What the shared experts make is scaled by a number per token, made of what the router has saved.
    tokens, d_model, size = table.residual_tokens, table.model.d_model, table.recipe.compute_bytes
    gate = Matmul(
        "shared experts' gate", tokens, of(table, d_model), of(table, 1), again=MOE, in_low_precision=False
    )
    made = tokens * d_model * size
    saved = (Saved(made, MOE), Saved(tokens * size, MOE))
    scaled = Elementwise("scaled shared experts", 2 * made, 3 * made, saved, MOE, kernels=2)
    return (*dense_operations(table, dense, MOE, SHARED, follows=True), gate, scaled)


def mlp_params(table: Table, mlp: DenseMlp | MoeMlp) -> tuple[Floats, Floats]:
    """Parameters of the MLP on one rank: those cut or copied over tp, and those of routed experts."""
    tp, etp, d_model = table.columns.tp, table.columns.etp, table.model.d_model
    none = np.zeros(len(table.columns))
    if isinstance(mlp, DenseMlp):
        biases = mlp.bias * ((1 + mlp.gated) * mlp.d_ff / tp + d_model)
        return mlp.matmul_params(d_model) / tp + biases, none
    expert = mlp.expert()
    biases = expert.bias * ((1 + expert.gated) * expert.d_ff / etp + d_model)
    routed = (expert.matmul_params(d_model) / etp + biases) * (mlp.num_experts / table.columns.ep)
    shared = (3 if mlp.gated else 2) * d_model * mlp.d_ff_shared / tp + d_model * mlp.shared_gate
    router = d_model * mlp.num_experts + mlp.num_experts * (mlp.router_bias + mlp.balance_bias)
    return shared + router + none, routed
