"""Parameter counts of the catalogue's models against published ones: to the integer where the source gives it,
within the digits that it prints where it rounds. The independent oracle is in tests/cpu/test_hf_oracle.py."""

import re

import pytest

from trainwright.cli import catalogue
from trainwright.spec.model import GroupedQueryAttention, LatentAttention, MoeMlp, mean_keys

EXACT = {
    # Hugging Face model cards: the parameter count of the safetensors index.
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    # The checkpoint without multi-token prediction and fp8 scales, with 58 x 256 balance biases.
    "deepseek-v3": 671_026_419_200,
    # Parameter count that ollama and llama.cpp read from the released weights.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt-neox-20b": 20_554_567_680,
}

ROUNDED = {
    # billions, half of the last printed digit; papers as named in each file's source
    "megatron-530b": (529.6, 0.05),
    "megatron-1t": (1008.0, 0.05),
    "gpt3-175b": (174.6, 0.05),  # 175.0 in arXiv:2005.14165 includes none of Megatron-LM's choices
    "deepseek-v3": (671, 0.5),
    "gpt-oss-20b": (20.91, 0.005),
    "gpt-oss-120b": (116.83, 0.005),
}

ACTIVE = {
    # billions; gpt-oss's card leaves the embedding table out, the others' papers count all that a token meets
    "mixtral-8x7b": (12.9, 0.05),  # arXiv:2401.04088: 13B
    "mixtral-8x22b": (39.15, 0.05),  # announced as 39B
    "qwen3-30b-a3b": (3.35, 0.05),  # arXiv:2505.09388: 3.3B
    "qwen3-235b-a22b": (22.19, 0.05),  # arXiv:2505.09388: 22B
    "deepseek-v2": (21.4, 0.5),  # arXiv:2405.04434: 21B
    "deepseek-v3": (37.55, 0.005),  # arXiv:2412.19437: 37B
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_to_the_integer(name: str) -> None:
    assert catalogue.load_model(name).params == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_as_papers_round_them(name: str) -> None:
    billions, digits = ROUNDED[name]
    assert abs(catalogue.load_model(name).params / 1e9 - billions) <= digits


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name: str) -> None:
    billions, digits = ACTIVE[name]
    assert abs(catalogue.load_model(name).active_params / 1e9 - billions) <= digits


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_active_parameters_of_gpt_oss_without_the_embedding_table(name: str, billions: float) -> None:
    model = catalogue.load_model(name)
    assert round((model.active_params - model.embedding_params) / 1e9, 2) == billions


def test_deepseek_v3_multi_token_prediction() -> None:
    """deepseek-ai/DeepSeek-V3 README_WEIGHTS.md: the module's own 11.5B, beside an embedding and a head of 0.9B
    each that it shares. The checkpoint stores these again, which makes 684.5B without fp8 scales (685B)."""
    model = catalogue.load_model("deepseek-v3")
    shared = model.embedding_params + model.head_params
    assert model.mtp_depth == 1
    assert abs(model.mtp_params / 1e9 - 11.5) < 0.15
    assert round(model.embedding_params / 1e9, 1) == round(model.head_params / 1e9, 1) == 0.9
    assert round((model.params + model.mtp_params + shared) / 1e9, 1) == 684.5


def test_counts_that_the_files_quote_are_the_counts() -> None:
    """Each file's `source` quotes the published count: N,NNN,NNN parameters."""
    quoted = 0
    for name in catalogue.model_names():
        model = catalogue.load_model(name)
        for text in re.findall(r"([\d,]+) parameters", model.source):
            assert int(text.replace(",", "")) == model.params, name
            quoted += 1
    assert quoted >= 25


@pytest.mark.parametrize("name", catalogue.model_names())
def test_parts_sum_to_the_whole(name: str) -> None:
    model = catalogue.load_model(name)
    assert sum(model.params_by_part.values()) == model.params
    assert model.active_params <= model.params
    assert (model.active_params == model.params) == (not model.is_moe)
    assert sum(model.layer_counts().values()) == model.num_layers == len(model.layers)


@pytest.mark.parametrize("name", catalogue.model_names())
def test_flops_per_token_by_hand(name: str) -> None:
    """The three conventions, written down again: 6 per weight that multiplies, 12 per head width and key."""
    model, seq_len = catalogue.load_model(name), 4096
    weights, scores, causal_scores = model.vocab_size * model.d_model, 0.0, 0.0
    for layer in model.layers:
        attention, mlp, d_model = layer.attention, layer.mlp, model.d_model
        if isinstance(attention, GroupedQueryAttention):
            width = attention.d_head * attention.num_heads
            weights += 2 * d_model * (width + attention.d_head * attention.num_kv_heads)
            widths = 2 * width
        else:
            assert isinstance(attention, LatentAttention)
            d_query = attention.d_nope + attention.d_rope
            rank, heads = attention.q_lora_rank, attention.num_heads
            weights += d_model * heads * d_query if rank is None else rank * (d_model + heads * d_query)
            weights += d_model * (attention.kv_lora_rank + attention.d_rope)
            weights += attention.kv_lora_rank * heads * (attention.d_nope + attention.d_value)
            weights += heads * attention.d_value * d_model
            widths = heads * (d_query + attention.d_value)
        if isinstance(mlp, MoeMlp):
            weights += d_model * (3 * (mlp.top_k * mlp.d_ff + mlp.d_ff_shared) + mlp.num_experts)
        else:
            weights += (2 + mlp.gated) * d_model * mlp.d_ff
        keys = min(attention.sliding_window or seq_len, seq_len)
        scores += 6 * widths * keys
        met = sum(min(position + 1, keys) for position in range(seq_len)) / seq_len
        causal_scores += 6 * widths * met
    assert model.flops_per_token(seq_len, "full") == 6 * weights + scores
    # mean_keys leaves out the half key of a discrete mask: 1 / seq_len of the average.
    assert model.flops_per_token(seq_len, "causal") == pytest.approx(6 * weights + causal_scores, rel=1e-3)
    assert model.flops_per_token(seq_len, "6n") == 6 * model.active_params


def test_a_window_at_least_as_long_as_the_sequence_changes_nothing() -> None:
    assert mean_keys(4096, 4096, causal=True) == mean_keys(4096, None, causal=True) == 2048
    assert mean_keys(4096, 10**6, causal=False) == mean_keys(4096, None, causal=False) == 4096


def test_llama_405b_at_8k_is_the_flops_of_its_paper() -> None:
    """arXiv:2407.21783 s3.2: 3.8e25 FLOPs over 15.6T tokens."""
    model = catalogue.load_model("llama-3.1-405b")
    assert 15.6e12 * model.flops_per_token(8192, "6n") == pytest.approx(3.8e25, rel=0.01)
