"""Low-precision matmuls in every layout: the same codes, scales, losses and gradients as the plain model's, whose
matmuls have the same operands; all else is float64.

Widths are multiples of the recipe's blocks on every rank, so that no block is cut by the layout. `CUT` has the
layouts that cut some.
"""

from typing import Any

from parity_pairs import fields_of

PRECISIONS = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8")
WIDE = {"d_model": 256}
ATTENTION = {"num_heads": 4, "num_kv_heads": 4, "d_head": 64}
MOE = {"kind": "moe", "num_experts": 4, "top_k": 2, "d_ff": 128, "d_ff_shared": 128}
MLA = {
    "kind": "mla",
    "num_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "d_nope": 64,
    "d_rope": 64,
    "d_value": 128,
}


def case(precision: str, recipe: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    model = {**WIDE, **fields.pop("model", {})}
    return {
        "attention": fields.pop("attention", ATTENTION),
        "mlp": fields.pop("mlp", {"d_ff": 512}),
        "model": model,
        "recipe": {
            "precision": precision,
            "emulate_precision": True,
            "seq_len": 256,
            "global_batch": 2,
            **(recipe or {}),
        },
        **fields,
    }


def moe(precision: str, recipe: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return case(precision, recipe, mlp=MOE, **fields)


def gathered(fields: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    """The same, with weights that are gathered in few bits."""
    return {**fields, "recipe": {**fields["recipe"], "zero": 3, "gather_fp8": True, **recipe}}


ONE_HEAD = {**ATTENTION, "num_kv_heads": 1}
"""Keys' and values' 64 rows are half a block, which shards cut again."""
THREE = {**MOE, "num_experts": 3}
"""Experts that two ranks can't share out one by one."""

GATHERED_WITH: tuple[tuple[str, ...], ...] = (
    ("pp 1f1b", "dp zero 3", "tied embeddings", "document mask", "fused loss"),
    ("pp gpipe", "dp zero 2", "sliding window", "selective recompute", "loss in chunks"),
    ("pp interleaved_1f1b", "Muon"),
    ("pp breadth_first", "dp zero 3", "loss for balance"),
    ("pp zb_h1", "dropout"),
    ("pp dualpipe", "multi-token prediction"),
    ("pp dualpipe_v", "dp zero 2", "full recompute"),
    ("tp without sequence parallelism", "dp zero 3"),
    ("cp ring", "dp zero 3"),
    ("cp all_to_all", "selective recompute"),
    ("tp", "ep beside shared experts", "capacity of experts"),
)
"""Features that meet weights gathered in few bits (`parity_pairs.py`)."""

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{precision: case(precision) for precision in PRECISIONS},
        "nvfp4, full recompute": case("nvfp4", {"recompute": "full"}),
        "full recompute": case("fp8-block", {"recompute": "full"}),
        "selective recompute": case(
            "fp8-block", {"recompute": "selective", "recompute_ops": ["attention", "norm", "activation"]}
        ),
        **{f"experts, {precision}": moe(precision) for precision in PRECISIONS},
        "latents": case("fp8-block", attention=MLA),
        "later tokens": case("fp8-current", model={"mtp_depth": 1}),
        "recomputed mlp": case("fp8-block", {"recompute": "selective", "recompute_ops": ["mlp"]}),
    },
    2: {
        **{
            f"{axis} 2, {precision}": case(precision, {"seq_len": 512 if axis == "cp" else 256}, **{axis: 2})
            for axis in ("dp", "tp", "pp", "cp")
            for precision in PRECISIONS
            # A row that is cut, of widths or of positions, has two scales.
            if axis in ("dp", "pp") or precision != "fp8-rowwise"
        },
        "dp 2, nvfp4": case("nvfp4", dp=2),
        "pp 2, nvfp4, zb_h1": case("nvfp4", {"schedule": "zb_h1"}, pp=2),
        "experts, dp 2, nvfp4, zero 1": moe("nvfp4", {"zero": 1}, dp=2),
        "dp 2, zero 3": case("fp8-block", {"zero": 3}, dp=2),
        "dp 2, zero 2, full recompute": case("fp8-delayed", {"zero": 2, "recompute": "full"}, dp=2),
        "gathered, dp 2, fp8-current": gathered(case("fp8-current", dp=2)),
        "gathered, dp 2, fp8-delayed, zero 2": gathered(case("fp8-delayed", dp=2), zero=2),
        "gathered, dp 2, cut blocks": gathered(case("fp8-block", attention=ONE_HEAD, dp=2)),
        "gathered, dp 2, uneven shards": gathered(case("fp8-block", mlp={"d_ff": 129}, dp=2)),
        "gathered once, dp 2, full recompute": gathered(
            case("fp8-block", {"recompute": "full"}, dp=2), reshard_after_forward=False
        ),
        "gathered, cp 2": gathered(case("fp8-block", {"seq_len": 512}, cp=2)),
        "gathered, experts, dp 2": gathered(moe("fp8-current", dp=2)),
        "gathered, three experts, dp 2": gathered(case("fp8-block", mlp=THREE, dp=2)),
        "tp 2, full recompute": case("fp8-block", {"recompute": "full"}, tp=2),
        "tp 2, whole sequences": case("fp8-current", {"sequence_parallel": False}, tp=2),
        "cp 2, ring": case("fp8-block", {"cp_method": "ring", "seq_len": 512}, cp=2),
        "experts, pp 2": moe("fp8-block", pp=2),
        "experts, dp 2, zero 3": moe("fp8-block", {"zero": 3}, dp=2),
        "experts, tp 2": moe("fp8-current", tp=2),
        "experts, tp 2, ep 2": moe("fp8-delayed", tp=2, ep=2),
        "experts of others, tp 2, ep 2": moe("fp8-current", tp=2, ep=2),
        "experts, tp 2, etp 2": moe("fp8-current", tp=2, etp=2),
        "latents, cp 2": case("fp8-block", {"seq_len": 512}, attention=MLA, cp=2),
        "later tokens, tp 2": case("fp8-current", model={"mtp_depth": 1}, tp=2),
        "pp 2, zb_h1": case("fp8-block", {"schedule": "zb_h1"}, pp=2),
        "pp 2, zb_v": case("fp8-current", {"schedule": "zb_v"}, pp=2, vpp=2),
        "pp 2, dualpipe_v": case("fp8-delayed", {"schedule": "dualpipe_v", "global_batch": 4}, pp=2, vpp=2),
    },
    4: {
        "tp 2, pp 2": case("fp8-block", tp=2, pp=2),
        "tp 2, dp 2, zero 3": case("fp8-current", {"zero": 3}, tp=2, dp=2),
        "cp 2, dp 2, zero 2": case("fp8-delayed", {"zero": 2, "seq_len": 512}, cp=2, dp=2),
        "experts, tp 2, ep 2, pp 2": moe("fp8-current", tp=2, ep=2, pp=2),
        "gathered, tp 2, dp 2": gathered(case("fp8-current", model={"mtp_depth": 1}, tp=2, dp=2)),
        "gathered, pp 2, dp 2, zb_v": gathered(case("fp8-block", {"schedule": "zb_v"}, pp=2, vpp=2, dp=2)),
        **{
            f"gathered, {', '.join(names)}": fields_of(frozenset({"weights gathered in fp8", *names}))
            for names in GATHERED_WITH
        },
        "gathered, HSDP": gathered(case("fp8-delayed", {"global_batch": 4}, dp=4), dp_replicate=2),
        "gathered, latents, cp 2, dp 2": gathered(
            case("fp8-block", {"seq_len": 512}, attention=MLA, cp=2, dp=2), zero=1
        ),
        "gathered, experts, tp 2, dp 2, ep 2": gathered(moe("fp8-delayed", tp=2, dp=2, ep=2), zero=1),
        "gathered, experts, tp 2, dp 2, etp 2": gathered(moe("fp8-current", tp=2, dp=2, etp=2)),
    },
}

ALIKE: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        f"{precision}, zero {zero}": (gathered(moe(precision, dp=2), zero=zero), {"gather_fp8": False})
        for precision, zero in (("fp8-current", 3), ("fp8-block", 3), ("fp8-delayed", 1))
    }
    | {"experts of one rank": (gathered(moe("fp8-block", dp=2, ep=2)), {"gather_fp8": False})},
}
"""Two steps in the run's own number formats that are those of another recipe, to the bit."""

CUT: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "rows, tp 2": case("fp8-rowwise", tp=2),
        "rows, cp 2": case("fp8-rowwise", cp=2),
        "weights' blocks, tp 2": case("fp8-block", attention={**ATTENTION, "num_kv_heads": 2}, tp=2),
        "positions' tiles, cp 2": case("fp8-block", cp=2),
        "experts' rows, dp 2, ep 2": moe("fp8-block", dp=2, ep=2),
        "experts' rows, tp 2": moe("fp8-block", tp=2),
        "experts of two microbatches, dp 2, ep 2": moe("fp8-current", dp=2, ep=2),
        "latents' gradients, tp 2": case("fp8-block", attention=MLA, tp=2),
    },
}
"""Where a layout cuts blocks, what shares a scale is another set of values, and rounding is another."""
