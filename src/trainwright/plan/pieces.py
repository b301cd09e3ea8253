"""The pieces that a model is cut into: layers, the embedding, the head, and modules of multi-token prediction."""

from dataclasses import replace

import numpy as np

from trainwright.plan.agreement import Cut, agreements
from trainwright.plan.attention import attention_operations, attention_params
from trainwright.plan.casting import backward_bytes
from trainwright.plan.linear import (
    EMBEDDING,
    accumulation,
    casts,
    entry,
    is_gathered_again,
    leave,
    norm,
    of,
    quantized,
    residual,
)
from trainwright.plan.mlp import dense_operations, load, mlp_params, moe_operations
from trainwright.plan.operations import Collective, Elementwise, Matmul, Operation, Piece, Saved
from trainwright.plan.table import FULL, Floats, Table, marks
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.model import DenseMlp, LayerSpec

NORM_AGAIN = FULL | marks("norm")


def layer_piece(table: Table, layer: LayerSpec) -> Piece:
    """One transformer layer, in the order in which it runs."""
    mlp, size = layer.mlp, table.recipe.compute_bytes
    residual_bytes = table.residual_tokens * table.model.d_model * size
    inner = dense_operations(table, mlp) if isinstance(mlp, DenseMlp) else moe_operations(table, mlp)
    normed, added = norm(table, NORM_AGAIN), residual(table, FULL)
    operations = (
        normed,
        *entry(table, "attention", FULL),
        *attention_operations(table, layer),
        *leave(table, "attention", FULL),
        added,
        # A parallel branch's norm reads what the other one has kept.
        replace(normed, saved=normed.saved[1:]) if table.model.parallel_residual else normed,
        *inner,
        added,
        *(normed,) * (table.model.norms_per_layer - 2),
    )
    params, expert_params = mlp_params(table, mlp)
    params = params + attention_params(table, layer) + table.model.norms_per_layer * table.model.norm_params
    return Piece(
        (*operations, accumulation(table, params + expert_params)),
        params,
        residual_bytes,
        _gradient_bytes(table, layer) + _gathered_kv_bytes(table, operations),
        expert_params,
        is_routed=not isinstance(mlp, DenseMlp) and table.recipe.capacity_factor is None,
    )


def _gradient_bytes(table: Table, layer: LayerSpec) -> Floats:
    """Gradients of activations that live together while an MLP's backward runs, its widest part; or what its
    low-precision products hold."""
    recipe, mlp, d_model = table.recipe, layer.mlp, table.model.d_model
    size, low = recipe.compute_bytes, recipe.low_precision
    if isinstance(mlp, DenseMlp):
        rows, width, groups, gathered = table.tokens, mlp.d_ff / table.columns.tp, None, is_gathered_again(table)
        around = table.tokens * 2 * d_model * size
    else:
        width, groups, gathered = mlp.d_ff / table.columns.etp, mlp.num_experts / table.columns.ep, 0.0
        rows = table.residual_tokens * mlp.top_k * load(table) * table.columns.etp
        shared = table.tokens * mlp.d_ff_shared / table.columns.tp
        # The gradient of the experts' tokens, and the buffer that it is sent back from.
        around = (rows * 2 * d_model + table.residual_tokens * 2 * d_model + shared) * size
    inner = rows * width
    if low is None or recipe.activations_fp8:
        return (mlp.gated + 2) * inner * size + around
    # The product that the activation gave is kept in few bits.
    wide = (mlp.gated + 3) * inner * size - inner * low.activation.value_bytes
    each = rows if groups is None else rows / groups
    return np.maximum(wide, backward_bytes(table, each, width, groups, table.tokens * d_model * gathered)) + around


