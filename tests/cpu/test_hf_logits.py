"""Logits against an independent oracle: `transformers`' model of the same config and weights, in float64.

For each family random tiny configs are drawn. All parameters are random, norm weights and biases too, so that each
of them matters. The modeling code of `transformers` computes norms, softmax and rotary angles in float32 whatever
the model's format; here float32 means float64 while it runs, so that only the mathematics is left to differ.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.spec.model import LatentAttention, ModelSpec
from trainwright.train.model import functions
from trainwright.train.model.transformer import Transformer

BOUND = 1e-10
LARGE = 8.0
"""Times the others' is the deviation of experts' weights: what gpt-oss' activation reads reaches its clamps."""
Weights = dict[str, torch.Tensor]

LLAMA = {
    "model.embed_tokens.": "embedding.",
    "model.layers.": "layers.",
    "model.norm.": "norm.",
    "lm_head.": "head.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".self_attn.q_proj.": ".attention.query.",
    ".self_attn.k_proj.": ".attention.key.",
    ".self_attn.v_proj.": ".attention.value.",
    ".self_attn.o_proj.": ".attention.out.",
    ".self_attn.q_norm.": ".attention.query_norm.",
    ".self_attn.k_norm.": ".attention.key_norm.",
    ".self_attn.sinks": ".attention.sinks.weight",
    ".mlp.gate_proj.": ".mlp.gate.",
    ".mlp.up_proj.": ".mlp.up.",
    ".mlp.down_proj.": ".mlp.down.",
}
OLMO_2 = {
    **LLAMA,
    ".post_attention_layernorm.": ".attention_out_norm.",
    ".post_feedforward_layernorm.": ".mlp_out_norm.",
}
GEMMA_2 = {**OLMO_2, ".pre_feedforward_layernorm.": ".mlp_norm."}
DEEPSEEK = {
    **LLAMA,
    ".self_attn.q_proj.": ".attention.query.",
    ".self_attn.q_a_proj.": ".attention.query_down.",
    ".self_attn.q_a_layernorm.": ".attention.query_norm.",
    ".self_attn.q_b_proj.": ".attention.query.",
    ".self_attn.kv_a_proj_with_mqa.": ".attention.latent.",
    ".self_attn.kv_a_layernorm.": ".attention.latent_norm.",
    ".self_attn.kv_b_proj.": ".attention.key_value.",
}
GPT_NEOX = {
    "gpt_neox.embed_in.": "embedding.",
    "gpt_neox.layers.": "layers.",
    "gpt_neox.final_layer_norm.": "norm.",
    "embed_out.": "head.",
    "lm_head.": "head.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".attention.dense.": ".attention.out.",
    ".mlp.dense_h_to_4h.": ".mlp.up.",
    ".mlp.dense_4h_to_h.": ".mlp.down.",
}
GPT_2 = {
    "transformer.wte.": "embedding.",
    "transformer.wpe.": "positions.",
    "transformer.h.": "layers.",
    "transformer.ln_f.": "norm.",
    "lm_head.": "head.",
    ".ln_1.": ".attention_norm.",
    ".ln_2.": ".mlp_norm.",
    ".attn.c_proj.": ".attention.out.",
    ".mlp.c_fc.": ".mlp.up.",
    ".mlp.c_proj.": ".mlp.down.",
}


def same(spec: ModelSpec, weights: Weights) -> Weights:
    return weights


def of_gpt_2(spec: ModelSpec, weights: Weights) -> Weights:
    """Its matrices are (in, out), and query, key and value are one."""
    ours = {}
    for name, value in weights.items():
        value = value.T if value.ndim == 2 and name.startswith("layers.") else value
        if ".attn.c_attn." in name:
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                ours[name.replace(".attn.c_attn.", f".attention.{part}.")] = piece
        else:
            ours[name] = value
    return ours


def of_gpt_neox(spec: ModelSpec, weights: Weights) -> Weights:
    """Query, key and value are one matrix, head by head."""
    ours, heads = {}, spec.layers[0].attention.num_heads
    for name, value in weights.items():
        if ".query_key_value." in name:
            for part, piece in zip(
                ("query", "key", "value"), value.unflatten(0, (heads, 3, -1)).unbind(1), strict=True
            ):
                ours[name.replace(".query_key_value.", f".{part}.")] = piece.flatten(0, 1)
        else:
            ours[name] = value
    return ours


