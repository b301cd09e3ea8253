"""Parity cases in which features of different files meet: every one of them alone is in a file of its own."""

from typing import Any

from parity_models import FAMILIES, GEMMA_2, GPT_OSS, MLA, UP, UP_AND_MORE, on
from parity_moe import BIASES, DEEPSEEK, LOSS, QWEN, case

METHODS = ("all_gather", "ring", "all_to_all")
SPLIT: dict[str, dict[str, Any]] = {
    "zb_h1": {"pp": 2},
    "zb_v": {"pp": 2, "vpp": 2},
    "dualpipe": {"pp": 2, "vpp": 2},
    "dualpipe_v": {"pp": 2, "vpp": 2},
}
DOCUMENTS = {"data": {"document_mask": True}}
WITH_OWN_SCORES = ("gemma 2", "gpt-oss")
"""Families whose scores only all_to_all can take apart."""


LATENT_HEADS = {**MLA["attention"], "num_heads": 4}
DEEPSEEK_V3: dict[str, Any] = {
    "model": {
        **MLA["model"],
        "mtp_depth": 1,
        "layer_groups": [
            {"repeat": 1, "pattern": [{"attention": LATENT_HEADS, "mlp": {"kind": "dense", "d_ff": 48}}]},
            {
                "repeat": 3,
                "pattern": [
                    {
                        "attention": LATENT_HEADS,
                        "mlp": {"kind": "moe", "num_experts": 8, "d_ff": 16, **DEEPSEEK},
                    }
                ],
            },
        ],
    },
}
"""All of it: latent attention, one dense layer, groups of experts that a bias balances, a later token."""


