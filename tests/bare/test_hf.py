"""config.json files as ModelSpec: what each family reads from which key, defaults of absent keys, groups of
layers, and one clear line for everything that is missing, of the wrong kind, or can't be described."""

import copy
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.hf import model_from_hf
from trainwright.spec.hf.families import FAMILIES
from trainwright.spec.model import GroupedQueryAttention, LatentAttention, ModelSpec, MoeMlp, Rope, RopeScaling

SHARED = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {
    **SHARED,
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHARED,
    "mistral": SHARED,
    "mixtral": {**SHARED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": SHARED,
    "qwen2_moe": {**SHARED, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": SHARED,
    "qwen3_moe": {**SHARED, **EXPERTS},
    "gemma": SHARED,
    "gemma2": SHARED,
    "gemma3": {"text_config": SHARED},
    "gemma3_text": SHARED,
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "gpt_oss": {**SHARED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 64, "n_head": 8, "n_layer": 6, "n_positions": 128, "vocab_size": 100},
    "olmo2": SHARED,
    "gpt_neox": SHARED,
}


def config(family: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[family], "model_type": family, **changes}


def read(family: str, **changes: Any) -> ModelSpec:
    return model_from_hf(config(family, **changes), "tiny")


def attention(model: ModelSpec, index: int = 0) -> GroupedQueryAttention:
    found = model.layers[index].attention
    assert isinstance(found, GroupedQueryAttention)
    return found


def moe(model: ModelSpec, index: int = -1) -> MoeMlp:
    found = model.layers[index].mlp
    assert isinstance(found, MoeMlp)
    return found


def windows(model: ModelSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in model.layers]


def kinds(model: ModelSpec) -> str:
    return "".join("m" if isinstance(layer.mlp, MoeMlp) else "d" for layer in model.layers)


def refusal(values: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        model_from_hf(values, "tiny")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_there_is_an_example_of_each_family() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
def test_each_family_gives_a_model(family: str) -> None:
    model = read(family)
    assert model == ModelSpec.from_hf(config(family), "tiny")
    assert model.name == "tiny"
    assert model.num_layers == 6
    assert model.d_model == 64
    assert family in model.source
    assert ModelSpec.parse(model.plain()) == model


@pytest.mark.parametrize("family", CONFIGS)
def test_tied_embeddings_where_the_file_does_not_say(family: str) -> None:
    assert read(family).tied_embeddings == (family in ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"))
    assert read(family, tie_word_embeddings=True).tied_embeddings
    assert not read(family, tie_word_embeddings=False).tied_embeddings


def test_a_family_is_known_by_its_architecture_too() -> None:
    values = {**SHARED, "architectures": ["LlamaForCausalLM"]}
    assert model_from_hf(values, "tiny").params == read("llama").params
    custom = {**DEEPSEEK, "model_type": "my_model", "architectures": ["DeepseekV3ForCausalLM"]}
    assert model_from_hf(custom, "tiny").params == read("deepseek_v3").params


def test_llama_heads_biases_and_rope() -> None:
    model = read("llama", attention_bias=True, mlp_bias=True, head_dim=16, rope_theta=5e5)
    assert attention(model).d_head == 16
    assert attention(model).qkv_bias
    assert attention(model).out_bias
    assert model.layers[0].mlp.bias
    assert model.rope == Rope(theta=5e5)
    old = {key: value for key, value in config("llama").items() if key != "num_key_value_heads"}
    assert attention(model_from_hf(old, "tiny")).num_kv_heads == 8
    assert attention(read("mistral", num_key_value_heads=None)).num_kv_heads == 8


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_rope_scaling_in_its_three_spellings() -> None:
    expected = Rope(theta=5e5, scaling=RopeScaling(kind="llama3", factor=8.0, original_max_positions=64))
    assert read("llama", rope_theta=500000, rope_scaling={"rope_type": "llama3", **LLAMA3}).rope == expected
    assert read("llama", rope_theta=500000, rope_scaling={"type": "llama3", **LLAMA3}).rope == expected
    both = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    assert read("llama", rope_parameters=both).rope == expected
    assert read("llama", rope_scaling=None).rope == Rope(theta=1e4)


def test_yarn() -> None:
    values = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.7, "beta_fast": 16}
    rope = read("deepseek_v3", rope_scaling=values).rope
    assert rope is not None
    assert rope.scaling == RopeScaling(
        kind="yarn", factor=40.0, original_max_positions=64, mscale=0.7, beta_fast=16.0
    )


def test_sliding_windows() -> None:
    assert windows(read("mistral")) == [4096] * 6
    assert windows(read("mistral", sliding_window=None)) == [None] * 6
    assert windows(read("mixtral")) == [None] * 6
    assert windows(read("qwen2", sliding_window=32)) == [None] * 6
    used = read("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=4)
    assert windows(used) == [None] * 4 + [32, 32]
    assert windows(read("gemma2", sliding_window=32)) == [32, None] * 3
    assert windows(read("gemma3_text", sliding_window=32)) == [32] * 5 + [None]
    assert windows(read("gemma3_text", sliding_window=32, sliding_window_pattern=2)) == [32, None] * 3
    assert windows(read("gpt_oss")) == [128, None] * 3
    full = ["full_attention", "sliding_attention"] * 3
    assert windows(read("gpt_oss", layer_types=full)) == [None, 128] * 3


def test_patterns_become_groups() -> None:
    def groups(model: ModelSpec) -> list[tuple[int, int]]:
        return [(group.repeat, len(group.pattern)) for group in model.layer_groups]

    assert groups(read("llama")) == [(6, 1)]
    assert groups(read("gpt_oss")) == [(3, 2)]
    assert groups(read("gemma3_text", num_hidden_layers=26)) == [(4, 6), (2, 1)]
    assert groups(read("deepseek_v3", num_hidden_layers=61)) == [(3, 1), (58, 1)]
    assert groups(read("qwen3_moe", decoder_sparse_step=2)) == [(3, 2)]
    one_off = read("qwen3_moe", mlp_only_layers=[2])
    assert kinds(one_off) == "mmdmmm"
    assert one_off.num_layers == 6


def test_qwen_biases_and_norms() -> None:
    assert attention(read("qwen2")).qkv_bias
    assert not attention(read("qwen2")).out_bias
    assert attention(read("qwen3")).qk_norm == "per_head"
    assert attention(read("qwen3")).d_head == 128
    assert attention(read("qwen3_moe")).d_head == 8
    shared = moe(read("qwen2_moe"))
    assert shared.shared_gate
    assert shared.d_ff_shared == 32
    assert not shared.normalize_top_k
    assert moe(read("qwen3_moe", norm_topk_prob=True)).normalize_top_k


def test_gemma() -> None:
    first, second, third = read("gemma", hidden_act="gelu"), read("gemma2"), read("gemma3_text")
    for model in (first, second, third):
        assert model.zero_centered_norm
        assert model.scaled_embedding
        assert model.layers[0].mlp.activation == "gelu_tanh"
        assert attention(model).d_head == 256
    assert first.norm_placement == "pre"
    assert second.norm_placement == third.norm_placement == "sandwich"
    assert attention(second).logit_softcap == 50
    assert second.logit_softcap == 30
    assert read("gemma2", final_logit_softcapping=None).logit_softcap is None
    assert attention(read("gemma2", query_pre_attn_scalar=144)).query_scale == pytest.approx(1 / 12)
    assert third.logit_softcap is None
    assert attention(third).qk_norm == "per_head"
    assert third.rope == Rope(theta=1e6, local_theta=1e4)


def test_gemma3_text_config_leaves_out_what_is_usual() -> None:
    """google/gemma-3-4b-pt: its text_config has seven keys; 3.88B parameters in its language model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    model = model_from_hf(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}, "4b"
    )
    assert model.params == 3_880_263_168
    assert model.rope is not None
    assert model.rope.scaling is not None
    assert model.rope.scaling.factor == 8


def test_deepseek() -> None:
    second = read("deepseek_v2", first_k_dense_replace=1)
    assert kinds(second) == "dmmmmm"
    assert moe(second).router == "softmax"
    assert (moe(second).num_groups, moe(second).top_groups) == (4, 2)
    assert not moe(second).balance_bias
    assert not moe(second).normalize_top_k
    assert moe(read("deepseek_v2", topk_method=None)).num_groups == 1  # greedy
    third = read("deepseek_v3", num_nextn_predict_layers=1, routed_scaling_factor=2.5)
    assert kinds(third) == "dddmmm"
    assert moe(third).router == "sigmoid"
    assert moe(third).balance_bias
    assert moe(third).routed_scale == 2.5
    assert third.mtp_depth == 1
    assert kinds(read("deepseek_v3", first_k_dense_replace=1, moe_layer_freq=2)) == "ddmdmd"
    latent = read("deepseek_v2", q_lora_rank=None).layers[0].attention
    assert isinstance(latent, LatentAttention)
    assert latent.q_lora_rank is None


def test_gpt_oss() -> None:
    model = read("gpt_oss")
    assert attention(model).sinks
    assert attention(model).out_bias
    assert attention(model).d_head == 64
    assert moe(model).bias
    assert moe(model).router_bias
    assert moe(model).activation == "swiglu_clamped"


def test_gpt2_and_gpt_neox() -> None:
    model = read("gpt2")
    assert model.learned_positions == model.max_positions == 128
    assert model.rope is None
    assert model.layers[0].mlp.d_ff == 256
    assert read("gpt2", n_inner=32).layers[0].mlp.d_ff == 32
    assert model.norm == "layernorm"
    neox = read("gpt_neox", rotary_pct=0.5, rotary_emb_base=20000)
    assert neox.parallel_residual
    assert neox.rope == Rope(theta=2e4, fraction=0.5)
    assert attention(neox).num_kv_heads == 8
    assert not read("gpt_neox", use_parallel_residual=False).parallel_residual


# One line for what is wrong


def test_unknown_families() -> None:
    assert refusal(config("llama", model_type="llama5")).startswith(
        "model_type='llama5': no such family; did you mean llama"
    )
    assert refusal(config("llama", model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"])).startswith(
        "model_type='qwen3_next': no such family; did you mean qwen3"
    )
    assert refusal({**SHARED, "architectures": ["LLaMAForCausalLM"]}).startswith(
        "architectures=['LLaMAForCausalLM']: no such family; did you mean LlamaForCausalLM"
    )
    assert refusal(SHARED) == "model_type: missing; is it a model's config.json?"
    assert refusal({"model_type": 7}) == "model_type=7: must be a text"
    assert refusal({"architectures": "Llama"}) == "architectures='Llama': must be a list of texts"
    assert refusal([1]).startswith("config=[1]: must be the object")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_size": "64"}, "hidden_size='64': must be a whole number of at least 1"),
        ("llama", {"hidden_size": 64.0}, "hidden_size=64.0: must be a whole number of at least 1"),
        ("llama", {"hidden_size": True}, "hidden_size=True: must be a whole number of at least 1"),
        ("llama", {"hidden_size": 0}, "hidden_size=0: must be a whole number of at least 1"),
        (
            "llama",
            {"hidden_size": None},
            "hidden_size: missing; a config.json of this family gives a whole number",
        ),
        ("llama", {"vocab_size": 10**20}, f"vocab_size={10**20}: is too large to be meant"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 10000"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=8"),
        (
            "llama",
            {"hidden_size": 63},
            "hidden_size=63: must be a multiple of num_attention_heads=8, or head_dim be given",
        ),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps='small': must be a number above zero"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a number above zero"),
        ("llama", {"mlp_bias": 1}, "mlp_bias=1: must be true or false"),
        (
            "llama",
            {"hidden_act": "mish"},
            "hidden_act='mish': may be silu, swish, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu",
        ),
        ("llama", {"rope_scaling": 8}, "rope_scaling=8: must be a table {...}"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type='dynamic': may be default, linear, llama3, yarn",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor: missing; a config.json of this family gives a number",
        ),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures=['LlamaForSequenceClassification']: has no output head to train; "
            "the name of one ends in ForCausalLM",
        ),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "full_attention"]},
            "layer_types=['full_attention', 'full_attention']: must have num_hidden_layers=6 entries, not 2",
        ),
        (
            "gpt_oss",
            {"layer_types": ["linear_attention"] * 6},
            "layer_types='linear_attention': this attention can't be described; "
            "may be full_attention, sliding_attention",
        ),
        ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be at most the 8 experts"),
        (
            "gpt_oss",
            {"swiglu_limit": 5.0},
            "swiglu_limit=5.0: another clamped SwiGLU than gpt-oss's can't be described; may be 7.0",
        ),
        (
            "deepseek_v3",
            {"attention_bias": True},
            "attention_bias=True: biases of latent attention can't be described; may be false",
        ),
        ("deepseek_v3", {"n_group": 3}, "n_group=3: must divide the 8 experts"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group=5: must be at most n_group=4"),
        ("deepseek_v3", {"scoring_func": "relu"}, "scoring_func='relu': may be softmax, sigmoid"),
        ("qwen3_moe", {"mlp_only_layers": "none"}, "mlp_only_layers='none': must be a list of layer numbers"),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True: attention without a causal mask can't be described",
        ),
        (
            "gemma3",
            {"text_config": None},
            "text_config: missing; a config.json of gemma3 has its language model there",
        ),
        (
            "gemma3",
            {"text_config": {**SHARED, "head_dim": -1}},
            "text_config.head_dim=-1: must be a whole number of at least 1",
        ),
        ("gpt2", {"n_head": 7}, "n_head=7: must divide the model's width 64"),
        (
            "gpt2",
            {"add_cross_attention": True},
            "add_cross_attention=True: attention to an encoder can't be described; may be false",
        ),
        ("gpt_neox", {"rotary_pct": 2.0}, "rope.fraction=2.0: input should be less than or equal to 1"),
    ],
)
def test_one_line_for_what_is_wrong(family: str, changes: dict[str, Any], message: str) -> None:
    assert refusal(config(family, **changes)) == message


@pytest.mark.parametrize("family", CONFIGS)
def test_a_missing_key_is_named(family: str) -> None:
    """Each key of the examples is dropped in turn: there is a default, or one line that names the key."""
    values = config(family)
    for key in set(values) - {"model_type"}:
        try:
            model_from_hf({name: value for name, value in values.items() if name != key}, "tiny")
        except InvalidSpec as error:
            assert str(error).startswith(f"{key}: missing; ")  # noqa: PT017


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-1, 9), st.text(max_size=3), st.none()), max_size=7),
    st.dictionaries(st.sampled_from(["type", "rope_type", "factor", "full_attention"]), st.integers(), max_size=3),
)
OPTIONAL = """
    layer_types rope_scaling rope_parameters sliding_window head_dim mlp_only_layers hidden_act tie_word_embeddings
    rope_theta architectures first_k_dense_replace moe_layer_freq topk_method use_sliding_window max_window_layers
    sliding_window_pattern n_inner rms_norm_eps rotary_pct query_pre_attn_scalar num_nextn_predict_layers
    decoder_sparse_step scoring_func n_ctx
"""
KEYS = sorted({key for values in CONFIGS.values() for key in values} | set(OPTIONAL.split()))


@seed(20261130)
@settings(max_examples=600, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=3))
def test_any_junk_is_read_or_answered_in_one_line(family: str, junk: dict[str, Any]) -> None:
    values = copy.deepcopy(config(family))
    values.update(junk)
    if "text_config" in values and "text_config" not in junk:
        values["text_config"].update(junk)
    try:
        model = model_from_hf(values, "tiny")
    except InvalidSpec as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert model.params > 0
