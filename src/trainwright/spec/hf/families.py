"""One function for each family of models: what its modeling code builds from which key of config.json.

Defaults (`absent=`) are those of the family's configuration class in `transformers`.
"""

from collections.abc import Callable
from typing import Any

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.hf.config import Config
from trainwright.spec.hf.parts import (
    Plain,
    frame,
    gated_mlp,
    grouped,
    multi_head,
    num_layers,
    read_activation,
    read_attention,
    read_experts,
    read_rope,
    read_rope_scaling,
    read_windows,
)


def _llama(config: Config) -> Plain:
    bias = config.flag("attention_bias", absent=False)
    attention = read_attention(config, kv_heads=config.whole("num_attention_heads"), qkv_bias=bias, out_bias=bias)
    mlp = {
        "kind": "dense",
        "d_ff": config.whole("intermediate_size"),
        "activation": read_activation(config),
        "bias": config.flag("mlp_bias", absent=False),
    }
    return frame(config, [{"attention": attention, "mlp": mlp}] * num_layers(config))


def _mistral(config: Config) -> Plain:
    attention = read_attention(config, sliding_window=config.whole_or_none("sliding_window", absent=4096))
    return frame(config, [{"attention": attention, "mlp": gated_mlp(config)}] * num_layers(config))


def _mixtral(config: Config) -> Plain:
    attention = read_attention(config, sliding_window=config.whole_or_none("sliding_window", absent=None))
    experts, top_k = read_experts(config, "num_local_experts", "num_experts")
    mlp = {
        "kind": "moe",
        "num_experts": experts,
        "top_k": top_k,
        "d_ff": config.whole("intermediate_size"),
        "activation": read_activation(config),
    }
    return frame(
        config,
        [{"attention": attention, "mlp": mlp}] * num_layers(config),
        norm_epsilon=config.number("rms_norm_eps", absent=1e-5),
        rope=read_rope(config, theta=1e6),
    )