def _gathered_kv_bytes(table: Table, operations: tuple[Operation, ...]) -> Floats:
    """Keys and values of other cp ranks and their gradients, live in the backward of one layer: of the whole
    sequence where they are gathered, of two ranks where they go round."""
    messages = [each.message_bytes for each in operations if isinstance(each, Collective) and each.axis == "cp"]
    share = {"all_gather": 1.0, "ring": 2 / table.columns.cp, "all_to_all": 0.5}[table.recipe.cp_method]
    return sum((2 * each * share * (table.columns.cp > 1) for each in messages), np.zeros(1))


def embedding_piece(table: Table) -> Piece:
    """Token lookup, vocabulary-parallel over tp; positions where they are learned."""
    model, size, tp = table.model, table.recipe.compute_bytes, table.columns.tp
    out_bytes = table.tokens * model.d_model * size
    ids = 8 * table.tokens
    lookup = Elementwise("embedding", 2 * out_bytes, 2 * out_bytes, (Saved(ids),))
    params = np.ceil(model.vocab_size / tp) * model.d_model + model.learned_positions * model.d_model
    operations = (lookup, *leave(table, EMBEDDING), accumulation(table, params))
    return Piece(operations, params, ids, 0 * out_bytes)


def table_copy_piece(table: Table) -> Piece:
    """The last rank's own copy of the embedding table, where the first stage stands on another: for a head that is
    tied to it, or for the tokens of multi-token prediction."""
    params = np.ceil(table.model.vocab_size / table.columns.tp) * table.model.d_model
    return Piece((), params, 0 * params, 0 * params)


def head_piece(table: Table) -> Piece:
    """Final norm, logits and loss, vocabulary-parallel over tp, in `Recipe.loss_chunks` pieces of the sequence."""
    model, size, tp = table.model, table.recipe.compute_bytes, table.columns.tp
    residual_bytes = table.residual_tokens * model.d_model * size
    vocab = np.ceil(model.vocab_size / tp)
    own_matrix = 0 if model.tied_embeddings else 1
    params = own_matrix * vocab * model.d_model + model.norm_params + vocab * model.head_bias
    operations, logits_bytes, working = _loss_operations(table, residual_bytes, vocab)
    operations = (*operations, accumulation(table, params))
    return Piece(operations, params, residual_bytes, working, logits_bytes=logits_bytes)


def _loss_operations(
    table: Table, input_bytes: Floats, vocab: Floats
) -> tuple[tuple[Operation, ...], Floats, Floats]:
    """From the residual stream to the loss; the logits that are kept; and what lives beside them in its
    backward."""
    model, size, tp = table.model, table.recipe.compute_bytes, table.columns.tp
    logits = table.tokens * vocab
    # In fp32 at least: forward reads the logits and writes their log-softmax; backward reads them, writes the
    # softmax, scales it in place, and rounds it to the logits' format.
    wide = max(size, 4)
    rounding = wide + size if size < wide else 0
    # Live in backward beside the logits: the softmax that becomes their gradient, and that rounded. A CPU's
    # softmax makes its input wide first, which is gone when the result is rounded.
    copies = wide + (0 if size == wide else wide if table.cluster.device.kind == "cpu" else size)
    loss = Elementwise("loss", (size + wide) * logits, (size + 3 * wide + rounding) * logits, kernels=2)
    if table.recipe.loss_kernel == "fused":
        # Forward reads the logits twice, for the maximum and the sum, and writes their gradient over them.
        copies, loss = 0, Elementwise("loss", 3 * size * logits, 0 * logits)
    saved = (Saved(input_bytes),)
    if table.recipe.loss_chunks > 1:
        # Gradients of the head's input and of its weights.
        saved = (*saved, Saved(vocab * model.d_model * size, of_vocabulary=True))
    in_chunks = table.recipe.loss_chunks > 1
    matmul = Matmul(
        "head",
        table.tokens,
        of(table, model.d_model),
        vocab,
        saved,
        in_low_precision=False,
        gradients_in_forward=in_chunks,
    )
    # Where the vocabulary is cut, its ranks exchange two numbers per token.
    numbers_bytes = 2 * max(size, 4) * table.tokens * tp
    exchange = (Collective("loss", "tp", ("all_gather",), (), numbers_bytes, is_precise=True),)
    into = entry(table, "head")
    if in_chunks:
        into, exchange = _entry_in_chunks(table), _exchanges_in_chunks(table, numbers_bytes)
    operations = (norm(table), *into, matmul, *exchange, loss)
    if in_chunks:
        # A piece's gradient is made right after its loss, so that its logits are alive for a moment only.
        # The gradient of the head's matrix is summed in the wide format, and kept in the other.
        rounded = size if size < wide else 0
        summed = vocab * model.d_model * (wide - size)
        return operations, 0 * logits, logits * (size + copies + rounded) / table.recipe.loss_chunks + summed
    # Its own gradient stands in the logits' place when that of the matrix is made.
    return operations, size * logits, np.maximum(logits * copies, vocab * model.d_model * size)


