"""Parity cases of what a model may be made of: norms, positions, latent attention, sinks, caps, later tokens."""

from typing import Any

POST, SANDWICH = {"norm_placement": "post"}, {"norm_placement": "sandwich"}
ALL_HEADS = {"qk_norm": "all_heads"}
NO_SP = {"sequence_parallel": False}
INTERLEAVED = {"schedule": "interleaved_1f1b"}
CLAMPED = {"activation": "swiglu_clamped"}
OLMO_2 = {"model": POST, "attention": ALL_HEADS}
GEMMA_2 = {
    "model": {
        **SANDWICH,
        "zero_centered_norm": True,
        "scaled_embedding": True,
        "logit_softcap": 0.5,
        "tied_embeddings": True,
    },
    "attention": {"logit_softcap": 0.2, "sliding_window": 5, "query_scale": 0.3},
    "mlp": {"activation": "gelu_tanh"},
}
GEMMA_3 = {
    "model": {**SANDWICH, "zero_centered_norm": True, "rope": {"theta": 1e6, "local_theta": 1e4}},
    "attention": {"sliding_window": 5, "qk_norm": "per_head"},
}
GPT_NEOX = {
    "model": {"parallel_residual": True, "norm": "layernorm", "rope": {"fraction": 0.5}},
    "attention": {"num_kv_heads": 4, "qkv_bias": True, "out_bias": True},
    "mlp": {"gated": False, "activation": "gelu", "bias": True},
}
# Without rotary embedding a bias of the keys adds the same to all scores of a query: its gradient is nothing but
# rounding, which no two programs share.
GPT_2 = {
    "model": {"learned_positions": 16, "rope": None, "norm": "layernorm", "tied_embeddings": True},
    "attention": {"num_kv_heads": 4, "out_bias": True},
    "mlp": {"gated": False, "activation": "gelu_tanh", "bias": True},
}
GPT_OSS = {
    "attention": {"sinks": True, "qkv_bias": True, "out_bias": True},
    "mlp": {**CLAMPED, "bias": True},
}
YARN = {
    "theta": 1e4,
    "scaling": {"kind": "yarn", "factor": 4.0, "original_max_positions": 8, "mscale_all_dim": 1.0},
}
LATENT = {"kind": "mla", "q_lora_rank": 12, "kv_lora_rank": 10, "d_nope": 8, "d_rope": 4, "d_value": 8}
MLA = {"attention": LATENT, "model": {"rope": YARN}}
MLA_V2_LITE = {"attention": {**LATENT, "q_lora_rank": None, "d_value": 16}, "model": {"norm": "layernorm"}}
MTP = {"model": {"mtp_depth": 1}}
MTP_OF_THREE = {
    **MLA,
    "model": {"mtp_depth": 3, "tied_embeddings": True, "head_bias": True},
    "recipe": {"mtp_loss_weight": 0.7},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo 2": OLMO_2,
    "gemma 2": GEMMA_2,
    "gemma 3": GEMMA_3,
    "gpt-neox": GPT_NEOX,
    "gpt-2": GPT_2,
    "gpt-oss": GPT_OSS,
    "mla": MLA,
    "mla without a latent of queries": MLA_V2_LITE,
    "mtp": MTP,
    "mtp of three": MTP_OF_THREE,
}
LAYERNORM_OVER_HEADS = {"model": {"norm": "layernorm"}, "attention": ALL_HEADS}
HEAD_BIAS = {"model": {"head_bias": True}}
SINKS_AND_CAP = {"attention": {"sinks": True, "logit_softcap": 0.2}}
SINKS_AND_WINDOW = {"attention": {"sinks": True, "sliding_window": 5}}


UP = {"recompute": "selective", "recompute_ops": ["latent_up"]}
UP_AND_MORE = {"recompute": "selective", "recompute_ops": ["norm", "activation", "latent_up", "attention"]}
DROPPING = {"dropout": 0.2, "attention_kernel": "unfused"}


