"""What one layer, the embedding and the head are made of: one list of operations.

FLOPs, memory traffic, bytes saved for backward and collectives of everything that the planner predicts come
from these lists and from nowhere else; the same lists are what the trainer's program is held against.

All figures are of one microbatch on one rank. The counting of saved bytes follows what each operation's
backward reads (Korthikanti et al., arXiv:2205.05198 s4, gives the GPT layer's), each tensor once, where it is
first read. With sequence parallelism a gathered input is not kept: its shard is, and backward gathers it
again (ibid., s4.2.2). Attention is flash attention (arXiv:2205.14135): it keeps q, k, v, its output and one
fp32 logsumexp per head and token, and no scores.
"""

from dataclasses import dataclass

import numpy as np

from trainwright.plan.table import Floats, Table
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.errors import reject
from trainwright.spec.layout import Axis
from trainwright.spec.model import DenseMlp, GroupedQueryAttention, LatentAttention, LayerSpec, mean_keys


@dataclass(frozen=True)
class Matmul:
    """(m, k) by (k, n). Backward does two of the same size: input gradient and weight gradient."""

    name: str
    m: Floats
    k: Floats
    n: Floats
    saved_bytes: Floats
    in_low_precision: bool = True
    """False for what fp8 recipes leave in bf16: the output head."""

    @property
    def forward_flops(self) -> Floats:
        return 2.0 * self.m * self.k * self.n

    @property
    def launches(self) -> tuple[int, int]:
        """Kernels forward and backward."""
        return 1, 2


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k) v under the causal mask. Backward is 2.5 times forward: it computes the scores again."""

    name: str
    forward_flops: Floats
    saved_bytes: Floats
    saved_statistics_bytes: Floats
    """Of saved_bytes, what selective recompute drops."""

    @property
    def launches(self) -> tuple[int, int]:
        return 1, 1


@dataclass(frozen=True)
class Elementwise:
    """Operations bound by memory traffic: norms, activations, residuals, rotary embedding, loss."""

    name: str
    forward_bytes: Floats
    backward_bytes: Floats
    saved_bytes: Floats
    kernels: int = 1
    streams: bool = False
    """One long pass over contiguous memory, as over gradients, and not over many small rows."""

    @property
    def launches(self) -> tuple[int, int]:
        return self.kernels, 2 * self.kernels


@dataclass(frozen=True)
class Collective:
    """Communication that the layer waits for. `message_bytes` is the whole tensor's."""

    name: str
    axis: Axis
    forward: tuple[CollectiveOp, ...]
    backward: tuple[CollectiveOp, ...]
    message_bytes: Floats

    @property
    def launches(self) -> tuple[int, int]:
        return 0, 0  # its latency is all of it


Operation = Matmul | AttentionCore | Elementwise | Collective


@dataclass(frozen=True)
class Piece:
    """A layer, the embedding or the head: its operations, its parameters on one rank, and what full recompute
    keeps of it."""

    operations: tuple[Operation, ...]
    params: Floats
    input_bytes: Floats
    """The piece's input, the only thing that full recompute saves."""
    working_bytes: Floats
    """Live beside the saved tensors while its backward runs: gradients of activations, the loss's copies."""

    @property
    def saved_bytes(self) -> Floats:
        return sum((each.saved_bytes for each in self.operations if not isinstance(each, Collective)), np.zeros(1))

    @property
    def statistics_bytes(self) -> Floats:
        return sum(
            (each.saved_statistics_bytes for each in self.operations if isinstance(each, AttentionCore)),
            np.zeros(1),
        )


