"""The plain model against `transformers`, and its counts against the spec's."""

import pytest
import torch
from example import example_run, plain_model
from parity_models import FAMILIES
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.model import ModelSpec
from trainwright.train.door import require_trainable
from trainwright.train.model.initialize import initial_value
from trainwright.train.model.transformer import Transformer

RENAMED = {
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
    ".mlp.gate_proj.": ".mlp.gate.",
    ".mlp.up_proj.": ".mlp.up.",
    ".mlp.down_proj.": ".mlp.down.",
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def ours_of(theirs: torch.nn.Module, spec: ModelSpec) -> Transformer:
    model = Transformer(spec).to(torch.float64)
    state = {renamed(name): value for name, value in theirs.state_dict().items()}
    model.load_state_dict(state)
    model.tie()
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
    ],
    ids=["gqa", "tied", "mqa", "biases", "llama3 rotary"],
)
def test_llama_logits(changes: dict) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **changes})
    compare(LlamaForCausalLM(config), ModelSpec.from_hf(config.to_dict(), "tiny"))


def test_qwen3_logits() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=16)
    compare(Qwen3ForCausalLM(config), ModelSpec.from_hf(config.to_dict(), "tiny"))


def compare(theirs: torch.nn.Module, spec: ModelSpec) -> None:
    theirs = theirs.double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # Norm weights and biases too, so that they matter.
    ours = ours_of(theirs, spec)
    tokens_BS = torch.randint(spec.vocab_size, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens_BS).logits
        seen = ours(tokens_BS)
    # transformers computes the rotary angles in float32, whose rounding the logits show.
    assert float((seen - expected).norm() / expected.norm()) < 2e-6
    # A negative control: another rotary base must show.
    assert spec.rope is not None
    other = Transformer(spec.changed(rope=spec.rope.changed(theta=spec.rope.theta * 2))).double()
    other.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert float((other(tokens_BS) - expected).norm() / expected.norm()) > 1e-3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": {"qk_norm": "per_head", "qkv_bias": True, "out_bias": True}, "mlp": {"bias": True}},
        {"mlp": {"gated": False, "activation": "gelu"}, "model": {"norm": "layernorm", "tied_embeddings": True}},
        {"model": {"norm": "layernorm_no_bias", "head_bias": True}},
        *FAMILIES.values(),
        {"model": {"norm": "layernorm"}, "attention": {"qk_norm": "all_heads"}},
    ],
)
def test_parameters_are_those_of_the_spec(fields: dict) -> None:
    run = example_run(**fields)
    count = sum(each.numel() for each in Transformer(run.model).parameters())
    assert count == run.model.params + run.model.mtp_params


def test_pieces_are_the_whole_model() -> None:
    run = example_run()
    whole = plain_model(run, torch.float64)
    tokens_BS = torch.randint(run.model.vocab_size, (2, 16))
    pieces = [Transformer(run.model, layers).double() for layers in (range(1), range(1, 3), range(3, 4))]
    names = [name for piece in pieces for name, _ in piece.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    x = tokens_BS
    for piece in pieces:
        piece.load_state_dict({name: whole.state_dict()[name] for name in piece.state_dict()})
        x = piece(x)
    assert torch.equal(x, whole(tokens_BS))


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    spec, shape = example_run().model, torch.Size((8, 4))

    def value(seed: int, name: str) -> torch.Tensor:
        return initial_value(spec, seed, name, shape, torch.float64)

    assert torch.equal(value(0, "layers.0.mlp.up.weight"), value(0, "layers.0.mlp.up.weight"))
    assert not torch.equal(value(0, "layers.0.mlp.up.weight"), value(0, "layers.1.mlp.up.weight"))
    assert not torch.equal(value(0, "layers.0.mlp.up.weight"), value(1, "layers.0.mlp.up.weight"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"recipe": {"attention_kernel": "flash_2"}},
            "recipe.attention_kernel='flash_2': is planned but not trained yet; use flash, unfused",
        ),
        (
            {"dp": 2, "recipe": {"zero": 1, "overlap": {"dp": False}}},
            "recipe.overlap.dp=False: needs recipe.zero=0: sharded gathers always run beside compute",
        ),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(fields: dict, message: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        require_trainable(example_run(**fields).check())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
