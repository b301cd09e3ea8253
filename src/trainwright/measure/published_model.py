"""The architecture that a row of published runs describes, as a `ModelSpec`.

Columns give the shapes. What they can't (latent widths of MLA, experts in groups, norms, biases) follows from the
family, which the model's name tells; it moves parameter counts by less than 3%.
"""

import math
import re

from trainwright.measure.published_row import Row
from trainwright.spec.model import (
    Activation,
    Attention,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    ModelSpec,
    MoeMlp,
)

D_NOPE, D_ROPE, D_VALUE, KV_LORA_RANK, Q_LORA_RANK = 128, 64, 128, 512, 1536
"""Of every MLA model published so far: DeepSeek-V2 (arXiv:2405.04434 s3.1.2), DeepSeek-V3 (arXiv:2412.19437 s4.2),
Kimi K2 (arXiv:2507.20534 s2.3), Moonlight (arXiv:2502.16982, config.json)."""

DIRECT_QUERIES_UP_TO = 2048
"""d_model of the MLA models whose queries have no latent (DeepSeek-V2-Lite, Moonlight: config.json)."""

EXPERT_GROUPS = {"deepseek-v3": (8, 4), "deepseek-v2-lite": (1, 1), "deepseek-v2": (8, 3)}
"""num_groups and top_groups, by what the name begins with: node-limited routing (arXiv:2412.19437 s4.2),
device-limited routing (arXiv:2405.04434 s3.1.2)."""


def model_of(row: Row) -> ModelSpec:
    """Raises `InvalidSpec` where a cell can't be."""
    name = row.text("model_name") or row.text("id")
    layers = row.required("n_layers")
    d_model, vocab, seq_len = row.required("hidden"), row.required("vocab"), row.required("seq_len")
    gated = row.flag("gated_mlp") is True
    return ModelSpec(
        name=name,
        d_model=d_model,
        vocab_size=vocab,
        layer_groups=_groups(row, layers),
        tied_embeddings=row.flag("tied_embeddings") is True,
        norm="rmsnorm" if gated else "layernorm",
        learned_positions=seq_len if _is(row, "gpt-", "gpt3") and not gated else 0,
        max_positions=max(seq_len, 4096),
        mtp_depth=row.count("mtp_layers", 0),
        source=row.text("dims_source") or "columns of the table",
    )


def _groups(row: Row, layers: int) -> tuple[LayerGroup, ...]:
    """Dense layers first where there are any, then the pattern that the rest repeats."""
    is_moe = row.count("moe_experts", 0) > 1
    first_dense = row.count("first_dense_layers", 0) if is_moe else 0
    every = row.count("moe_layer_freq") if is_moe else 1
    window, spacing = _window(row)
    rest = layers - first_dense
    if rest % math.lcm(every, spacing):
        row.assume(f"{rest} layers are no whole number of patterns; all are taken as equal")
        every = spacing = 1
    pattern = tuple(
        LayerSpec(
            attention=_attention(row, None if at % spacing else window),
            mlp=_moe(row) if is_moe and (at + 1) % every == 0 else _dense(row),
        )
        for at in range(math.lcm(every, spacing))
    )
    groups = [LayerGroup(repeat=rest // len(pattern), pattern=pattern)] if rest > 0 else []
    if first_dense:
        dense = LayerSpec(attention=_attention(row, window), mlp=_dense(row))
        groups.insert(0, LayerGroup(repeat=min(first_dense, layers), pattern=(dense,)))
    return tuple(groups)


def _is(row: Row, *families: str) -> bool:
    return row.lower("model_name").startswith(families)


def _window(row: Row) -> tuple[int | None, int]:
    """The sliding window, and every how many layers it is: `128 on every 2nd layer` is (128, 2)."""
    text = row.lower("attn_window")
    found = re.match(r"(\d+)(?:.*every ([1-9]\d*))?", text)
    if not found or found[1] == "0":
        return None, 1
    return int(found[1]), int(found[2] or 1)


def _attention(row: Row, window: int | None) -> Attention:
    heads, d_model = row.required("n_heads"), row.required("hidden")
    if row.says("attn", "mla"):
        return LatentAttention(
            num_heads=heads,
            q_lora_rank=Q_LORA_RANK if d_model > DIRECT_QUERIES_UP_TO else None,
            kv_lora_rank=KV_LORA_RANK,
            d_nope=D_NOPE,
            d_rope=D_ROPE,
            d_value=D_VALUE,
            sliding_window=window,
        )
    is_gpt_oss = _is(row, "gpt-oss")
    kv_heads = 1 if row.says("attn", "mqa") else row.count("n_kv_heads", heads)
    return GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        d_head=row.count("head_dim", max(d_model // heads, 1)),
        sliding_window=window,
        qkv_bias=is_gpt_oss or _has_biases(row) or _is(row, "qwen2", "qwen1"),
        out_bias=is_gpt_oss or _has_biases(row),
        qk_norm="per_head" if _is(row, "qwen3") else "none",
        sinks=is_gpt_oss,
    )


def _has_biases(row: Row) -> bool:
    """GPT-2's heirs have a bias in every linear layer; MPT and Nemotron have none."""
    return _is(row, "gpt", "bloom", "opt", "megatron") and not row.flag("gated_mlp")


def _activation(row: Row) -> Activation:
    if row.flag("gated_mlp"):
        return "swiglu_clamped" if _is(row, "gpt-oss") else "silu"
    return "relu" if _is(row, "nemotron") else "gelu"


def _dense(row: Row) -> DenseMlp:
    return DenseMlp(
        d_ff=row.whole("ffn_hidden") or row.required("moe_ffn_hidden"),
        gated=row.flag("gated_mlp") is True,
        activation=_activation(row),
        bias=_has_biases(row),
    )


def _moe(row: Row) -> MoeMlp:
    experts, d_ff = row.required("moe_experts"), row.whole("moe_ffn_hidden") or row.required("ffn_hidden")
    groups, top_groups = next(
        (sizes for prefix, sizes in EXPERT_GROUPS.items() if _is(row, prefix) and experts % sizes[0] == 0), (1, 1)
    )
    is_gpt_oss, is_deepseek = _is(row, "gpt-oss"), _is(row, "deepseek-v3", "kimi", "moonlight")
    return MoeMlp(
        num_experts=experts,
        top_k=row.required("moe_topk"),
        d_ff=d_ff,
        d_ff_shared=row.count("moe_shared", 0) * d_ff,
        gated=row.flag("gated_mlp") is True,
        activation=_activation(row),
        bias=is_gpt_oss,
        router="sigmoid" if is_deepseek else "softmax",
        router_bias=is_gpt_oss,
        balance_bias=is_deepseek,
        num_groups=groups,
        top_groups=top_groups,
    )