def layer_piece(table: Table, layer: LayerSpec) -> Piece:
    """One transformer layer, in the order in which it runs."""
    mlp = layer.mlp
    if not isinstance(mlp, DenseMlp):
        reject("model.layer_groups.mlp.kind", mlp.kind, "the planner covers dense layers; choose a dense model")
    d_model, size = table.model.d_model, table.recipe.compute_bytes
    residual_bytes = table.residual_tokens * d_model * size
    norm = Elementwise("norm", 2 * residual_bytes, 3 * residual_bytes, residual_bytes + 4 * table.residual_tokens)
    residual = Elementwise("residual", 3 * residual_bytes, 3 * residual_bytes, 0 * residual_bytes)
    extra_norms = (norm,) * (table.model.norms_per_layer - 2)
    operations = (
        norm,
        *_entry(table, "attention"),
        *_attention(table, layer),
        *_exit(table, "attention"),
        residual,
        norm,
        *_entry(table, "mlp"),
        *_mlp(table, mlp),
        *_exit(table, "mlp"),
        residual,
        *extra_norms,
    )
    gradients = (mlp.gated + 2) * mlp.d_ff / table.columns.tp + 2 * d_model
    params = _layer_params(table, layer, mlp)
    return Piece(
        (*operations, _accumulation(table, params)),
        params,
        residual_bytes,
        table.tokens * gradients * size + _gathered_kv_bytes(table, operations),
    )


def _gathered_kv_bytes(table: Table, operations: tuple[Operation, ...]) -> Floats:
    """Keys and values of the whole sequence and their gradients, live in the backward of one layer under cp."""
    return sum(
        (
            2 * each.message_bytes * (table.columns.cp > 1)
            for each in operations
            if isinstance(each, Collective) and each.axis == "cp"
        ),
        np.zeros(1),
    )


def embedding_piece(table: Table) -> Piece:
    """Token lookup, vocabulary-parallel over tp; positions where they are learned."""
    model, size, tp = table.model, table.recipe.compute_bytes, table.columns.tp
    out_bytes = table.tokens * model.d_model * size
    lookup = Elementwise("embedding", 2 * out_bytes, 2 * out_bytes, 8 * table.tokens)
    params = np.ceil(model.vocab_size / tp) * model.d_model + model.learned_positions * model.d_model
    operations = (lookup, *_exit(table, "embedding"), _accumulation(table, params))
    return Piece(operations, params, 8 * table.tokens, 0 * out_bytes)


def head_piece(table: Table) -> Piece:
    """Final norm, logits and loss, vocabulary-parallel over tp."""
    model, size, tp = table.model, table.recipe.compute_bytes, table.columns.tp
    residual_bytes = table.residual_tokens * model.d_model * size
    vocab = np.ceil(model.vocab_size / tp)
    logits = table.tokens * vocab
    # In fp32 at least: forward reads the logits and writes their log-softmax; backward reads them, writes the
    # softmax, scales it in place, and rounds it to the logits' format.
    wide = max(size, 4)
    rounding = wide + size if size < wide else 0
    loss = Elementwise(
        "loss", (size + wide) * logits, (size + 3 * wide + rounding) * logits, 0 * logits, kernels=2
    )
    # Live in backward: the logits, the softmax that becomes their gradient, and that rounded.
    copies = size + wide + (size if size < wide else 0)
    matmul = Matmul("head", table.tokens, _of(table, model.d_model), vocab, residual_bytes, in_low_precision=False)
    norm = Elementwise("norm", 2 * residual_bytes, 3 * residual_bytes, residual_bytes + 4 * table.residual_tokens)
    own_matrix = 0 if model.tied_embeddings else 1
    params = own_matrix * vocab * model.d_model + model.norm_params + vocab * model.head_bias
    # Where the vocabulary is cut, its ranks exchange two numbers per token.
    exchange = Collective("loss", "tp", ("all_gather",), (), 2 * max(size, 4) * table.tokens * tp)
    operations = (norm, *_entry(table, "head"), matmul, exchange, loss, _accumulation(table, params))
    return Piece(operations, params, residual_bytes, logits * copies)