def _entry_in_chunks(table: Table) -> tuple[Operation, ...]:
    """Where the loss is made in chunks, the head's input is gathered, and its gradient summed, right there."""
    message = table.tokens * table.model.d_model * table.recipe.compute_bytes
    ways: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")
    if not table.recipe.sequence_parallel:
        ways = ("all_reduce",)
    return (Collective("head in", "tp", ways, (), message),)


def _exchanges_in_chunks(table: Table, numbers_bytes: Floats) -> tuple[Collective, ...]:
    """Of pieces of the sequence, as even as they go."""
    chunks, positions = table.recipe.loss_chunks, table.recipe.seq_len // table.columns.cp
    per_position, longer = numbers_bytes / positions, positions % chunks
    # The first ones are longer by a position where it doesn't go evenly.
    pieces = ((positions // chunks + 1, longer), (positions // chunks, chunks - longer))
    return tuple(
        Collective("loss", "tp", ("all_gather",), (), per_position * size, is_precise=True, parts=parts)
        for size, parts in pieces
    )


def mtp_piece(table: Table) -> Piece:
    """One module of multi-token prediction (arXiv:2412.19437 s2.2): the last hidden state and the next token's
    embedding, normed and projected together, a layer like the last, and the shared head and loss once more."""
    model, size = table.model, table.recipe.compute_bytes
    layer = layer_piece(table, model.layers[-1])
    residual_bytes = table.residual_tokens * model.d_model * size
    vocab = np.ceil(model.vocab_size / table.columns.tp)
    # The joining projection is whole on every tp rank, and works on its part of the sequence.
    joined = Saved(2 * residual_bytes)
    if table.recipe.is_low_precision:
        joined = quantized(table, table.residual_tokens, 2 * model.d_model, 0)
    join = Matmul(
        "mtp join", table.residual_tokens, of(table, 2 * model.d_model), of(table, model.d_model), (joined,)
    )
    loss, logits_bytes, working = _loss_operations(table, residual_bytes, vocab)
    own = of(table, 2 * model.d_model**2 + 3 * model.norm_params)
    # The tokens further on are looked up in the model's table.
    looked_up = table.tokens * model.d_model * size
    lookup = Elementwise("embedding", 2 * looked_up, 2 * looked_up, (Saved(8 * table.tokens),))
    # The hidden state is kept by the norm before the head, which reads it too.
    hidden = replace(norm(table), saved=norm(table).saved[1:])
    # Where sequences are cut, each rank has other positions.
    tokens = ("cp", "tp") if table.recipe.sequence_parallel else ("cp",)
    asked = agreements(table, join, Cut(tokens, (), tokens))
    into = (lookup, *leave(table, EMBEDDING), hidden, norm(table), *asked, *casts(table, join), join)
    operations = (*into, *layer.operations, *loss)
    return Piece(
        (*operations, accumulation(table, own)),
        layer.params + own,
        residual_bytes,
        np.maximum(layer.working_bytes, working),
        layer.expert_params,
        logits_bytes,
        layer.is_routed,
    )