def on(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    """`case` with a layout, and with the fields of its parts that `more` gives on top."""
    merged = dict(case)
    for key, value in more.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **FAMILIES,
        "layernorm over all heads": LAYERNORM_OVER_HEADS,
        "head bias": HEAD_BIAS,
        "sinks and cap": SINKS_AND_CAP,
        "sinks and window, selective recompute": on(SINKS_AND_WINDOW, recipe={"recompute": "selective"}),
        "gemma 2, selective recompute": on(GEMMA_2, recipe={"recompute": "selective"}),
        "mla, recompute of the way up": on(MLA, recipe=UP),
        "mla without a latent of queries, recompute of the way up": on(MLA_V2_LITE, recipe=UP),
        "mla, recompute of the way up and more": on(MLA, recipe=UP_AND_MORE),
        "mla, recompute of the way up, unfused": on(MLA, recipe={**UP, **DROPPING}),
        "mtp, ignored targets": on(MTP_OF_THREE, ignored=True, recipe={"micro_batch": 2}),
        "mtp of no weight": on(MTP, recipe={"mtp_loss_weight": 0.0}),
    },
    2: {
        **{f"tp {name}": on(case, tp=2) for name, case in FAMILIES.items()},
        **{
            f"tp {name} without sequence parallelism": on(case, tp=2, recipe=NO_SP)
            for name, case in FAMILIES.items()
        },
        **{f"pp {name}": on(case, pp=2) for name, case in FAMILIES.items()},
        "tp layernorm over all heads": on(LAYERNORM_OVER_HEADS, tp=2),
        "tp layernorm over all heads, one key head": on(LAYERNORM_OVER_HEADS, tp=2, attention={"num_kv_heads": 1}),
        "tp olmo 2, one key head": on(OLMO_2, tp=2, attention={"num_kv_heads": 1}),
        "tp head bias": on(HEAD_BIAS, tp=2),
        "tp sinks and cap": on(SINKS_AND_CAP, tp=2),
        "tp sinks and window": on(SINKS_AND_WINDOW, tp=2),
        "tp gemma 2, full recompute": on(GEMMA_2, tp=2, recipe={"recompute": "full"}),
        "tp gpt-oss, selective recompute": on(GPT_OSS, tp=2, recipe={"recompute": "selective"}),
        "tp olmo 2, full recompute": on(OLMO_2, tp=2, recipe={"recompute": "full"}),
        "tp mla, full recompute": on(MLA, tp=2, recipe={"recompute": "full"}),
        "tp mla, selective recompute": on(MLA, tp=2, recipe={"recompute": "selective"}),
        "tp mla, sliding window": on(MLA, tp=2, attention={"sliding_window": 5}),
        "tp mla, recompute of the way up": on(MLA, tp=2, recipe=UP),
        "tp mla without sequence parallelism, recompute of the way up": on(
            MLA, tp=2, recipe={**UP_AND_MORE, **NO_SP}
        ),
        "tp mla without a latent of queries, recompute of the way up": on(MLA_V2_LITE, tp=2, recipe=UP_AND_MORE),
        "dp zero 3 mla, recompute of the way up": on(MLA, dp=2, recipe={**UP, "zero": 3}),
        **{
            f"cp {method} mla, recompute of the way up": on(MLA, cp=2, recipe={**UP, "cp_method": method})
            for method in ("all_gather", "ring")
        },
        **{f"dp zero {zero} mtp": on(MTP_OF_THREE, dp=2, recipe={"zero": zero}) for zero in (1, 3)},
        "dp mtp, ignored targets": on(MTP_OF_THREE, dp=2, ignored=True),
        "tp mtp, ignored targets": on(MTP, tp=2, ignored=True),
        "tp mtp, full recompute": on(MTP_OF_THREE, tp=2, recipe={"recompute": "full"}),
        "pp mtp, all layers on the first stage": on(MTP, pp=2, stage_layers=[4, 0]),
        "pp interleaved mtp": on(MTP_OF_THREE, pp=2, vpp=2, recipe=INTERLEAVED),
        "dp zero 3 gpt-2": on(GPT_2, dp=2, recipe={"zero": 3}),
        "dp zero 1 gemma 2": on(GEMMA_2, dp=2, recipe={"zero": 1}),
    },
    4: {
        **{
            f"tp x dp zero {zero} {name}": on(case, tp=2, dp=2, recipe={"zero": zero})
            for zero, (name, case) in enumerate(list(FAMILIES.items())[:4])
        },
        "tp x dp zero 3 gpt-2": on(GPT_2, tp=2, dp=2, recipe={"zero": 3}),
        "tp x dp zero 2 gpt-oss": on(GPT_OSS, tp=2, dp=2, recipe={"zero": 2}),
        "tp olmo 2, two key heads on four ranks": on(OLMO_2, tp=4),
        "tp layernorm over one key head": on(LAYERNORM_OVER_HEADS, tp=4, attention={"num_kv_heads": 1}),
        "tp gpt-oss": on(GPT_OSS, tp=4),
        "tp gpt-2 without sequence parallelism": on(GPT_2, tp=4, recipe=NO_SP),
        "tp x pp gemma 2": on(GEMMA_2, tp=2, pp=2),
        "tp x pp interleaved gpt-2": on(GPT_2, tp=2, pp=2, vpp=2, recipe=INTERLEAVED),
        "tp head bias": on(HEAD_BIAS, tp=4),
        "tp mla": on(MLA, tp=4),
        "tp mla without sequence parallelism": on(MLA, tp=4, recipe=NO_SP),
        **{f"tp x dp zero {zero} mla": on(MLA, tp=2, dp=2, recipe={"zero": zero}) for zero in range(4)},
        "tp x pp mtp": on(MTP, tp=2, pp=2),
        "tp x pp mtp without sequence parallelism": on(MTP_OF_THREE, tp=2, pp=2, recipe=NO_SP),
        **{f"dp x pp mtp zero {zero}": on(MTP, dp=2, pp=2, recipe={"zero": zero}) for zero in range(4)},
        "dp x pp interleaved mtp zero 2, ignored targets": on(
            MTP_OF_THREE, dp=2, pp=2, vpp=2, recipe={"zero": 2, **INTERLEAVED}, ignored=True
        ),
        "tp x dp zero 3 mtp": on(MTP_OF_THREE, tp=2, dp=2, recipe={"zero": 3, "recompute": "full"}),
        "tp x pp mla": on(MLA, tp=2, pp=2),
    },
    8: {
        "tp x pp x dp zero 1 gemma 2": on(GEMMA_2, tp=2, pp=2, dp=2, recipe={"zero": 1}),
        "tp x pp x dp zero 2 mtp": on(MTP_OF_THREE, tp=2, pp=2, dp=2, recipe={"zero": 2}),
        "tp x pp x dp zero 3 mla": on(MLA, tp=2, pp=2, dp=2, recipe={"zero": 3}),
        "tp x pp x dp zero 3 gpt-2": on(GPT_2, tp=2, pp=2, dp=2, recipe={"zero": 3}),
    },
}