def _attention(table: Table, layer: LayerSpec) -> tuple[Operation, ...]:
    attention, tp, size = layer.attention, table.columns.tp, table.recipe.compute_bytes
    keys = mean_keys(table.recipe.seq_len, attention.sliding_window, causal=True)
    flops = table.tokens * keys * attention.score_flops_per_key / tp
    heads = attention.num_heads / tp
    statistics = 4 * table.tokens * heads
    if isinstance(attention, GroupedQueryAttention):
        q_width = heads * attention.d_head
        kv_width = 2 * _kv_heads(table, attention) * attention.d_head
        out_width = q_width
        # The three read the same input, which is saved once.
        projections = [
            _linear(table, "query", table.model.d_model, q_width),
            _linear(table, "key", table.model.d_model, kv_width / 2, save_input=False),
            _linear(table, "value", table.model.d_model, kv_width / 2, save_input=False),
        ]
        rotary_bytes = table.tokens * (q_width + kv_width / 2) * size
    else:
        projections, q_width, kv_width, out_width = _latent_projections(table, attention)
        rotary_bytes = table.tokens * heads * attention.d_rope * size
    rotary = Elementwise("rotary", 2 * rotary_bytes, 2 * rotary_bytes, 0 * rotary_bytes, kernels=4)
    saved = table.tokens * (q_width + kv_width + out_width) * size + statistics
    core = AttentionCore("attention", flops, saved, statistics)
    # The output projection's input is the core's output, which is counted there.
    out = Matmul("out", table.tokens, out_width, _of(table, table.model.d_model), 0 * saved)
    return (*projections, rotary, *_context_gather(table, kv_width), core, out)


def _latent_projections(table: Table, attention: LatentAttention) -> tuple[list[Matmul], Floats, Floats, Floats]:
    """Down and up projections of MLA; the down ones are computed by every tp rank alike."""
    heads, d_model = attention.num_heads / table.columns.tp, table.model.d_model
    q_width = heads * (attention.d_nope + attention.d_rope)
    k_width, out_width = q_width, heads * attention.d_value
    projections = []
    if attention.q_lora_rank is None:
        projections.append(_linear(table, "q", d_model, q_width))
    else:
        projections.append(_linear(table, "q_down", d_model, _of(table, attention.q_lora_rank)))
        projections.append(_linear(table, "q_up", attention.q_lora_rank, q_width, gathered=False))
    down = attention.kv_lora_rank + attention.d_rope
    projections.append(_linear(table, "kv_down", d_model, _of(table, down), save_input=False))
    up = heads * (attention.d_nope + attention.d_value)
    projections.append(_linear(table, "kv_up", attention.kv_lora_rank, up, gathered=False))
    return projections, q_width, k_width + out_width, out_width


def _mlp(table: Table, mlp: DenseMlp) -> tuple[Operation, ...]:
    width = mlp.d_ff / table.columns.tp
    inner_bytes = table.tokens * width * table.recipe.compute_bytes
    matrices = 2 if mlp.gated else 1
    # Saved: what the activation reads (gate and up, or one), and the product that the down projection reads.
    activation = Elementwise(
        "activation", (matrices + 1) * inner_bytes, (2 * matrices + 1) * inner_bytes, (matrices + 1) * inner_bytes
    )
    up = _linear(table, "up", table.model.d_model, width)
    gate = (_linear(table, "gate", table.model.d_model, width, save_input=False),) if mlp.gated else ()
    return (
        up,
        *gate,
        activation,
        Matmul("down", table.tokens, width, _of(table, table.model.d_model), 0 * inner_bytes),
    )


def _linear(
    table: Table, name: str, k: int, n: Floats, *, gathered: bool = True, save_input: bool = True
) -> Matmul:
    """A projection of the residual stream (whose shard is saved), or of a latent that every rank holds whole."""
    rows = table.residual_tokens if gathered else table.tokens
    return Matmul(name, table.tokens, _of(table, k), n, rows * k * table.recipe.compute_bytes * save_input)


