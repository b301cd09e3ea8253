"""Parity cases in which layers are compiled: alone, beside each form of parallelism, and with what stands in or
around their graphs. Compiling takes seconds a case, so there are few; `parity_pairs` has the pairs that they
leave."""

from typing import Any

from parity_models import GEMMA_2, GPT_OSS, MLA, MLA_V2_LITE, UP, YARN, on
from parity_moe import DEEPSEEK, QWEN, case

COMPILED = {"compile": True}
INTERLEAVED = {"schedule": "interleaved_1f1b"}
RECOMPUTED = {"recompute": "selective", "recompute_ops": ["norm", "activation", "attention"]}
FULL = {"recompute": "full"}


def compiled(fields: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    fields = on(fields or {}, **more)
    return {**fields, "recipe": {**fields.get("recipe", {}), **COMPILED}}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "alone": compiled(recipe={"micro_batch": 2}),
        "full recompute": compiled(recipe=FULL),
        "full recompute of one layer": compiled(recipe={**FULL, "recompute_layers": 1}),
        "recompute of operations": compiled(recipe=RECOMPUTED),
        "recompute of mlp": compiled(recipe={"recompute": "selective", "recompute_ops": ["mlp"]}),
        "gemma 2": compiled(GEMMA_2),
        "gpt-oss": compiled(GPT_OSS),
        "mla": compiled(MLA),
        "mla, recompute of the way up": compiled(MLA_V2_LITE, recipe=UP),
        "yarn": compiled(model={"rope": YARN}),
        "experts": compiled(case(DEEPSEEK)),
        "experts, recompute of operations": compiled(case(QWEN, RECOMPUTED)),
    },
    2: {
        **{f"dp zero {zero}": compiled(dp=2, recipe={"zero": zero}) for zero in (0, 3)},
        "dp zero 3 full recompute": compiled(dp=2, recipe={"zero": 3, **FULL}),
        "tp": compiled(tp=2),
        "tp without sequence parallelism": compiled(tp=2, recipe={"sequence_parallel": False}),
        "tp full recompute": compiled(tp=2, recipe=FULL),
        "tp mla, recompute of operations": compiled(MLA, tp=2, recipe=RECOMPUTED),
        "tp layernorm, biases, norms over all heads": compiled(
            tp=2,
            model={"norm": "layernorm"},
            attention={"qkv_bias": True, "out_bias": True, "qk_norm": "all_heads"},
        ),
        **{
            f"cp {method}": compiled(cp=2, recipe={"cp_method": method})
            for method in ("all_gather", "ring", "all_to_all")
        },
        "pp 1f1b": compiled(pp=2),
        "pp interleaved": compiled(pp=2, vpp=2, recipe=INTERLEAVED),
        "moe ep": compiled(case(DEEPSEEK, ep=2, dp=2)),
        "moe ep of tp": compiled(case(DEEPSEEK, ep=2, tp=2)),
    },
    4: {
        "tp x dp zero 3": compiled(tp=2, dp=2, recipe={"zero": 3}),
        "tp x pp, full recompute": compiled(tp=2, pp=2, recipe=FULL),
    },
}
