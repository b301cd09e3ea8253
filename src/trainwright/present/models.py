"""Models for people: a table of the catalogue, and one model with its layers and counts."""

from collections.abc import Mapping

from rich.console import Group, RenderableType

from trainwright.present.parts import bars, facts, headline, section, table
from trainwright.spec.model import (
    CONVENTION_TEXT,
    Attention,
    DenseMlp,
    GroupedQueryAttention,
    LayerSpec,
    Mlp,
    ModelSpec,
)
from trainwright.spec.units import count_text, scaled


def models_view(models: Mapping[str, ModelSpec]) -> RenderableType:
    """One line per model, smallest first."""
    columns = [("model", "<"), ("parameters", ">"), ("active", ">"), ("layers", ">"), ("d_model", ">")]
    columns += [("vocabulary", ">"), ("positions", ">"), ("layer", "<")]
    rows = [
        [
            name,
            count_text(model.params),
            count_text(model.active_params),
            str(model.num_layers),
            f"{model.d_model:,}",
            f"{model.vocab_size:,}",
            f"{model.max_positions:,}",
            _short_text(model.layers[-1]),
        ]
        for name, model in sorted(models.items(), key=lambda item: item[1].params)
    ]
    return table(columns, rows)


def model_view(model: ModelSpec, seq_len: int) -> RenderableType:
    """One model in full."""
    shape = [
        ("parameters", f"{model.params:,} ({count_text(model.params)})"),
        ("active", f"{model.active_params:,} of them meet one token" if model.is_moe else "all of them"),
        ("width", f"d_model {model.d_model:,}"),
        (
            "vocabulary",
            f"{model.vocab_size:,}, head {'tied to the embedding' if model.tied_embeddings else 'untied'}",
        ),
        ("positions", f"up to {model.max_positions:,}"),
        ("norm", f"{model.norm}, {model.norm_placement}"),
    ]
    if model.mtp_depth:
        shape.append(
            ("MTP", f"{model.mtp_depth} module(s), {count_text(model.mtp_params)} parameters, not in the total")
        )
    if model.source:
        shape.append(("source", model.source))
    layers = [(f"{count} x", _layer_text(layer)) for layer, count in model.layer_counts().items()]
    parts = [(name, float(count), f"{count:,}") for name, count in model.params_by_part.items() if count]
    flops = [
        (convention, f"{scaled(model.flops_per_token(seq_len, convention), 'FLOP')} - {text}")
        for convention, text in CONVENTION_TEXT.items()
    ]
    return Group(
        headline(model.name),
        section("Shape", facts(shape)),
        section(f"Layers: {model.num_layers}", facts(layers)),
        section("Parameters by part", bars(parts, float(model.params))),
        section(f"Training FLOPs per token at sequences of {seq_len:,}, by what is counted", facts(flops)),
    )


def _short_text(layer: LayerSpec) -> str:
    attention, mlp = layer.attention, layer.mlp
    kind = "MLA" if attention.kind == "mla" else f"{attention.num_heads}/{attention.num_kv_heads} heads"
    width = f"d_ff {mlp.d_ff:,}"
    return (
        f"{kind}, {width}" if isinstance(mlp, DenseMlp) else f"{kind}, {mlp.top_k} of {mlp.num_experts} x {width}"
    )


def _layer_text(layer: LayerSpec) -> str:
    return f"{_attention_text(layer.attention)}; {_mlp_text(layer.mlp)}"


def _attention_text(attention: Attention) -> str:
    window = f", window of {attention.sliding_window:,}" if attention.sliding_window else ""
    if isinstance(attention, GroupedQueryAttention):
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        kind = "multi-head" if heads == kv_heads else "multi-query" if kv_heads == 1 else "grouped-query"
        return f"{kind} attention, {heads} heads of {attention.d_head}, {kv_heads} for keys and values{window}"
    return (
        f"latent attention, {attention.num_heads} heads, latent of {attention.kv_lora_rank}, "
        f"{attention.d_nope} + {attention.d_rope} rotary per head{window}"
    )


def _mlp_text(mlp: Mlp) -> str:
    shape = f"{'gated ' if mlp.gated else ''}MLP of {mlp.d_ff:,} ({mlp.activation})"
    if isinstance(mlp, DenseMlp):
        return shape
    shared = f", shared experts of {mlp.d_ff_shared:,}" if mlp.d_ff_shared else ""
    return f"{mlp.top_k} of {mlp.num_experts} experts, each a {shape}{shared}"
