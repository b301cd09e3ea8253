"""Low-precision matmuls in every layout: the same codes, scales, losses and gradients as the plain model's, whose
matmuls have the same operands; all else is float64.

Widths are multiples of the recipe's blocks on every rank, so that no block is cut by the layout; a block that is cut
has other scales (`test_precision_layouts.py` holds those to a bound).
"""

from typing import Any

PRECISIONS = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8")
WIDE = {"d_model": 256}
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "d_head": 64}


def case(precision: str, recipe: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    model = {**WIDE, **fields.pop("model", {})}
    return {
        "attention": {**ATTENTION, **fields.pop("attention", {})},
        "mlp": {"d_ff": 512, **fields.pop("mlp", {})},
        "model": model,
        "recipe": {"precision": precision, "seq_len": 256, "global_batch": 4, **(recipe or {})},
        **fields,
    }


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{precision: case(precision) for precision in PRECISIONS},
        "full recompute": case("fp8-block", {"recompute": "full"}),
        "selective recompute": case(
            "fp8-block", {"recompute": "selective", "recompute_ops": ["attention", "norm", "activation"]}
        ),
        "recomputed mlp": case("fp8-block", {"recompute": "selective", "recompute_ops": ["mlp"]}),
    },
    2: {
        **{
            f"{axis} 2, {precision}": case(precision, {"schedule": "1f1b"}, **{axis: 2})
            for axis in ("dp", "tp", "pp", "cp")
            for precision in PRECISIONS
            # A row that tensor parallelism cuts has two scales.
            if (axis, precision) != ("tp", "fp8-rowwise")
        },
        "dp 2, zero 3": case("fp8-block", {"zero": 3}, dp=2),
        "dp 2, zero 2, full recompute": case("fp8-delayed", {"zero": 2, "recompute": "full"}, dp=2),
        "tp 2, full recompute": case("fp8-block", {"recompute": "full"}, tp=2),
        "tp 2, whole sequences": case("fp8-current", {"sequence_parallel": False}, tp=2),
        "cp 2, ring": case("fp8-block", {"cp_method": "ring"}, cp=2),
        "pp 2, zb_h1": case("fp8-block", {"schedule": "zb_h1"}, pp=2),
        "pp 2, zb_v": case("fp8-current", {"schedule": "zb_v"}, pp=2, vpp=2),
        "pp 2, dualpipe_v": case("fp8-delayed", {"schedule": "dualpipe_v"}, pp=2, vpp=2),
    },
}
