"""Parity cases of `recipe.overlap.ep`: rows are on their way to experts and back beside the shared experts."""

from typing import Any

from parity_moe import BIASES, DEEPSEEK, DROPPING, LOSS, QWEN, case
from parity_together import DEEPSEEK_V3, SPLIT, with_recipe

BESIDE = {"overlap": {"ep": True}}
SHARED_BIASES = BIASES | {"d_ff_shared": 32}


def beside(mlp: dict[str, Any], recipe: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return case(mlp, {**BESIDE, **(recipe or {})}, **fields)


def again(*operations: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_ops": operations}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"nobody to send to": beside(DEEPSEEK)},
    2: {
        "ep": beside(DEEPSEEK, ep=2, dp=2),
        "ep, gate of the shared experts, loss": beside(QWEN, LOSS, ep=2, dp=2),
        "ep, biases, capacity, ignored targets": beside(SHARED_BIASES, DROPPING, ep=2, dp=2, ignored=True),
        "ep of tp": beside(DEEPSEEK, ep=2, tp=2),
        "ep of tp, biases, recompute of norm and activation": beside(
            SHARED_BIASES, again("norm", "activation"), ep=2, tp=2
        ),
        "ep of cp": beside(DEEPSEEK, {"cp_method": "ring"}, ep=2, cp=2),
        "etp alone": beside(DEEPSEEK, etp=2, dp=2),
        "ep, full recompute": beside(QWEN, {"recompute": "full"}, ep=2, dp=2),
        "ep of tp, full recompute": beside(DEEPSEEK, {"recompute": "full"}, ep=2, tp=2),
        "ep, moe recomputed": beside(QWEN, again("moe"), ep=2, dp=2),
        "ep, activation recomputed": beside(DEEPSEEK, again("activation"), ep=2, dp=2),
        **{f"ep zero {zero}": beside(DEEPSEEK, {"zero": zero}, ep=2, dp=2) for zero in (1, 2, 3)},
        "ep zero 3, full recompute": beside(DEEPSEEK, {"zero": 3, "recompute": "full"}, ep=2, dp=2),
        "deepseek-v3, ep": with_recipe({**DEEPSEEK_V3, "dp": 2, "ep": 2}, **BESIDE),
        "ep, dropout": beside(DEEPSEEK, {"dropout": 0.2, "attention_kernel": "unfused"}, ep=2, dp=2),
    },
    4: {
        **{f"ep x edp zero {zero}": beside(DEEPSEEK, {"zero": zero}, ep=2, dp=4) for zero in (0, 3)},
        "ep over tp and dp": beside(DEEPSEEK, DROPPING | LOSS, ep=4, tp=2, dp=2),
        "ep over tp and dp, zero 3": beside(QWEN, {"zero": 3}, ep=4, tp=2, dp=2),
        "ep x etp": beside(DEEPSEEK, ep=2, etp=2, dp=4),
        "etp of tp, ep of dp, biases, zero 1": beside(SHARED_BIASES, {"zero": 1}, ep=2, etp=2, tp=2, dp=2),
        "ep x pp 1f1b": beside(DEEPSEEK, LOSS, ep=2, pp=2, dp=2),
        **{
            f"ep x {schedule}{', full recompute' * whole}": beside(
                DEEPSEEK, {"schedule": schedule, "recompute": ("none", "full")[whole]}, ep=2, dp=2, **layout
            )
            for schedule, layout in SPLIT.items()
            for whole in (0, 1)
        },
        **{
            f"ep of tp x {schedule}": beside(QWEN, {"schedule": schedule}, ep=2, tp=2, **layout)
            for schedule, layout in SPLIT.items()
        },
        "deepseek-v3, ep x zb_v, zero 3": with_recipe(
            {**DEEPSEEK_V3, **SPLIT["zb_v"], "dp": 2, "ep": 2}, **BESIDE, schedule="zb_v", zero=3
        ),
    },
    8: {
        "deepseek-v3, tp x pp x dp, ep 4, dualpipe_v, zero 1": with_recipe(
            {**DEEPSEEK_V3, **SPLIT["dualpipe_v"], "tp": 2, "dp": 2, "ep": 4},
            **BESIDE,
            schedule="dualpipe_v",
            zero=1,
        ),
        "tp x cp x dp, ep 4, etp 2, zero 3": beside(
            DEEPSEEK, {"zero": 3, "cp_method": "ring", **DROPPING, **LOSS}, tp=2, cp=2, dp=2, ep=4, etp=2
        ),
    },
}
