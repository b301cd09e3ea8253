"""Attention of one layer: projections, rotary embedding, what context parallelism moves, the core, and out.

The core is flash attention (arXiv:2205.14135), which keeps q, k, v, its output and one fp32 logsumexp per head and
token; or unfused, which keeps the scores after the softmax, and with dropout their mask and product too: the
5 * a * s^2 * b bytes of arXiv:2205.05198 s4.1.
"""

from typing import Any

import numpy as np

from trainwright.plan.agreement import ALONG_INPUT, OF_LATENTS, agreements
from trainwright.plan.linear import casts, normed, of, projection, quantized, statistic_bytes
from trainwright.plan.operations import AttentionCore, Collective, Elementwise, Matmul, Operation, Saved
from trainwright.plan.table import FULL, Floats, Table, marks
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.model import (
    Attention,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    reached_keys,
    seen_keys,
)

CORE = FULL | marks("attention")
UP = FULL | marks("latent_up")


class _Widths:
    """Width per token, on one rank, of queries, keys, values and the core's output."""

    def __init__(self, query: Floats, key: Floats, value: Floats, out: Floats) -> None:
        self.query, self.key, self.value, self.out = query, key, value, out


def attention_operations(table: Table, layer: LayerSpec) -> tuple[Operation, ...]:
    """From the normed input to the output projection."""
    attention, size = layer.attention, table.recipe.compute_bytes
    heads = attention.num_heads / table.columns.tp
    if isinstance(attention, GroupedQueryAttention):
        widths = _widths(table, attention)
        # The three read the same input, which is saved once.
        projections = (
            *projection(table, "query", table.model.d_model, widths.query, reads=FULL | normed(table), again=FULL),
            *projection(table, "key", table.model.d_model, widths.key, again=FULL, save_input=False),
            *projection(table, "value", table.model.d_model, widths.value, again=FULL, save_input=False),
        )
        projections = (*projections, *_head_norms(table, attention, widths))
        rotated, queries_again, keys_again = widths.query + widths.key, FULL, FULL
        head_width = float(attention.d_head)
    else:
        projections, widths = _latent_projections(table, attention)
        # Queries without a latent come from the residual stream, by a projection that isn't done again.
        rotated, queries_again, keys_again = heads * attention.d_rope, UP if attention.q_lora_rank else FULL, UP
        head_width = (attention.d_nope + attention.d_rope + attention.d_value) / 2
    rotary_bytes = table.tokens * rotated * size
    rotary = Elementwise("rotary", 2 * rotary_bytes, 2 * rotary_bytes, again=queries_again, kernels=4)
    inside = _inside(table, attention, widths)
    dealt = _dealt(table, attention, inside)
    kept = _kept(table, table.tokens * inside.query * size, queries_again)
    kept += _kept(table, table.tokens * (dealt.key + dealt.value) * size, keys_again)
    if table.recipe.attention_kernel == "unfused":
        kept = (*kept, Saved(table.tokens * _copied_width(table, attention, dealt) * size, CORE | keys_again))
    # The projection reads the core's output, or, where that is wider than the values, what is cut out of it.
    is_cut, copied = bool(np.any(inside.out > widths.out)), keeps_copy(table)
    if is_cut and not copied:
        kept = (*kept, Saved(table.tokens * widths.out * size, FULL))
    core = _core(table, layer, heads, head_width, kept, table.tokens * inside.out * size, is_cut)
    # The output projection's input is the core's output, which is kept there; a cast copy comes on top, unless it
    # is cast once more in backward.
    cast = (quantized(table, table.tokens, widths.out, FULL),) if copied else ()
    out = Matmul("out", table.tokens, widths.out, of(table, table.model.d_model), cast, FULL)
    turned = (rotary,) if table.model.rope is not None else ()
    return (
        *projections,
        *turned,
        *_context(table, dealt),
        *core,
        *agreements(table, out, ALONG_INPUT),
        *casts(table, out),
        out,
    )