def with_recipe(fields: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    return {**fields, "recipe": {**fields.get("recipe", {}), **recipe}}


def families(name: str, *, recipe: dict[str, Any] | None = None, **layout: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {family}": with_recipe({**fields, **layout}, **(recipe or {}))
        for family, fields in FAMILIES.items()
    }


LOSSES: dict[str, dict[str, Any]] = {
    "fused": {"loss_kernel": "fused", "z_loss": 0.01},
    "in chunks": {"loss_chunks": 4, "z_loss": 0.01},
    "fused in chunks": {"loss_chunks": 3, "loss_kernel": "fused"},
}
DROPPING = {"dropout": 0.2, "attention_kernel": "unfused"}
RECOMPUTED = {"recompute": "selective", "recompute_ops": ["norm", "activation", "attention"]}

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "deepseek-v3": DEEPSEEK_V3,
        **{
            f"experts, recompute of {operation}": case(
                QWEN | BIASES, {"recompute": "selective", "recompute_ops": [operation]}
            )
            for operation in ("norm", "activation", "moe", "attention")
        },
        "experts, muon": case(DEEPSEEK, {"optimizer": {"name": "muon", "lr": 0.01}}),
        "experts of gpt-oss": case({"bias": True, "router_bias": True, "activation": "swiglu_clamped"}),
        **{f"loss {name}, gemma 2": with_recipe(GEMMA_2, **recipe) for name, recipe in LOSSES.items()},
        **families("recompute of operations", recipe=RECOMPUTED),
        "dropout, documents, gpt-oss": with_recipe({**GPT_OSS, **DOCUMENTS}, **DROPPING),
        "documents, gemma 2": {**GEMMA_2, **DOCUMENTS},
        "documents, gpt-oss": {**GPT_OSS, **DOCUMENTS},
        "documents, gpt-oss with a window": {
            **GPT_OSS,
            **DOCUMENTS,
            "attention": {**GPT_OSS["attention"], "sliding_window": 5},
        },
        "documents, mla": {**MLA, **DOCUMENTS},
    },
    2: {
        "deepseek-v3, ep": {**DEEPSEEK_V3, "dp": 2, "ep": 2},
        "deepseek-v3, ep of tp": {**DEEPSEEK_V3, "tp": 2, "ep": 2},
        **{
            f"deepseek-v3, ep zero {zero}": with_recipe({**DEEPSEEK_V3, "dp": 2, "ep": 2}, zero=zero)
            for zero in (1, 3)
        },
        **{
            f"experts, {schedule}{', full recompute' * again}": case(
                DEEPSEEK, {"schedule": schedule, "recompute": ("none", "full")[again], **LOSS}, **layout
            )
            for schedule, layout in SPLIT.items()
            for again in (0, 1)
        },
        **{
            f"experts, cp {method}, {'ep' if ep > 1 else 'replicas'}": case(
                DEEPSEEK, {"cp_method": method}, cp=2, ep=ep
            )
            for method in METHODS
            for ep in (1, 2)
        },
        "experts, tp, activation recomputed": case(
            QWEN, {"recompute": "selective", "recompute_ops": ["activation", "norm"]}, tp=2
        ),
        **{
            f"experts, {schedule}, recompute of {' and '.join(operations)}": case(
                DEEPSEEK,
                {"schedule": schedule, "recompute": "selective", "recompute_ops": operations, "zero": 1},
                **layout,
            )
            for schedule, layout in SPLIT.items()
            for operations in (["activation"], ["moe"], ["norm", "activation"])
        },
        "experts, ep, moe recomputed": case(
            QWEN, {"recompute": "selective", "recompute_ops": ["moe"]}, dp=2, ep=2
        ),
        "experts, ep, muon": case(DEEPSEEK, {"optimizer": {"name": "muon", "lr": 0.01}}, dp=2, ep=2),
        **{
            f"loss {name}, tp, gemma 2": with_recipe({**GEMMA_2, "tp": 2}, **recipe)
            for name, recipe in LOSSES.items()
        },
        **{f"loss {name}, cp": with_recipe({"cp": 2}, **recipe) for name, recipe in LOSSES.items()},
        **{
            f"loss {name}, zb_v": with_recipe(SPLIT["zb_v"], schedule="zb_v", **recipe)
            for name, recipe in LOSSES.items()
        },
        **families("tp, recompute of operations", tp=2, recipe=RECOMPUTED),
        **families("tp, dropout", tp=2, recipe=DROPPING),
        **families("cp, dropout", cp=2, recipe={**DROPPING, "cp_method": "all_to_all"}),
        **{
            f"{schedule}, dropout": with_recipe(layout, schedule=schedule, **DROPPING)
            for schedule, layout in SPLIT.items()
        },
        **{
            f"{schedule}, recompute of {operation}": with_recipe(
                layout, schedule=schedule, recompute="selective", recompute_ops=[operation]
            )
            for schedule, layout in SPLIT.items()
            for operation in ("norm", "activation", "mlp", "attention")
        },
        **{
            f"{schedule}, mla, recompute of the way up": on({**MLA, **layout}, recipe={"schedule": schedule, **UP})
            for schedule, layout in SPLIT.items()
        },
        **{
            f"cp {method}, recompute of operations": with_recipe({"cp": 2}, cp_method=method, **RECOMPUTED)
            for method in METHODS
        },
        **families("cp all_to_all", cp=2, recipe={"cp_method": "all_to_all"}),
        **{
            f"cp {method}, {family}": with_recipe({**fields, "cp": 2}, cp_method=method)
            for family, fields in FAMILIES.items()
            for method in ("all_gather", "ring")
            if family not in WITH_OWN_SCORES
        },
        **families("zb_v", **SPLIT["zb_v"], recipe={"schedule": "zb_v"}),
    },
    4: {
        **{
            f"deepseek-v3, ep, {schedule}": with_recipe(
                {**DEEPSEEK_V3, **layout, "dp": 2, "ep": 2}, schedule=schedule, zero=1
            )
            for schedule, layout in SPLIT.items()
        },
        **{
            f"deepseek-v3, ep, {schedule}, recompute of the way up": with_recipe(
                {**DEEPSEEK_V3, **SPLIT[schedule], "dp": 2, "ep": 2}, schedule=schedule, zero=zero, **UP_AND_MORE
            )
            for schedule, zero in (("zb_v", 3), ("dualpipe", 1))
        },
        "tp x zb_v, mla, recompute of the way up": with_recipe(
            {**MLA, **SPLIT["zb_v"], "tp": 2}, schedule="zb_v", **UP_AND_MORE
        ),
        "tp x dualpipe, mla, recompute of the way up": with_recipe(
            {**MLA, **SPLIT["dualpipe"], "tp": 2}, schedule="dualpipe", **UP
        ),
        "experts, tp x cp, ep 4": case(DEEPSEEK, {"cp_method": "ring", "zero": 1}, tp=2, cp=2, ep=4),
        "experts, dp x cp, ep 2, zero 3": case(DEEPSEEK, {"zero": 3}, dp=2, cp=2, ep=2),
        "experts, dp x cp, etp 2": case(QWEN, {"zero": 2}, dp=2, cp=2, etp=2),
        **{
            f"{schedule} x cp {method}": with_recipe({**layout, "cp": 2}, schedule=schedule, cp_method=method)
            for schedule, layout in SPLIT.items()
            for method in METHODS
        },
        **families("tp x dualpipe_v", tp=2, **SPLIT["dualpipe_v"], recipe={"schedule": "dualpipe_v"}),
        **families("tp x cp all_to_all", tp=2, cp=2, recipe={"cp_method": "all_to_all", "zero": 1}),
        "tp x cp, dropout, full recompute": with_recipe(
            {"tp": 2, "cp": 2}, cp_method="all_to_all", recompute="full", **DROPPING
        ),
        "tp x cp without sequence parallelism, dropout": with_recipe(
            {"tp": 2, "cp": 2}, cp_method="all_to_all", sequence_parallel=False, **DROPPING
        ),
        "zb_h1 x cp ring, documents": with_recipe(
            {**DOCUMENTS, "pp": 2, "cp": 2}, schedule="zb_h1", cp_method="ring"
        ),
    },
    8: {
        "deepseek-v3, dualpipe x ep 4, zero 1": with_recipe(
            {**DEEPSEEK_V3, **SPLIT["dualpipe"], "dp": 4, "ep": 4}, schedule="dualpipe", zero=1, global_batch=16
        ),
        "deepseek-v3, tp x pp x dp, ep 4, zero 1": with_recipe(
            {**DEEPSEEK_V3, "tp": 2, "pp": 2, "dp": 2, "ep": 4}, zero=1
        ),
        "experts, cp x pp x dp, ep 4": case(DEEPSEEK, {"zero": 1}, cp=2, pp=2, dp=2, ep=4),
        **{
            f"{schedule} x cp x tp": with_recipe(
                {**MLA, **layout, "cp": 2, "tp": 2}, schedule=schedule, cp_method=method, zero=1
            )
            for (schedule, layout), method in zip(SPLIT.items(), (*METHODS, "ring"), strict=True)
        },
        "zb_v x cp x dp zero 2, full recompute": with_recipe(
            {**SPLIT["zb_v"], "cp": 2, "dp": 2}, schedule="zb_v", cp_method="ring", zero=2, recompute="full"
        ),
    },
}
