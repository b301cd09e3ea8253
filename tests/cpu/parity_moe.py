"""Cases of `parity_cases.py` with mixtures of experts: one dense layer, then three with eight experts, two for
each token, unless the case says otherwise."""

from collections.abc import Callable
from typing import Any

from trainwright.train.parallelize import Trainer

DEEPSEEK = {
    "top_k": 3,
    "d_ff_shared": 32,
    "router": "sigmoid",
    "balance_bias": True,
    "routed_scale": 2.5,
    "num_groups": 4,
    "top_groups": 2,
}
"""Sigmoid, groups, shared experts, and a balance bias that the step moves."""
QWEN = {"d_ff_shared": 16, "shared_gate": True, "normalize_top_k": False}
"""Shared experts behind a gate, weights that aren't made to sum to one."""
BIASES = {"bias": True, "router_bias": True, "gated": False, "activation": "gelu"}
INTERLEAVED = {"schedule": "interleaved_1f1b"}
DROPPING = {"capacity_factor": 1.0}
LOSS = {"balance_loss": 0.5}
"""Large, so that its gradient is seen."""


def case(mlp: dict[str, Any] | None = None, recipe: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    attention = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": 8}
    experts = {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": 16, **(mlp or {})}
    groups = [
        {"repeat": 1, "pattern": [{"attention": attention, "mlp": {"kind": "dense", "d_ff": 48}}]},
        {"repeat": 3, "pattern": [{"attention": attention, "mlp": experts}]},
    ]
    return {"model": {"layer_groups": groups}, "recipe": recipe or {}, **fields}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "moe": case(),
        "moe deepseek": case(DEEPSEEK, {"micro_batch": 4}),
        "moe full recompute, biases, capacity, loss": case(
            BIASES | {"balance_bias": True}, {"recompute": "full", **DROPPING, **LOSS}
        ),
        "moe sequential": case(QWEN, {"expert_matmuls": "sequential", "recompute": "selective"}),
    },
    2: {
        "moe ep": case(ep=2, dp=2),
        "moe ep deepseek": case(DEEPSEEK, ep=2, dp=2),
        "moe ep qwen, loss": case(QWEN, LOSS, ep=2, dp=2),
        "moe ep biases, capacity": case(BIASES, DROPPING, ep=2, dp=2),
        "moe ep ignored targets": case(ep=2, dp=2, ignored=True),
        "moe ep full recompute": case(DEEPSEEK, {"recompute": "full"}, ep=2, dp=2),
        "moe ep without overlap": case(recipe={"overlap": {"dp": False}}, ep=2, dp=2),
        "moe etp of dp": case(etp=2, dp=2),
        "moe etp of dp, biases": case(BIASES, etp=2, dp=2),
        **{f"moe dp zero {zero}": case(DEEPSEEK, {"zero": zero}, dp=2) for zero in (0, 2, 3)},
        **{f"moe ep zero {zero}": case(DEEPSEEK, {"zero": zero}, ep=2, dp=2) for zero in (1, 2, 3)},
        "moe ep zero 3 full recompute": case(recipe={"zero": 3, "recompute": "full"}, ep=2, dp=2),
        "moe tp": case(DEEPSEEK, tp=2),
        "moe tp capacity, loss": case(DEEPSEEK, DROPPING | LOSS, tp=2),
        "moe ep of tp": case(DEEPSEEK, ep=2, tp=2),
        "moe ep of tp, qwen, full recompute": case(QWEN, {"recompute": "full"}, ep=2, tp=2),
        "moe etp of tp, biases, capacity": case(BIASES, DROPPING, etp=2, tp=2),
        "moe pp": case(DEEPSEEK, LOSS, pp=2),
        "moe pp gpipe": case(DEEPSEEK, {"schedule": "gpipe"}, pp=2),
        "moe pp interleaved, full recompute": case(DEEPSEEK, {"recompute": "full", **INTERLEAVED}, pp=2, vpp=2),
    },
    4: {
        "moe ep": case(ep=4, dp=4),
        "moe ep x edp": case(DEEPSEEK, LOSS | DROPPING, ep=2, dp=4),
        **{f"moe ep x edp zero {zero}": case(DEEPSEEK, {"zero": zero}, ep=2, dp=4) for zero in (1, 2, 3)},
        "moe ep x edp zero 3, uneven shards, biases": case(
            BIASES | {"num_experts": 6, "d_ff": 15}, {"zero": 3}, ep=2, dp=4
        ),
        "moe ep x hsdp zero 1": case(DEEPSEEK, {"zero": 1, "dp_replicate": 2}, ep=2, dp=4),
        "moe ep x hsdp zero 3, full recompute": case(
            DEEPSEEK, {"zero": 3, "dp_replicate": 2, "recompute": "full"}, ep=2, dp=4
        ),
        "moe hsdp zero 2": case(recipe={"zero": 2, "dp_replicate": 2}, dp=4),
        "moe ep x etp": case(DEEPSEEK, ep=2, etp=2, dp=4),
        "moe ep x etp zero 3, biases": case(BIASES, {"zero": 3}, ep=2, etp=2, dp=4),
        "moe etp x edp zero 2, biases": case(BIASES, {"zero": 2}, etp=2, dp=4),
        "moe ep over tp and dp": case(DEEPSEEK, DROPPING | LOSS, ep=4, tp=2, dp=2),
        "moe ep over tp and dp, zero 3": case(QWEN, {"zero": 3}, ep=4, tp=2, dp=2),
        "moe ep of tp x dp zero 2": case(DEEPSEEK, {"zero": 2}, ep=2, tp=2, dp=2),
        "moe tp x dp zero 3": case(DEEPSEEK, {"zero": 3}, tp=2, dp=2),
        "moe etp of tp, ep of dp": case(BIASES, ep=2, etp=2, tp=2, dp=2),
        "moe etp of tp, ep of dp, zero 1": case(DEEPSEEK, {"zero": 1, **LOSS}, ep=2, etp=2, tp=2, dp=2),
        "moe etp of tp, zero 3, ignored targets": case(DEEPSEEK, {"zero": 3}, etp=2, tp=2, dp=2, ignored=True),
        "moe ep x pp": case(DEEPSEEK, LOSS, ep=2, pp=2, dp=2),
        **{f"moe ep x pp zero {zero}": case(DEEPSEEK, {"zero": zero}, ep=2, pp=2, dp=2) for zero in (1, 2, 3)},
        **{
            f"moe dp x pp interleaved zero {zero}": case(
                DEEPSEEK, {"zero": zero, "recompute": "full", **INTERLEAVED}, pp=2, vpp=2, dp=2
            )
            for zero in (0, 2, 3)
        },
        "moe ep x pp breadth first zero 2, dp inside pp": case(
            QWEN, {"zero": 2, "schedule": "breadth_first"}, ep=2, pp=2, vpp=2, dp=2, order="tp-cp-dp-pp"
        ),
        "moe ep of tp x pp gpipe": case(DEEPSEEK, {"schedule": "gpipe", **DROPPING}, ep=2, tp=2, pp=2),
    },
    8: {
        "moe tp x pp x dp, ep over both": case(DEEPSEEK, LOSS | DROPPING, tp=2, pp=2, dp=2, ep=4),
        "moe tp x pp x dp, etp and ep, zero 1": case(DEEPSEEK, {"zero": 1}, tp=2, pp=2, dp=2, ep=2, etp=2),
        "moe pp x dp, ep of 2, zero 2 interleaved": case(
            DEEPSEEK, {"zero": 2, **INTERLEAVED}, pp=2, vpp=2, dp=4, ep=2
        ),
        "moe pp x hsdp, dp inside pp": case(
            BIASES, {"zero": 3, "dp_replicate": 2}, pp=2, dp=4, ep=2, order="tp-cp-dp-pp"
        ),
        "moe tp x dp, ep of 4, zero 3": case(DEEPSEEK, {"zero": 3}, tp=2, dp=4, ep=4),
        "moe tp x hsdp, etp of tp": case(QWEN, {"zero": 3, "dp_replicate": 2, **LOSS}, tp=2, dp=4, etp=2, ep=2),
        "moe ep x etp x edp": case(BIASES, DROPPING, dp=8, ep=2, etp=2),
        "moe ep of 8 over tp and dp": case(DEEPSEEK, {"recompute": "full"}, tp=2, dp=4, ep=8),
    },
}


def without_edp_reduction(trainer: Trainer) -> None:
    buckets = trainer.data_parallel.buckets  # type: ignore[attr-defined]
    buckets[:] = [bucket for bucket in buckets if not bucket.slots[0].of_experts]


def experts_counted_as_dense(trainer: Trainer) -> None:
    """Their part of the norm is divided by the replicas of dense parameters."""
    trainer.data_parallel._of_experts = set()  # type: ignore[attr-defined]


def biases_moved_by_local_loads(trainer: Trainer) -> None:
    trainer.balance._mesh = type("Alone", (), {"groups": {}})()  # type: ignore[assignment]


CONTROLS: dict[int, dict[str, tuple[dict[str, Any], Callable[[Trainer], None]]]] = {
    2: {
        "moe experts without their reduction": (
            case(recipe={"overlap": {"dp": False}}, dp=2),
            without_edp_reduction,
        ),
        "moe norm by the replicas of dense parameters": (
            case({"routed_scale": 30.0}, ep=2, dp=2),
            experts_counted_as_dense,
        ),
        "moe biases moved by local loads": (case(DEEPSEEK, ep=2, dp=2), biases_moved_by_local_loads),
    },
}
