"""Mixtures of experts against `transformers`: logits of Mixtral, Qwen2-MoE and Qwen3-MoE, and the routing of
DeepSeek-V3, all in float64 with weights taken from there."""

from typing import Any

import pytest
import torch
from test_model import SIZES, renamed
from transformers import (
    DeepseekV3Config,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from trainwright.spec.model import ModelSpec, MoeMlp
from trainwright.train.model.experts import MixtureOfExperts
from trainwright.train.model.layers import mlp_of
from trainwright.train.model.transformer import Transformer

BOUND = 2e-6
"""transformers computes rotary angles and softmaxes in float32, whose rounding the logits show."""

EXPERTS = {
    ".mlp.gate.weight": ".mlp.router.weight",
    ".mlp.gate.e_score_correction_bias": ".mlp.balance_bias",
    ".mlp.experts.down_proj": ".mlp.experts.down",
    ".mlp.shared_expert_gate.": ".mlp.shared_gate.",
    **{
        f".mlp.{theirs}.{matrix}_proj.": f".mlp.shared.{matrix}."
        for theirs in ("shared_expert", "shared_experts")
        for matrix in ("gate", "up", "down")
    },
}
"""Names of ours by theirs; gate and up of the experts are one tensor there."""


def state_from(theirs: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for name, value in theirs.state_dict().items():
        name = prefix + name
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            place = name.removesuffix("gate_up_proj").replace("model.layers.", "layers.")
            state |= {f"{place}gate": gate.contiguous(), f"{place}up": up.contiguous()}
            continue
        for old, new in EXPERTS.items():
            name = name.replace(old, new)
        state[renamed(name)] = value
    return state


def spread(theirs: torch.nn.Module, deviation: float) -> torch.nn.Module:
    """With weights, norms and biases that all matter."""
    theirs = theirs.double().eval()
    for value in [*theirs.parameters(), *(each for each in theirs.buffers() if each.dtype == torch.float64)]:
        torch.nn.init.normal_(value, std=deviation)
    return theirs


MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (MixtralConfig(**SIZES, **MIXTRAL), MixtralForCausalLM),
        (Qwen3MoeConfig(**SIZES, **QWEN, head_dim=16, norm_topk_prob=True), Qwen3MoeForCausalLM),
        (Qwen3MoeConfig(**SIZES, **QWEN, head_dim=16, mlp_only_layers=[0]), Qwen3MoeForCausalLM),
        (Qwen2MoeConfig(**SIZES, **QWEN, shared_expert_intermediate_size=40), Qwen2MoeForCausalLM),
    ],
    ids=["mixtral", "qwen3-moe", "qwen3-moe with a dense layer, not normalized", "qwen2-moe"],
)
def test_logits(config: Any, theirs: Any) -> None:
    torch.manual_seed(0)
    oracle = theirs(config)
    oracle.set_experts_implementation("eager")  # its grouped matmul takes no float64
    rotary = {name: each.clone() for name, each in oracle.named_buffers()}
    oracle = spread(oracle, 0.3)
    for name, each in oracle.named_buffers():
        each.copy_(rotary[name])
    spec = ModelSpec.from_hf(config.to_dict(), "tiny")
    ours = Transformer(spec).double()
    ours.load_state_dict(state_from(oracle))
    tokens_BS = torch.randint(spec.vocab_size, (2, 64))
    with torch.no_grad():
        expected = oracle(tokens_BS).logits
        assert error(ours(tokens_BS), expected) < BOUND
        # A negative control: one more expert per token must show.
        for layer in ours.layers.values():
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.mlp = layer.mlp.mlp.changed(top_k=layer.mlp.mlp.top_k + 1)
        assert error(ours(tokens_BS), expected) > 1e-3


@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("normalize", [True, False])
def test_deepseek_routing(groups: int, top_groups: int, *, normalize: bool) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=16,
        n_group=groups,
        topk_group=top_groups,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_shared_experts=2,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    oracle = spread(DeepseekV3MoE(config), 0.3)
    mlp = MoeMlp(
        num_experts=16,
        top_k=3,
        d_ff=24,
        d_ff_shared=48,
        router="sigmoid",
        balance_bias=True,
        normalize_top_k=normalize,
        routed_scale=2.5,
        num_groups=groups,
        top_groups=top_groups,
    )
    ours = mlp_of(SPEC, mlp).double()
    prefix = "layers.0.mlp."
    state = {name.removeprefix(prefix): each for name, each in state_from(oracle, prefix).items()}
    ours.load_state_dict(state)
    x_BSD = torch.randn(2, 40, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = oracle(x_BSD)
        assert error(ours(x_BSD), expected) < BOUND
        ours.balance_bias.zero_()
        assert error(ours(x_BSD), expected) > 1e-3


SPEC = ModelSpec.from_hf(MixtralConfig(**SIZES, **MIXTRAL).to_dict(), "tiny")
"""Of which the width alone is used."""


def error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    return float((seen - expected).norm() / expected.norm())
