"""Parameter counts against an independent oracle: the models that `transformers` builds from the same config.

For each family several random tiny configs are built on the meta device; each parameter tensor is counted once
(a tied head is one tensor with its embedding) and the sum must be ours, to the integer.
"""

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.spec.hf import model_from_hf
from trainwright.spec.model import MoeMlp


def _common(rng: random.Random) -> dict[str, Any]:
    heads, d_head = rng.choice([4, 8]), rng.choice([4, 8, 12])
    return {
        "vocab_size": rng.randrange(50, 400),
        "hidden_size": heads * rng.choice([4, 8, 12]),
        "intermediate_size": rng.randrange(10, 90),
        "num_hidden_layers": rng.randrange(1, 9),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "head_dim": d_head,
        "max_position_embeddings": 128,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _llama(rng: random.Random) -> dict[str, Any]:
    return {**_common(rng), "attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}


def _windowed(rng: random.Random) -> dict[str, Any]:
    return {**_common(rng), "sliding_window": rng.choice([None, 16])}


def _qwen2(rng: random.Random) -> dict[str, Any]:
    values = _common(rng)
    del values["head_dim"]
    window = rng.random() < 0.5
    return {**values, "use_sliding_window": window, "max_window_layers": rng.randrange(0, 9), "sliding_window": 16}


def _qwen3(rng: random.Random) -> dict[str, Any]:
    return {**_common(rng), "attention_bias": rng.random() < 0.5}


def _gemma(rng: random.Random) -> dict[str, Any]:
    return {**_common(rng), "attention_bias": rng.random() < 0.5, "pad_token_id": 0}


def _gemma_windowed(rng: random.Random) -> dict[str, Any]:
    return {**_gemma(rng), "sliding_window": 16, "query_pre_attn_scalar": rng.choice([8, 144, 256])}


def _mixtral(rng: random.Random) -> dict[str, Any]:
    experts = rng.randrange(2, 9)
    return {**_windowed(rng), "num_local_experts": experts, "num_experts_per_tok": rng.randrange(1, experts + 1)}


def _qwen_moe(rng: random.Random) -> dict[str, Any]:
    return {
        **_common(rng),
        "num_experts": rng.randrange(4, 9),
        "num_experts_per_tok": rng.randrange(1, 5),
        "moe_intermediate_size": rng.randrange(5, 40),
        "decoder_sparse_step": rng.choice([1, 1, 2, 3]),
        "mlp_only_layers": rng.choice([[], [0], [1, 2]]),
        "norm_topk_prob": rng.random() < 0.5,
    }


def _qwen2_moe(rng: random.Random) -> dict[str, Any]:
    values = {**_qwen_moe(rng), "shared_expert_intermediate_size": rng.randrange(5, 40)}
    del values["head_dim"]
    return {**values, "qkv_bias": rng.random() < 0.5}


def _qwen3_moe(rng: random.Random) -> dict[str, Any]:
    return {**_qwen_moe(rng), "attention_bias": rng.random() < 0.5}


def _deepseek(rng: random.Random) -> dict[str, Any]:
    values = _common(rng)
    del values["head_dim"], values["num_key_value_heads"]
    groups = rng.choice([1, 2])
    return {
        **values,
        "q_lora_rank": rng.choice([None, 12]),
        "kv_lora_rank": rng.randrange(4, 20),
        "qk_nope_head_dim": rng.choice([4, 8]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([4, 8, 12]),
        "n_routed_experts": rng.choice([4, 8]),
        "num_experts_per_tok": rng.randrange(1, 3),
        "n_shared_experts": rng.randrange(1, 3),
        "moe_intermediate_size": rng.randrange(5, 40),
        "first_k_dense_replace": rng.randrange(0, 4),
        "n_group": groups,
        "topk_group": rng.randrange(1, groups + 1),
    }


def _gpt_oss(rng: random.Random) -> dict[str, Any]:
    return {**_mixtral(rng), "sliding_window": 16, "attention_bias": rng.random() < 0.5}


def _olmo2(rng: random.Random) -> dict[str, Any]:
    values = {**_common(rng), "attention_bias": rng.random() < 0.5}
    del values["head_dim"]
    return values


def _gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([2, 4])
    return {
        "vocab_size": rng.randrange(50, 400),
        "n_embd": heads * rng.choice([4, 8]),
        "n_head": heads,
        "n_layer": rng.randrange(1, 6),
        "n_positions": rng.randrange(16, 64),
        "n_inner": rng.choice([None, 40]),
    }


def _gpt_neox(rng: random.Random) -> dict[str, Any]:
    values = _common(rng)
    del values["head_dim"], values["num_key_value_heads"]
    return {
        **values,
        "use_parallel_residual": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "rotary_pct": rng.choice([0.25, 0.5, 1.0]),
    }


TINY = {
    "llama": _llama,
    "mistral": _windowed,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma_windowed,
    "gemma3_text": _gemma_windowed,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "olmo2": _olmo2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


@pytest.mark.parametrize("family", TINY)
def test_parameters_are_those_that_transformers_builds(family: str) -> None:
    rng = random.Random(family)
    for _ in range(6):
        choices = TINY[family](rng)
        config = AutoConfig.for_model(family, **choices)
        with torch.device("meta"):
            oracle = AutoModelForCausalLM.from_config(config)
        counted = sum(parameter.numel() for parameter in oracle.parameters())
        model = model_from_hf(config.to_dict(), "tiny")
        # transformers keeps DeepSeek-V3's balance bias as a buffer; we count it, as the published checkpoints do.
        buffers = sum(b.numel() for name, b in oracle.named_buffers() if name.endswith("e_score_correction_bias"))
        ours = sum(
            count * layer.mlp.num_experts
            for layer, count in model.layer_counts().items()
            if isinstance(layer.mlp, MoeMlp) and layer.mlp.balance_bias
        )
        assert ours == buffers, choices
        assert model.params == counted + buffers, choices


def test_layers_with_a_window_are_those_of_transformers() -> None:
    rng = random.Random(0)
    for family in ("qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss"):
        for _ in range(4):
            config = AutoConfig.for_model(family, **TINY[family](rng))
            values = config.to_dict()
            for given in (values, {key: value for key, value in values.items() if key != "layer_types"}):
                model = model_from_hf(given, "tiny")
                windows = [layer.attention.sliding_window for layer in model.layers]
                expected = [16 if kind == "sliding_attention" else None for kind in config.layer_types]
                assert windows == expected


NEEDED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "num_experts_per_tok", "num_local_experts", "num_experts"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts", "n_group", "topk_group"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts"),
    *("n_embd", "n_head", "n_layer", "n_positions", "model_type"),
}
"""Keys that are not optional for us. That of shared experts is: absent means none."""


@pytest.mark.parametrize("family", TINY)
def test_an_absent_key_means_what_transformers_makes_of_it(family: str) -> None:
    """The file that `transformers` writes, with all its keys, gives the same model as the needed keys alone."""
    choices = {key: value for key, value in TINY[family](random.Random(family)).items() if key in NEEDED}
    values = AutoConfig.for_model(family, **choices).to_dict()
    # Its default is one module for multi-token prediction; a file that doesn't speak of them has none.
    values["num_nextn_predict_layers"] = 0
    needed = {key: value for key, value in values.items() if key in NEEDED}
    assert model_from_hf(needed, "tiny") == model_from_hf(values, "tiny")


@pytest.mark.parametrize("family", [family for family in TINY if family != "gpt2"])
def test_rotary_embedding(family: str) -> None:
    config = AutoConfig.for_model(family, **TINY[family](random.Random(family)))
    rope = model_from_hf(config.to_dict(), "tiny").rope
    assert rope is not None
    parameters = config.rope_parameters
    if family == "gemma3_text":
        assert rope.local_theta == parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    assert rope.theta == parameters["rope_theta"]
    assert rope.fraction == parameters.get("partial_rotary_factor", 1.0)
    assert (rope.scaling.kind if rope.scaling else "default") == parameters["rope_type"]