def _copied_width(table: Table, attention: Attention, widths: _Widths) -> Floats:
    """Of keys and values that batched matmuls of scores and values read, over what is there: a copy for each head
    of queries, but of a single head of one sequence."""
    if not isinstance(attention, GroupedQueryAttention):
        return 0 * widths.key
    dealt_to = table.columns.cp if table.recipe.cp_method == "all_to_all" else 1
    heads = np.maximum(kv_heads(table, attention) / dealt_to, 1.0) * table.columns.micro_batch
    return np.where(heads > 1, 2 * widths.query - widths.key - widths.value, 0.0)


def keeps_copy(table: Table) -> bool:
    """Whether the output projection keeps a cast copy of what it reads, and not that itself."""
    return table.recipe.is_low_precision and not table.recipe.activations_fp8


def _head_norms(table: Table, attention: GroupedQueryAttention, widths: _Widths) -> tuple[Operation, ...]:
    """Norms of queries and of keys, over each head or over all: they keep what the projections gave, and a
    statistic of each norm. Over all heads, of which a tp rank has some, a number per token is summed for each,
    forward and backward; two where the mean is taken off."""
    if attention.qk_norm == "none":
        return ()
    size, wide = table.recipe.compute_bytes, max(table.recipe.compute_bytes, 4)
    values = table.tokens * (widths.query + widths.key)
    over_all = attention.qk_norm == "all_heads"
    norms_per_token = 2.0 if over_all else (widths.query + widths.key) / attention.d_head
    # Ranks that have taken the mean off keep what is left, and one number.
    is_summed = (table.columns.tp > 1) & over_all
    numbers = 2 if table.model.norm == "layernorm" else 1
    statistics = np.where(is_summed, wide, numbers * statistic_bytes(table)) * table.tokens * norms_per_token
    saved = (Saved(values * size, FULL), Saved(statistics, FULL, is_statistic=True))
    norms = Elementwise("head norm", 2 * values * size, 3 * values * size, saved, FULL, kernels=2)
    if not over_all:
        return (norms,)
    sums: tuple[CollectiveOp, ...] = ("all_reduce",) * (4 if table.model.norm == "layernorm" else 2)
    return (norms, Collective("norms over heads", "tp", sums, sums, wide * table.tokens, FULL, is_precise=True))


def _inside(table: Table, attention: Attention, widths: _Widths) -> _Widths:
    """Of what goes into the core and comes out: a CPU's fused kernel wants heads of one width."""
    if table.cluster.device.kind != "cpu" or isinstance(attention, GroupedQueryAttention):
        return widths
    wide = np.maximum(widths.query, widths.value)
    return _Widths(wide, wide, wide, wide)


def _kept(table: Table, num_bytes: Floats, made_again: int) -> tuple[Saved, ...]:
    """What the core reads. Of heads that cp has exchanged it keeps what came, which nothing but the whole layer
    makes again."""
    if table.recipe.cp_method != "all_to_all" or made_again == FULL:
        return (Saved(num_bytes, made_again),)
    cut = table.columns.cp > 1
    return (Saved(num_bytes * cut, FULL), Saved(num_bytes * ~cut, made_again))


def _widths(table: Table, attention: GroupedQueryAttention) -> _Widths:
    query = attention.num_heads / table.columns.tp * attention.d_head
    key = kv_heads(table, attention) * attention.d_head
    return _Widths(query, key, key, query)


def kv_heads(table: Table, attention: GroupedQueryAttention) -> Floats:
    """Key/value heads on one rank; where there are fewer than ranks, ranks hold copies."""
    return np.maximum(attention.num_kv_heads / table.columns.tp, 1.0)