def _olmo2(config: Config) -> Plain:
    bias = config.flag("attention_bias", absent=False)
    attention = read_attention(
        config,
        kv_heads=config.whole("num_attention_heads"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="all_heads",
    )
    return frame(
        config,
        [{"attention": attention, "mlp": gated_mlp(config)}] * num_layers(config),
        norm_placement="post",
        norm_epsilon=config.number("rms_norm_eps", absent=1e-5),
    )


def _qwen_windows(config: Config) -> list[int | None]:
    if not config.flag("use_sliding_window", absent=False):
        return [None] * num_layers(config)
    first = config.whole("max_window_layers", absent=28, least=0)
    return read_windows(config, config.whole_or_none("sliding_window", absent=4096), lambda index: index >= first)


def _qwen2(config: Config) -> Plain:
    layers = [
        {"attention": read_attention(config, qkv_bias=True, sliding_window=window), "mlp": gated_mlp(config)}
        for window in _qwen_windows(config)
    ]
    return frame(config, layers)


def _qwen3(config: Config) -> Plain:
    bias = config.flag("attention_bias", absent=False)
    choices = {"qkv_bias": bias, "out_bias": bias, "qk_norm": "per_head", "d_head": 128}
    layers = [
        {"attention": read_attention(config, sliding_window=window, **choices), "mlp": gated_mlp(config)}
        for window in _qwen_windows(config)
    ]
    return frame(config, layers)


def _qwen_moe_layers(config: Config, attentions: list[Plain], **choices: Any) -> list[Plain]:
    """Layers of Qwen2-MoE and Qwen3-MoE: every decoder_sparse_step-th has experts, but for mlp_only_layers."""
    experts, top_k = read_experts(config, "num_experts", "num_local_experts")
    sparse_step = config.whole("decoder_sparse_step", absent=1)
    _, dense = config.find("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        config.reject("mlp_only_layers", "must be a list of layer numbers")
    moe = {
        "kind": "moe",
        "num_experts": experts,
        "top_k": top_k,
        "d_ff": config.whole("moe_intermediate_size"),
        "activation": read_activation(config),
        "normalize_top_k": config.flag("norm_topk_prob", absent=False),
        **choices,
    }
    return [
        {
            "attention": attention,
            "mlp": gated_mlp(config) if index in dense or (index + 1) % sparse_step else moe,
        }
        for index, attention in enumerate(attentions)
    ]


def _qwen2_moe(config: Config) -> Plain:
    config.refuse("use_sliding_window", "sliding windows of Qwen2-MoE can't be read; may be false")
    attention = read_attention(config, qkv_bias=config.flag("qkv_bias", absent=True))
    layers = _qwen_moe_layers(
        config,
        [attention] * num_layers(config),
        d_ff_shared=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return frame(config, layers)


def _qwen3_moe(config: Config) -> Plain:
    used = config.flag("use_sliding_window", absent=False)
    bias = config.flag("attention_bias", absent=False)
    attention = read_attention(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="per_head",
        sliding_window=config.whole_or_none("sliding_window", absent=4096) if used else None,
    )
    return frame(config, _qwen_moe_layers(config, [attention] * num_layers(config)))


def _gemma_frame(config: Config, layers: list[Plain], **choices: Any) -> Plain:
    """What the three generations share: 1 + weight in norms, scaled and tied embeddings, causal attention."""
    config.refuse("use_bidirectional_attention", "attention without a causal mask can't be described")
    return frame(
        config,
        layers,
        tied_embeddings=config.flag("tie_word_embeddings", absent=True),
        zero_centered_norm=True,
        scaled_embedding=True,
        **choices,
    )


def _gemma(config: Config) -> Plain:
    bias = config.flag("attention_bias", absent=False)
    key = "hidden_activation" if config.find("hidden_activation")[1] is not None else "hidden_act"
    activation = read_activation(config, key, "gelu_pytorch_tanh")
    # The first releases say "gelu" and mean the approximation by tanh (transformers PR 29402).
    activation = "gelu_tanh" if activation == "gelu" else activation
    layer = {
        "attention": read_attention(config, d_head=256, qkv_bias=bias, out_bias=bias),
        "mlp": {**gated_mlp(config), "activation": activation},
    }
    return _gemma_frame(config, [layer] * num_layers(config))


def _gemma_windowed(config: Config, windows: list[int | None], **choices: Any) -> list[Plain]:
    """Layers of Gemma 2 and 3."""
    bias = config.flag("attention_bias", absent=False)
    mlp = {
        "kind": "dense",
        "d_ff": config.whole("intermediate_size"),
        "activation": read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
    }
    scale = config.number("query_pre_attn_scalar", absent=256.0) ** -0.5
    shared = {"d_head": 256, "qkv_bias": bias, "out_bias": bias, "query_scale": scale, **choices}
    return [
        {"attention": read_attention(config, sliding_window=window, **shared), "mlp": mlp} for window in windows
    ]


def _gemma2(config: Config) -> Plain:
    window = config.whole_or_none("sliding_window", absent=4096)
    layers = _gemma_windowed(
        config,
        read_windows(config, window, lambda index: index % 2 == 0),
        logit_softcap=config.number_or_none("attn_logit_softcapping", absent=50.0),
    )
    softcap = config.number_or_none("final_logit_softcapping", absent=30.0)
    return _gemma_frame(config, layers, norm_placement="sandwich", logit_softcap=softcap)


GEMMA3_ABSENT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Gemma3TextConfig of transformers; the published text_config tables leave out what equals it."""


def _gemma3(config: Config) -> Plain:
    """The language model of a gemma3 config.json, which has it in `text_config`."""
    inner = config.table("text_config")
    if inner is None:
        raise InvalidSpec("text_config: missing; a config.json of gemma3 has its language model there")
    tied = inner.flag("tie_word_embeddings", absent=config.flag("tie_word_embeddings", absent=True))
    return {**_gemma3_text(inner), "tied_embeddings": tied}


def _gemma3_text(config: Config) -> Plain:
    config = config.with_absent(GEMMA3_ABSENT)
    window = config.whole_or_none("sliding_window", absent=4096)
    period = config.whole("sliding_window_pattern", "_sliding_window_pattern", absent=6)
    layers = _gemma_windowed(
        config,
        read_windows(config, window, lambda index: (index + 1) % period != 0),
        qk_norm="per_head",
        logit_softcap=config.number_or_none("attn_logit_softcapping", absent=None),
    )
    softcap = config.number_or_none("final_logit_softcapping", absent=None)
    rope = _gemma3_rope(config)
    return _gemma_frame(config, layers, norm_placement="sandwich", logit_softcap=softcap, rope=rope)


def _gemma3_rope(config: Config) -> Plain:
    """Two rotary embeddings: layers with a window have their own theta, and no scaling."""
    parameters = config.table("rope_parameters")
    full = parameters.table("full_attention") if parameters else config.table("rope_scaling")
    sliding = parameters.table("sliding_attention") if parameters else None
    theta, local = config.number("rope_theta", absent=1e6), config.number("rope_local_base_freq", absent=1e4)
    if sliding is not None and read_rope_scaling(sliding, config) is not None:
        sliding.reject("rope_type", "of layers with a window may be default only")
    return {
        "theta": full.number("rope_theta", absent=theta) if full else theta,
        "local_theta": sliding.number("rope_theta", absent=local) if sliding else local,
        "scaling": read_rope_scaling(full, config) if full else None,
    }


def _latent_attention(config: Config, q_lora_rank: int | None) -> Plain:
    config.refuse("attention_bias", "biases of latent attention can't be described; may be false")
    return {
        "kind": "mla",
        "num_heads": config.whole("num_attention_heads"),
        "q_lora_rank": config.whole_or_none("q_lora_rank", absent=q_lora_rank),
        "kv_lora_rank": config.whole("kv_lora_rank"),
        "d_nope": config.whole("qk_nope_head_dim"),
        "d_rope": config.whole("qk_rope_head_dim"),
        "d_value": config.whole("v_head_dim"),
    }


def _deepseek(config: Config, *, router: str, method: str, normalize: bool, dense: int, scale: float) -> Plain:
    """DeepSeek-V2, V3 and models of the same code: some dense layers, then experts of which some are shared."""
    config.refuse("mlp_bias", "biases of this family's MLP can't be described; may be false")
    experts, top_k = read_experts(config, "n_routed_experts", "num_local_experts", "num_experts")
    d_ff = config.whole("moe_intermediate_size")
    method = config.word("topk_method", ("greedy", "group_limited_greedy", "noaux_tc"), absent=method)
    # Greedy selection has no groups, whatever n_group says.
    groups = 1 if method == "greedy" else config.whole("n_group")
    top_groups = 1 if method == "greedy" else config.whole("topk_group")
    if experts % groups:
        config.reject("n_group", f"must divide the {experts} experts")
    if top_groups > groups:
        config.reject("topk_group", f"must be at most n_group={groups}")
    moe = {
        "kind": "moe",
        "num_experts": experts,
        "top_k": top_k,
        "d_ff": d_ff,
        "d_ff_shared": d_ff * config.whole("n_shared_experts", absent=0, least=0),
        "activation": read_activation(config),
        "router": config.word("scoring_func", ("softmax", "sigmoid"), absent=router),
        "balance_bias": method == "noaux_tc",
        "normalize_top_k": config.flag("norm_topk_prob", absent=normalize),
        "routed_scale": config.number("routed_scaling_factor", absent=scale),
        "num_groups": groups,
        "top_groups": top_groups,
    }
    first = config.whole("first_k_dense_replace", absent=dense, least=0)
    every = config.whole("moe_layer_freq", absent=1)
    attention = _latent_attention(config, 1536)
    layers = [
        {"attention": attention, "mlp": moe if index >= first and index % every == 0 else gated_mlp(config)}
        for index in range(num_layers(config))
    ]
    depth = config.whole("num_nextn_predict_layers", "num_mtp_layers", absent=0, least=0)
    return frame(config, layers, mtp_depth=depth)


def _deepseek_v2(config: Config) -> Plain:
    return _deepseek(config, router="softmax", method="greedy", normalize=False, dense=0, scale=1.0)


def _deepseek_v3(config: Config) -> Plain:
    return _deepseek(config, router="sigmoid", method="noaux_tc", normalize=True, dense=3, scale=2.5)


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""GptOssConfig of transformers, where a file says nothing of rotary embeddings."""


def _gpt_oss(config: Config) -> Plain:
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.number(key, absent=value) != value:
            config.reject(key, f"another clamped SwiGLU than gpt-oss's can't be described; may be {value}")
    bias = config.flag("attention_bias", absent=True)
    experts, top_k = read_experts(config, "num_local_experts", "num_experts")
    mlp = {
        "kind": "moe",
        "num_experts": experts,
        "top_k": top_k,
        "d_ff": config.whole("intermediate_size"),
        "activation": "swiglu_clamped",
        "bias": True,
        "router_bias": True,
    }
    shared = {"d_head": 64, "qkv_bias": bias, "out_bias": bias, "sinks": True}
    windows = read_windows(
        config, config.whole_or_none("sliding_window", absent=128), lambda index: index % 2 == 0
    )
    layers = [
        {"attention": read_attention(config, sliding_window=window, **shared), "mlp": mlp} for window in windows
    ]
    silent = config.table("rope_scaling") is None and config.table("rope_parameters") is None
    rope_config = config.with_absent({"rope_scaling": GPT_OSS_ROPE}) if silent else config
    return frame(
        config,
        layers,
        norm_epsilon=config.number("rms_norm_eps", absent=1e-5),
        rope=read_rope(rope_config, theta=150000.0),
    )


def _gpt2(config: Config) -> Plain:
    config.refuse("add_cross_attention", "attention to an encoder can't be described; may be false")
    config.refuse("scale_attn_by_inverse_layer_idx", "scaling by layer can't be described; may be false")
    if not config.flag("scale_attn_weights", absent=True):
        config.reject("scale_attn_weights", "scores without a scale can't be described; may be true")
    d_model = config.whole("n_embd", "hidden_size")
    positions = config.whole("n_positions", "n_ctx", "max_position_embeddings")
    attention = multi_head(config, d_model, "n_head", "num_attention_heads", qkv_bias=True, out_bias=True)
    mlp = {
        "kind": "dense",
        "d_ff": config.whole("n_inner", absent=4 * d_model),
        "gated": False,
        "activation": read_activation(config, "activation_function", "gelu_new"),
        "bias": True,
    }
    layers = [{"attention": attention, "mlp": mlp}] * num_layers(config, "n_layer", "num_hidden_layers")
    return {
        "d_model": d_model,
        "vocab_size": config.whole("vocab_size"),
        "layer_groups": grouped(layers),
        "tied_embeddings": config.flag("tie_word_embeddings", absent=True),
        "norm": "layernorm",
        "norm_epsilon": config.number("layer_norm_epsilon", absent=1e-5),
        "rope": None,
        "learned_positions": positions,
        "max_positions": positions,
    }


def _gpt_neox(config: Config) -> Plain:
    bias = config.flag("attention_bias", absent=True)
    d_model = config.whole("hidden_size")
    attention = multi_head(config, d_model, "num_attention_heads", qkv_bias=bias, out_bias=bias)
    mlp = {
        "kind": "dense",
        "d_ff": config.whole("intermediate_size"),
        "gated": False,
        "activation": read_activation(config, absent="gelu"),
        "bias": True,
    }
    return frame(
        config,
        [{"attention": attention, "mlp": mlp}] * num_layers(config),
        norm="layernorm",
        norm_epsilon=config.number("layer_norm_eps", absent=1e-5),
        parallel_residual=config.flag("use_parallel_residual", absent=True),
        rope=read_rope(config, theta_key="rotary_emb_base", fraction=config.number("rotary_pct", absent=0.25)),
    )


FAMILIES: dict[str, Callable[[Config], Plain]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "olmo2": _olmo2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3ForCausalLM": "gemma3_text",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "Olmo2ForCausalLM": "olmo2",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
}
