"""Parity cases in which features of different files meet: every one of them alone is in a file of its own."""

from typing import Any

from parity_models import FAMILIES, GEMMA_2, GPT_OSS, MLA

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


def with_recipe(fields: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    return {**fields, "recipe": {**fields.get("recipe", {}), **recipe}}


def families(name: str, *, recipe: dict[str, Any] | None = None, **layout: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {family}": with_recipe({**fields, **layout}, **(recipe or {}))
        for family, fields in FAMILIES.items()
        if not (family.startswith("mtp") and ("cp" in layout or "dropout" in (recipe or {})))
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
            f"cp {method}, recompute of operations": with_recipe({"cp": 2}, cp_method=method, **RECOMPUTED)
            for method in METHODS
        },
        **families("cp all_to_all", cp=2, recipe={"cp_method": "all_to_all"}),
        **{
            f"cp {method}, {family}": with_recipe({**fields, "cp": 2}, cp_method=method)
            for family, fields in FAMILIES.items()
            for method in ("all_gather", "ring")
            if family not in WITH_OWN_SCORES and not family.startswith("mtp")
        },
        **families("zb_v", **SPLIT["zb_v"], recipe={"schedule": "zb_v"}),
    },
    4: {
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