def _latent_projections(table: Table, attention: LatentAttention) -> tuple[tuple[Operation, ...], _Widths]:
    """Down and up projections of MLA; the down ones are computed by every tp rank alike."""
    heads, d_model = attention.num_heads / table.columns.tp, table.model.d_model
    query, value = heads * (attention.d_nope + attention.d_rope), heads * attention.d_value
    reads = FULL | normed(table)
    # What reads the latents gives up its output alone (train/parallel/made_again.py).
    again: dict[str, Any] = {"reads": FULL, "again": UP, "output_again": True}
    if attention.q_lora_rank is None:
        made = projection(table, "q", d_model, query, reads=reads, again=FULL)
    else:
        rank = attention.q_lora_rank
        made = (
            *projection(table, "q_down", d_model, of(table, rank), reads=reads, again=FULL, cut=OF_LATENTS),
            *projection(table, "q_up", rank, query, gathered=False, **again),
        )
    down = of(table, attention.kv_lora_rank + attention.d_rope)
    size, norms = table.recipe.compute_bytes, 2 if attention.q_lora_rank else 1
    latents = table.tokens * ((attention.q_lora_rank or 0) + attention.kv_lora_rank) * size
    # The key's turned part stands beside the latent in one projection's output, which is kept whole.
    kept = (
        Saved(latents + table.tokens * attention.d_rope * size, FULL),
        Saved(norms * max(size, 4) * table.tokens, FULL, is_statistic=True),
    )
    latent_norms = Elementwise("latent norm", 2 * latents, 3 * latents, kept, FULL, kernels=2)
    up = heads * (attention.d_nope + attention.d_value)
    made = (
        *made,
        *projection(table, "kv_down", d_model, down, again=FULL, save_input=False, cut=OF_LATENTS),
        latent_norms,
        *projection(table, "kv_up", attention.kv_lora_rank, up, gathered=False, **again),
    )
    return made, _Widths(query, query, value, value)


def _core(
    table: Table,
    layer: LayerSpec,
    heads: Floats,
    head_width: float,
    kept: tuple[Saved, ...],
    out_bytes: Floats,
    is_cut: bool,
) -> tuple[Operation, ...]:
    attention, recipe = layer.attention, table.recipe
    fused = recipe.attention_kernel != "unfused"
    keys = seen_keys(recipe.seq_len, attention.sliding_window)
    flops_per_key = table.tokens * _score_flops_per_key(table, attention) / table.columns.tp
    is_capped = isinstance(attention, GroupedQueryAttention) and attention.logit_softcap is not None
    is_written_out = fused and is_capped and table.cluster.device.kind == "cpu"
    # Where the projection keeps a copy of its own of what it reads, the core's output goes with the core.
    has_copy = is_cut or keeps_copy(table)
    out = Saved(out_bytes, CORE if has_copy else FULL)
    if fused and recipe.cp_method == "all_to_all" and not (has_copy or is_written_out):
        # The core keeps its output of whole sequences, beside which stands what came back for the projection.
        kept = (*kept, Saved(out_bytes * (table.columns.cp > 1), CORE))
    # Weights and values are all that the backward of plain matmuls reads: the output is the projection's.
    read = kept if has_copy else (*kept, out)
    if is_written_out:
        return _capped(table, attention, heads, flops_per_key, read)
    if fused:
        statistics = Saved(max(recipe.compute_bytes, 4) * table.tokens * heads, CORE, is_statistic=True)
        saved = (*kept, out, statistics)
        window = attention.sliding_window if recipe.cp_method != "all_to_all" else None
        return (AttentionCore("attention", flops_per_key * keys, head_width, saved, CORE, window),)
    # Without flash attention all keys are computed, masked ones too.
    scores, size = table.tokens * recipe.seq_len * heads, recipe.compute_bytes
    # A sink is one more column of weights; caps keep what they make.
    has_sinks = isinstance(attention, GroupedQueryAttention) and attention.sinks
    weights = (table.tokens * heads * (recipe.seq_len + has_sinks) + is_capped * scores) * size
    # Scale, mask and softmax in one kernel each way (Megatron-LM's fused softmax); dropout by itself.
    dropped = bool(recipe.dropout)
    softmax = Elementwise(
        "softmax",
        (2 * size + (2 * size + 1) * dropped) * scores,
        (3 * size + (2 * size + 1) * dropped) * scores,
        (Saved(weights + dropped * size * scores, CORE), Saved(dropped * scores, CORE)),
        CORE,
    )
    score_flops = 2 * scores * _score_width(attention)
    flops = flops_per_key * recipe.seq_len
    core = AttentionCore("attention", flops, head_width, read, CORE, is_fused=False, scores_flops=score_flops)
    return (core, softmax)


CAP_PASSES = 8
"""Over scores in fp32: scaled, divided, tanh, multiplied, masked, and three of a softmax and its cast."""