def _entry(table: Table, where: str) -> tuple[Operation, ...]:
    """Into a tensor-parallel region. With sequence parallelism the input is gathered, in backward once more
    for the weight gradient, and its gradient is reduce-scattered; without, its gradient is all-reduced."""
    message = table.tokens * table.model.d_model * table.recipe.compute_bytes
    if table.recipe.sequence_parallel:
        backward: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")
        gather = Collective(f"{where} in", "tp", ("all_gather",), backward, message)
        return (gather, _reorder(table, message, forward=1, backward=2))
    return (Collective(f"{where} in", "tp", (), ("all_reduce",), message),)


def _exit(table: Table, where: str) -> tuple[Operation, ...]:
    """Out of a tensor-parallel region: partial sums are added up."""
    message = table.tokens * table.model.d_model * table.recipe.compute_bytes
    if table.recipe.sequence_parallel:
        scatter = Collective(f"{where} out", "tp", ("reduce_scatter",), ("all_gather",), message)
        return (_reorder(table, message, forward=1, backward=1), scatter)
    return (Collective(f"{where} out", "tp", ("all_reduce",), (), message),)


def _reorder(table: Table, message: Floats, *, forward: int, backward: int) -> Elementwise:
    """Collectives join parts end to end; sequences of a microbatch beyond the first need a copy to lie right."""
    moved = 2 * message * ((table.columns.tp > 1) & (table.columns.micro_batch > 1))
    return Elementwise("reorder", forward * moved, backward * moved, 0 * moved, kernels=0)


def _accumulation(table: Table, params: Floats) -> Elementwise:
    """Each microbatch's weight gradients are added to those of the step: read, and the sum read and written."""
    moved = params * (table.recipe.compute_bytes + 2 * table.recipe.master_bytes)
    return Elementwise("gradient accumulation", 0 * moved, moved, 0 * moved, kernels=0, streams=True)


def _context_gather(table: Table, kv_width: Floats) -> tuple[Collective, ...]:
    """Keys and values of the whole sequence, gathered over cp (as Llama 3 did, arXiv:2407.21783 s3.3.2), and in
    backward once more, as only the rank's part of them is kept."""
    backward: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")
    return (Collective("keys and values", "cp", ("all_gather",), backward, _whole_kv_bytes(table, kv_width)),)


def _whole_kv_bytes(table: Table, kv_width: Floats) -> Floats:
    return table.tokens * table.columns.cp * kv_width * table.recipe.compute_bytes


def _kv_heads(table: Table, attention: GroupedQueryAttention) -> Floats:
    """Key/value heads on one rank; where there are fewer than ranks, ranks hold copies."""
    return np.maximum(attention.num_kv_heads / table.columns.tp, 1.0)


def _layer_params(table: Table, layer: LayerSpec, mlp: DenseMlp) -> Floats:
    """Parameters of a layer on one rank. Matrices are cut over tp; norms and output biases are copied."""
    attention, tp, d_model = layer.attention, table.columns.tp, table.model.d_model
    if isinstance(attention, GroupedQueryAttention):
        heads, kv_heads, d_head = attention.num_heads / tp, _kv_heads(table, attention), attention.d_head
        params = d_model * d_head * 2 * (heads + kv_heads) + heads * attention.sinks
        params = params + (heads + 2 * kv_heads) * d_head * attention.qkv_bias + d_model * attention.out_bias
        norm_widths = {"none": 0.0, "per_head": 2.0 * d_head, "all_heads": (heads + kv_heads) * d_head}
        params = params + norm_widths[attention.qk_norm]
    else:
        copied = d_model * (attention.kv_lora_rank + attention.d_rope) + attention.kv_lora_rank
        if attention.q_lora_rank is not None:
            copied += (d_model + 1) * attention.q_lora_rank
        params = copied + (attention.params(d_model) - copied) / tp
    biases = mlp.bias * ((1 + mlp.gated) * mlp.d_ff / tp + d_model)
    norms = table.model.norms_per_layer * table.model.norm_params
    return params + mlp.matmul_params(d_model) / tp + biases + norms


def _of(table: Table, value: float) -> Floats:
    """`value` for every row."""
    return np.full(len(table.columns), float(value))
