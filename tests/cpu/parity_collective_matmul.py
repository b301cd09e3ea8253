"""Parity cases of `recipe.overlap.tp`: what tp gathers and scatters goes round in parts beside the matmuls."""

from typing import Any

from parity_models import LATENT
from parity_moe import BIASES, DEEPSEEK, DROPPING, LOSS, QWEN, case
from parity_together import DEEPSEEK_V3, RECOMPUTED, SPLIT, with_recipe

BESIDE: dict[str, Any] = {"overlap": {"tp": True}}
BIASED = {"attention": {"qkv_bias": True, "out_bias": True}, "mlp": {"bias": True}, "model": {"head_bias": True}}
MUON = {"name": "muon", "lr": 0.01, "warmup_steps": 0, "schedule": "constant"}
MQA, UNGATED = {"num_kv_heads": 1}, {"gated": False, "activation": "gelu_tanh"}


def beside(recipe: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"tp": 2, **fields, "recipe": {**BESIDE, **(recipe or {})}}


def again(*operations: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_ops": operations}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"nobody to pass on to": beside(tp=1)},
    2: {
        "tp": beside(),
        "tp, micro-batch of 2, biases": beside({"micro_batch": 2}, **BIASED),
        "tp, one key head": beside(attention={**MQA, "qkv_bias": True}),
        "tp, one way up, tied": beside(mlp=UNGATED, model={"tied_embeddings": True}),
        "tp, norms over all heads": beside(attention={"qk_norm": "all_heads"}),
        "tp, latent attention": beside(attention=LATENT),
        "tp, queries without latents, latent_up recomputed": beside(
            again("latent_up"), attention={**LATENT, "q_lora_rank": None}
        ),
        "tp, full recompute": beside({"recompute": "full"}),
        "tp, norm, activation and attention recomputed": beside(RECOMPUTED),
        "tp, mlp recomputed, fused loss": beside(again("mlp") | {"loss_kernel": "fused"}),
        "tp, loss in chunks": beside({"loss_chunks": 3}),
        "tp, dropout": beside({"dropout": 0.2, "attention_kernel": "unfused"}),
    },
    4: {
        "tp": beside(tp=4, attention={"num_kv_heads": 4}),
        "tp, two key heads on four ranks, micro-batch of 2": beside({"micro_batch": 2}, tp=4),
        "tp, full recompute": beside({"recompute": "full"}, tp=4),
        **{f"tp x dp zero {zero}": beside({"zero": zero}, dp=2) for zero in (0, 1, 2, 3)},
        "tp x dp zero 3, recomputed": beside({"zero": 3, **RECOMPUTED}, dp=2),
        "tp x dp zero 3, full recompute, biases": beside({"zero": 3, "recompute": "full"}, dp=2, **BIASED),
        "tp x cp": beside(cp=2),
        "tp x cp ring": beside({"cp_method": "ring"}, cp=2),
        "tp x cp heads": beside({"cp_method": "all_to_all"}, cp=2),
        "tp x pp": beside(pp=2),
        "tp x gpipe, window, documents, muon": beside(
            {"schedule": "gpipe", "optimizer": MUON},
            pp=2,
            attention={"sliding_window": 5},
            data={"document_mask": True},
        ),
        **{
            f"tp x {schedule}": beside({"schedule": schedule}, pp=2, vpp=2)
            for schedule in ("interleaved_1f1b", "breadth_first")
        },
        **{
            f"tp x {schedule}{', full recompute' * whole}": beside(
                {"schedule": schedule, "recompute": ("none", "full")[whole]}, **layout, **BIASED
            )
            for schedule, layout in SPLIT.items()
            for whole in (0, 1)
        },
        "tp x zb_v, norm, activation and attention recomputed": beside(
            {"schedule": "zb_v", **RECOMPUTED}, **SPLIT["zb_v"]
        ),
        "ep of tp and dp, beside both": case(
            DEEPSEEK, {"overlap": {"tp": True, "ep": True}, "zero": 3}, ep=4, tp=2, dp=2
        ),
        "ep of tp, etp of dp, moe recomputed": case(
            QWEN, BESIDE | again("moe") | DROPPING | LOSS, ep=2, etp=2, tp=2, dp=2
        ),
        "ep of tp, biases, zb_h1": case(
            BIASES | {"d_ff_shared": 32}, BESIDE | {"schedule": "zb_h1"}, ep=2, tp=2, pp=2
        ),
        "deepseek-v3, tp x dp, zero 2": with_recipe({**DEEPSEEK_V3, "tp": 2, "dp": 2}, **BESIDE, zero=2),
    },
    8: {
        "tp x hsdp": beside({"zero": 3, "dp_replicate": 2}, dp=4),
        "deepseek-v3, tp x pp x dp, ep 4, dualpipe_v, zero 1": with_recipe(
            {**DEEPSEEK_V3, **SPLIT["dualpipe_v"], "tp": 2, "dp": 2, "ep": 4},
            **BESIDE,
            schedule="dualpipe_v",
            zero=1,
        ),
        "tp x cp x dp, zero 3, full recompute": beside(
            {"zero": 3, "cp_method": "ring", "recompute": "full"}, cp=2, dp=2
        ),
    },
}