def _capped(
    table: Table, attention: Attention, heads: Floats, flops_per_key: Floats, saved: tuple[Saved, ...]
) -> tuple[Operation, ...]:
    """With capped scores, for which a CPU has no kernel: some queries at a time, whose scores aren't kept but made
    again in backward (`train/model/scores.py`)."""
    keys = reached_keys(table.recipe.seq_len, attention.sliding_window)
    scores = table.tokens * keys * heads
    core = AttentionCore(
        "attention",
        flops_per_key * keys,
        _score_width(attention),
        saved,
        CORE,
        is_fused=False,
        scores_flops=2 * scores * _score_width(attention),
        always_again=True,
    )
    moved = CAP_PASSES * 2 * 4 * scores
    return (core, Elementwise("caps", moved, 3 * moved, again=CORE, kernels=CAP_PASSES))


def _score_flops_per_key(table: Table, attention: Attention) -> int:
    """Of all heads. A CPU's fused kernel wants them of one width, and gets zeros beside the narrower ones."""
    flops = attention.score_flops_per_key
    if isinstance(attention, LatentAttention) and table.cluster.device.kind == "cpu":
        flops += 2 * attention.num_heads * abs(attention.d_nope + attention.d_rope - attention.d_value)
    return flops


def _score_width(attention: Attention) -> int:
    """That a score sums over."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.d_head
    return attention.d_nope + attention.d_rope


def _dealt(table: Table, attention: Attention, widths: _Widths) -> _Widths:
    """The widths once cp has dealt out heads by all_to_all: where a rank has fewer key/value heads than cp ranks,
    each of those needs one for the whole sequence, so they are sent and kept several times."""
    if table.recipe.cp_method != "all_to_all" or not isinstance(attention, GroupedQueryAttention):
        return widths
    whole = table.columns.cp * float(attention.d_head)
    return _Widths(widths.query, np.maximum(widths.key, whole), np.maximum(widths.value, whole), widths.out)


def _context(table: Table, widths: _Widths) -> tuple[Collective, ...]:
    """What attention needs of the other cp ranks (`Recipe.cp_method`)."""
    recipe = table.recipe
    if recipe.cp_method == "all_to_all":
        ways: dict[str, Any] = {"forward": ("all_to_all",), "backward": ("all_to_all",), "again": FULL}
        there = table.tokens * (widths.query + widths.key + widths.value) * recipe.compute_bytes
        back = table.tokens * widths.out * recipe.compute_bytes
        return (
            Collective("heads", "cp", message_bytes=there, **ways),
            Collective("heads back", "cp", message_bytes=back, **ways),
        )
    # In backward once more, as only the rank's part of them is kept.
    backward: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")
    message = whole_kv_bytes(table, widths.key + widths.value)
    return (
        Collective("keys and values", "cp", ("all_gather",), backward, message, FULL, core=marks("attention")),
    )


def whole_kv_bytes(table: Table, kv_width: Floats) -> Floats:
    """Keys and values of the whole sequence."""
    return table.tokens * table.columns.cp * kv_width * table.recipe.compute_bytes


def attention_params(table: Table, layer: LayerSpec) -> Floats:
    """Parameters of attention on one rank. Matrices are cut over tp; norms and output biases are copied.
    Where key/value heads are fewer than ranks, each holds the whole matrices and computes its own heads."""
    attention, tp, d_model = layer.attention, table.columns.tp, table.model.d_model
    if isinstance(attention, GroupedQueryAttention):
        heads, d_head, kv = attention.num_heads / tp, attention.d_head, attention.num_kv_heads
        own_kv = np.where(tp > kv, kv, kv / tp)
        params = d_model * d_head * 2 * (heads + own_kv) + heads * attention.sinks
        params = params + (heads + 2 * own_kv) * d_head * attention.qkv_bias + d_model * attention.out_bias
        norm_widths = {"none": 0.0, "per_head": 2.0 * d_head, "all_heads": (heads + own_kv) * d_head}
        return params + norm_widths[attention.qk_norm]
    copied = d_model * (attention.kv_lora_rank + attention.d_rope) + attention.kv_lora_rank
    if attention.q_lora_rank is not None:
        copied += (d_model + 1) * attention.q_lora_rank
    return copied + (attention.params(d_model) - copied) / tp
