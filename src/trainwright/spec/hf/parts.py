"""What the families share: the frame around the layers, layers as groups, attention, windows, rotary embedding.

Each function reads its keys of a `Config` and gives plain values, as ModelSpec parses them.
"""

from collections.abc import Callable
from typing import Any

from trainwright.spec.errors import reject
from trainwright.spec.hf.config import Config

Plain = dict[str, Any]

MOST_LAYERS = 10_000
"""More layers than that are a typing error, and would take their toll in memory."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def read_activation(config: Config, key: str = "hidden_act", absent: str = "silu") -> str:
    return config.word(key, ACTIVATIONS, absent=absent)


def frame(config: Config, layers: list[Plain], *, rope: Plain | None = None, **choices: Any) -> Plain:
    """What nearly all families share, around their layers. Without `rope` it is read the common way."""
    return {
        "d_model": config.whole("hidden_size"),
        "vocab_size": config.whole("vocab_size"),
        "layer_groups": grouped(layers),
        "tied_embeddings": config.flag("tie_word_embeddings", absent=False),
        "norm_epsilon": config.number("rms_norm_eps", absent=1e-6),
        "max_positions": config.whole("max_position_embeddings"),
        "rope": rope or read_rope(config),
        **choices,
    }


def grouped(layers: list[Plain]) -> list[Plain]:
    """Layers as groups of a repeated pattern: the longest run that a short pattern explains, from the front."""
    groups: list[Plain] = []
    start = 0
    while start < len(layers):
        best_length, best_repeat = 1, 1
        for length in range(1, min(64, len(layers) - start) + 1):
            pattern, repeat = layers[start : start + length], 1
            while layers[start + repeat * length : start + (repeat + 1) * length] == pattern:
                repeat += 1
            if repeat > 1 and length * repeat > best_length * best_repeat:
                best_length, best_repeat = length, repeat
        groups.append({"repeat": best_repeat, "pattern": layers[start : start + best_length]})
        start += best_length * best_repeat
    return groups


def num_layers(config: Config, *keys: str) -> int:
    keys = keys or ("num_hidden_layers",)
    number = config.whole(*keys)
    if number > MOST_LAYERS:
        config.reject(config.find(*keys)[0], f"must be at most {MOST_LAYERS}")
    return number


def multi_head(config: Config, d_model: int, *keys: str, **choices: Any) -> Plain:
    """Attention from before heads could share keys and values: `keys` name the number of heads."""
    heads = config.whole(*keys)
    if d_model % heads:
        config.reject(config.find(*keys)[0], f"must divide the model's width {d_model}")
    return {"kind": "gqa", "num_heads": heads, "num_kv_heads": heads, "d_head": d_model // heads, **choices}


def read_attention(
    config: Config, *, kv_heads: int | None = None, d_head: int | None = None, **choices: Any
) -> Plain:
    """Grouped-query attention. `kv_heads` is what a missing num_key_value_heads means where a file may leave it
    out (null is one per head), `d_head` a missing head_dim where that isn't hidden_size / num_attention_heads."""
    heads, d_model = config.whole("num_attention_heads"), config.whole("hidden_size")
    if config.has("num_key_value_heads") or kv_heads is None:
        absent = {"absent": heads} if config.has("num_key_value_heads") else {}
        kv_heads = config.whole("num_key_value_heads", **absent)
    if heads % kv_heads:
        config.reject("num_key_value_heads", f"must divide num_attention_heads={heads}")
    width = config.whole("head_dim", absent=d_head)
    if width is None:
        if d_model % heads:
            config.reject(
                "hidden_size", f"must be a multiple of num_attention_heads={heads}, or head_dim be given"
            )
        width = d_model // heads
    return {"kind": "gqa", "num_heads": heads, "num_kv_heads": kv_heads, "d_head": width, **choices}


def read_windows(config: Config, window: int | None, pattern: Callable[[int], bool]) -> list[int | None]:
    """The sliding window of each layer: by layer_types where it is given, else `window` where `pattern` says."""
    number, kinds = num_layers(config), config.words("layer_types")
    if kinds is None:
        return [window if pattern(index) else None for index in range(number)]
    if len(kinds) != number:
        config.reject("layer_types", f"must have num_hidden_layers={number} entries, not {len(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            reject(
                "layer_types", kind, "this attention can't be described; may be full_attention, sliding_attention"
            )
    if window is None and "sliding_attention" in kinds:
        config.reject("sliding_window", "must be a whole number where layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def read_rope(
    config: Config, *, theta: float = 10000.0, theta_key: str = "rope_theta", fraction: float = 1.0
) -> Plain:
    """Rotary embedding: `rope_theta` and `rope_scaling`, or both in `rope_parameters` (transformers 5)."""
    scaling = config.table("rope_scaling")
    parameters = config.table("rope_parameters") or scaling
    if parameters is None:
        return {"theta": config.number(theta_key, absent=theta), "fraction": fraction}
    if parameters.table("full_attention") is not None:
        config.reject("rope_parameters", "differs by layer type, which is read of gemma3 only")
    return {
        "theta": parameters.number("rope_theta", absent=config.number(theta_key, absent=theta)),
        "fraction": parameters.number("partial_rotary_factor", absent=fraction),
        "scaling": read_rope_scaling(parameters, config),
    }


def read_rope_scaling(parameters: Config, config: Config) -> Plain | None:
    key = "type" if parameters.has("type") and not parameters.has("rope_type") else "rope_type"
    kind = parameters.word(key, ("default", "linear", "llama3", "yarn"), absent="default")
    if kind == "default":
        return None
    values: Plain = {
        "kind": kind,
        "factor": parameters.number("factor"),
        "original_max_positions": parameters.whole(
            "original_max_position_embeddings", absent=config.whole("max_position_embeddings")
        ),
    }
    if kind == "llama3":
        values["low_frequency_factor"] = parameters.number("low_freq_factor")
        values["high_frequency_factor"] = parameters.number("high_freq_factor")
    if kind == "yarn":
        if parameters.number("attention_factor", absent=None) is not None:
            parameters.reject("attention_factor", "can't be described; leave it out for yarn's own rule")
        values["beta_fast"] = parameters.number("beta_fast", absent=32.0)
        values["beta_slow"] = parameters.number("beta_slow", absent=1.0)
        values["truncate"] = parameters.flag("truncate", absent=True)
        values["mscale"] = parameters.number("mscale", absent=None)
        values["mscale_all_dim"] = parameters.number("mscale_all_dim", absent=None)
    return values


def gated_mlp(config: Config) -> Plain:
    return {"kind": "dense", "d_ff": config.whole("intermediate_size"), "activation": read_activation(config)}


def read_experts(config: Config, *keys: str) -> tuple[int, int]:
    """Number of routed experts, and how many of them a token uses."""
    experts, top_k = config.whole(*keys), config.whole("num_experts_per_tok")
    if top_k > experts:
        config.reject("num_experts_per_tok", f"must be at most the {experts} experts")
    return experts, top_k