def of_deepseek(spec: ModelSpec, weights: Weights) -> Weights:
    """Its rotary pairs are neighbours (rope_interleave); ours stand half a width apart. A permutation of rows."""
    attention = spec.layers[0].attention
    assert isinstance(attention, LatentAttention)
    rope = attention.d_rope
    apart = torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2)))
    ours = {}
    for name, value in weights.items():
        if name.endswith(".attention.query.weight"):
            nope, turned = value.unflatten(0, (attention.num_heads, -1)).split((attention.d_nope, rope), dim=1)
            value = torch.cat((nope, turned[:, apart]), dim=1).flatten(0, 1)
        elif name.endswith(".attention.latent.weight"):
            latent, turned = value.split((attention.kv_lora_rank, rope))
            value = torch.cat((latent, turned[apart]))
        ours[name] = value
    return ours


def of_gpt_oss(spec: ModelSpec, weights: Weights) -> Weights:
    """Its experts' matrices are (in, out), and gate and up take turns in one."""
    ours = {}
    for name, value in weights.items():
        place, _, matrix = name.rpartition(".experts.")
        if not place:
            ours[name] = value
            continue
        value = value if matrix.endswith("bias") else value.transpose(1, 2)
        matrix = matrix.replace("_proj_bias", "_bias").replace("_proj", "")
        if matrix.startswith("gate_up"):
            # (X, out) of a bias and (X, out, in) of a weight.
            for at, part in enumerate(("gate", "up")):
                ours[f"{place}.experts.{matrix.replace('gate_up', part)}"] = value[:, at::2]
        else:
            ours[f"{place}.experts.{matrix}"] = value
    return ours


def common(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([4, 8])
    return {
        "vocab_size": rng.randrange(50, 200),
        "hidden_size": heads * rng.choice([4, 8, 12]),
        "intermediate_size": rng.randrange(10, 90),
        "num_hidden_layers": rng.randrange(2, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "head_dim": rng.choice([4, 8, 12]),
        "max_position_embeddings": 128,
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llama(rng: random.Random) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    rope = rng.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, scaling])
    return {
        **common(rng),
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "rope_parameters": {"rope_theta": rng.choice([1e4, 5e5]), **rope},
    }


def yarn(rng: random.Random) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": rng.choice([1e4, 1.5e5]),
        "factor": rng.choice([4.0, 32.0]),
        "original_max_position_embeddings": rng.choice([16, 64]),
        "beta_fast": rng.choice([32.0, 4.0]),
        "beta_slow": 1.0,
    }


def yarn_llama(rng: random.Random) -> dict[str, Any]:
    values = {**common(rng), "head_dim": 16}
    return {**values, "rope_parameters": {**yarn(rng), "truncate": rng.random() < 0.5}}


def mistral(rng: random.Random) -> dict[str, Any]:
    return {**common(rng), "sliding_window": rng.choice([None, 7])}


def qwen3(rng: random.Random) -> dict[str, Any]:
    return {**common(rng), "attention_bias": rng.random() < 0.5}


def gemma2(rng: random.Random) -> dict[str, Any]:
    return {
        **common(rng),
        "attention_bias": rng.random() < 0.5,
        "sliding_window": 7,
        "query_pre_attn_scalar": rng.choice([8, 144, 256]),
        "attn_logit_softcapping": rng.choice([None, 2.0]),
        "final_logit_softcapping": rng.choice([None, 1.5]),
    }


def gemma3(rng: random.Random) -> dict[str, Any]:
    values = {**common(rng), "num_hidden_layers": 7, "sliding_window": 7}
    return {**values, "query_pre_attn_scalar": rng.choice([8, 144, 256])}


def olmo2(rng: random.Random) -> dict[str, Any]:
    values = {**common(rng), "attention_bias": rng.random() < 0.5}
    del values["head_dim"]
    return values


def gpt_oss(rng: random.Random) -> dict[str, Any]:
    values = {**common(rng), "head_dim": 16, "intermediate_size": 2 * rng.randrange(5, 20)}
    experts = rng.randrange(4, 9)
    return {
        **values,
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randrange(2, experts),
        "sliding_window": 7,
        "attention_bias": rng.random() < 0.7,
        # None: the one that gpt-oss has, by 32 and not truncated.
        "rope_parameters": rng.choice([None, {**yarn(rng), "truncate": rng.random() < 0.5}]),
    }


def gpt_neox(rng: random.Random) -> dict[str, Any]:
    values = common(rng)
    del values["head_dim"], values["num_key_value_heads"]
    return {
        **values,
        "use_parallel_residual": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "rotary_pct": rng.choice([0.5, 1.0]),
    }


def gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([2, 4])
    return {
        "vocab_size": rng.randrange(50, 200),
        "n_embd": heads * rng.choice([4, 8]),
        "n_head": heads,
        "n_layer": rng.randrange(2, 5),
        "n_positions": 64,
        "n_inner": rng.choice([None, 40]),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def deepseek_v3(rng: random.Random) -> dict[str, Any]:
    values = common(rng)
    del values["head_dim"]
    mscale = rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}])
    rope = rng.choice([{"rope_type": "default", "rope_theta": 1e4}, {**yarn(rng), **mscale}])
    return {
        **values,
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": rng.choice([None, 12]),
        "kv_lora_rank": rng.randrange(4, 20),
        "qk_nope_head_dim": rng.choice([4, 8]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([4, 8, 12]),
        "first_k_dense_replace": values["num_hidden_layers"],
        "rope_parameters": rope,
    }


FAMILIES: dict[str, tuple[str, Callable[[random.Random], dict[str, Any]], dict[str, str], Any]] = {
    "llama": ("llama", llama, LLAMA, same),
    "mistral": ("mistral", mistral, LLAMA, same),
    "qwen3": ("qwen3", qwen3, LLAMA, same),
    "gemma2": ("gemma2", gemma2, GEMMA_2, same),
    "gemma3": ("gemma3_text", gemma3, GEMMA_2, same),
    "olmo2": ("olmo2", olmo2, OLMO_2, same),
    "llama with yarn": ("llama", yarn_llama, LLAMA, same),
    "deepseek_v3": ("deepseek_v3", deepseek_v3, DEEPSEEK, of_deepseek),
    "gpt_oss": ("gpt_oss", gpt_oss, LLAMA, of_gpt_oss),
    "gpt_neox": ("gpt_neox", gpt_neox, GPT_NEOX, of_gpt_neox),
    "gpt2": ("gpt2", gpt2, GPT_2, of_gpt_2),
}


@contextmanager
def float32_is_float64() -> Iterator[None]:
    """For code that names float32: it gets float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def renamed(names: dict[str, str], weights: Weights) -> Weights:
    ours = {}
    for name, value in weights.items():
        for theirs, our in names.items():
            name = name.replace(theirs, our)
        ours[name] = value
    return ours


def logits_of_both(family: str, seed: int) -> tuple[torch.Tensor, Transformer, torch.Tensor]:
    """Theirs; our model with their weights; the tokens."""
    model_type, draw, names, arranged = FAMILIES[family]
    rng = random.Random(f"{family}/{seed}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **draw(rng), attn_implementation="eager")
    # transformers leaves the modules of multi-token prediction out.
    spec = ModelSpec.from_hf(config.to_dict(), "tiny").changed(mtp_depth=0)
    tokens_BS = torch.randint(spec.vocab_size, (2, 40))
    with float32_is_float64():
        theirs = AutoModelForCausalLM.from_config(config).eval()
        theirs.set_experts_implementation("eager")  # its grouped matmul takes no float64
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if "experts." in name:
                    parameter.mul_(LARGE)
            expected = theirs(tokens_BS).logits
    ours = Transformer(spec).double()
    weights = dict(theirs.named_parameters(remove_duplicate=False))
    ours.load_state_dict(arranged(spec, renamed(names, weights)))
    ours.tie()
    return expected, ours, tokens_BS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("bound", "value"), [("CLAMP", 1e9), ("SLOPE", 1.0)])
def test_the_activation_of_gpt_oss_is_clamped(
    bound: str, value: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another clamp or slope must show."""
    expected, ours, tokens_BS = logits_of_both("gpt_oss", seed)
    monkeypatch.setattr(functions, bound, value)
    with torch.no_grad():
        assert float((ours(tokens_BS) - expected).norm() / expected.norm()) > 1e-2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, seed: int) -> None:
    expected, ours, tokens_BS = logits_of_both(family, seed)
    assert expected.dtype == torch.float64
    with torch.no_grad():
        seen = ours(tokens_BS)
    assert float((seen - expected).norm() / expected.norm()) < BOUND
    # A negative control: each parameter matters, so none of them is passed over by both. A bias of keys that no
    # rotary embedding turns adds the same to all scores of a query, and is the one exception.
    for name, parameter in ours.named_parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter.add_(0.2 * torch.randn_like(parameter))
            other = ours(tokens_BS)
            parameter.copy_(before)
        error = float((other - expected).norm() / expected.norm())
        assert error > 1e-5 or (name.endswith("key.bias") and ours.rotary is None), name
