"""Cases of schedules that split backward, fold the pipeline or go through it both ways; `parity_cases.py` runs
them.

A microbatch of one sequence and a global batch of 8 times dp give DualPipe its 2 pp microbatches at pp = 4.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trainwright.train.parallel.weight_gradients import WeightGradients
from trainwright.train.parallelize import Trainer

TIED = {"tied_embeddings": True}
SPLIT: dict[str, dict[str, Any]] = {
    "zb_h1": {},
    "zb_v": {"vpp": 2},
    "dualpipe": {"vpp": 2},
    "dualpipe_v": {"vpp": 2},
}
"""Schedules with weight-gradient acts, and what a layout must say for them."""


BIASES = {
    "model": {"norm": "layernorm"},
    "attention": {"qkv_bias": True, "out_bias": True},
    "mlp": {"bias": True},
}


def layers(number: int) -> dict[str, Any]:
    layer = {
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": 8},
        "mlp": {"kind": "dense", "d_ff": 48},
    }
    return {"layer_groups": [{"repeat": number, "pattern": [layer]}]}


def case(schedule: str, *, pp: int = 2, dp: int = 1, recipe: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"pp": pp, "dp": dp, **SPLIT[schedule], **fields}
    return {**fields, "recipe": {"schedule": schedule, "global_batch": 8 * dp, **(recipe or {})}}


def alone(**fields: Any) -> Any:
    """zb_h1 on a pipeline of one, in which every weight gradient follows its input gradient."""
    return case("zb_h1", pp=1, **fields)


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "split": alone(),
        "split tied": alone(model=TIED),
        "split full recompute": alone(recipe={"recompute": "full"}),
        "split selective recompute": alone(recipe={"recompute": "selective"}),
        "split layernorm and biases": alone(**BIASES),
    },
    2: {
        **{name: case(name) for name in SPLIT},
        **{f"{name} tied": case(name, model=TIED) for name in SPLIT},
        **{f"{name} full recompute": case(name, recipe={"recompute": "full"}) for name in SPLIT},
        **{f"{name} ignored targets": case(name, ignored=True) for name in SPLIT},
        **{f"{name} without overlap": case(name, recipe={"overlap": {"pp": False}}) for name in SPLIT},
        "zb_h1 uneven stages": case("zb_h1", model=layers(5)),
        "zb_v uneven stages": case("zb_v", model=layers(7), recipe={"recompute": "selective"}),
        "zb_v empty ends tied": case("zb_v", model={**layers(2), **TIED}),
        "zb_v two microbatches": case("zb_v", recipe={"micro_batch": 4}),
        "dualpipe chosen stages": case("dualpipe", stage_layers=[1, 3], **BIASES),
        "dualpipe all layers on the last stage": case("dualpipe", stage_layers=[0, 4], model=TIED),
        "dualpipe_v chosen stages": case("dualpipe_v", stage_layers=[0, 1, 2, 1], **BIASES),
        "dualpipe_v one layer recomputed": case(
            "dualpipe_v", model=layers(8), recipe={"recompute": "full", "recompute_layers": 1}
        ),
        **{f"split dp zero {zero}": alone(dp=2, recipe={"zero": zero}) for zero in range(4)},
        "split dp zero 0 tied": alone(dp=2, model=TIED),
        "split dp zero 3 tied": alone(dp=2, model=TIED, recipe={"zero": 3}),
        "split dp without overlap": alone(dp=2, recipe={"overlap": {"dp": False}}),
        "split tp": alone(tp=2),
        "split tp without sequence parallelism": alone(tp=2, recipe={"sequence_parallel": False}, **BIASES),
        "split tp mqa tied": alone(tp=2, attention={"num_kv_heads": 1}, model=TIED),
        "split tp full recompute": alone(tp=2, recipe={"recompute": "full"}),
        "split tp selective recompute": alone(tp=2, recipe={"recompute": "selective"}),
    },
    4: {
        **{f"{name} pp 4": case(name, pp=4, model=layers(8)) for name in SPLIT},
        **{f"{name} pp 4 tied": case(name, pp=4, model={**layers(8), **TIED}) for name in SPLIT},
        "zb_h1 pp 4 empty ends tied": case("zb_h1", pp=4, stage_layers=[0, 3, 1, 0], model=TIED),
        "zb_v pp 4 empty ends": case("zb_v", pp=4, model=layers(6)),
        "dualpipe pp 4 empty ends tied": case("dualpipe", pp=4, stage_layers=[0, 3, 1, 0], model=TIED),
        "dualpipe_v pp 4 uneven full recompute": case(
            "dualpipe_v", pp=4, model=layers(10), recipe={"recompute": "full"}
        ),
        **{
            f"{name} x dp zero {zero}": case(name, dp=2, recipe={"zero": zero})
            for name in SPLIT
            for zero in range(4)
        },
        **{f"{name} x dp zero 1 tied": case(name, dp=2, recipe={"zero": 1}, model=TIED) for name in SPLIT},
        **{
            f"{name} x dp zero 3 full recompute": case(name, dp=2, recipe={"zero": 3, "recompute": "full"})
            for name in ("zb_h1", "dualpipe_v")
        },
        "zb_v x dp zero 3 gathered once": case("zb_v", dp=2, recipe={"zero": 3, "reshard_after_forward": False}),
        "dualpipe x dp inside pp zero 2": case("dualpipe", dp=2, order="tp-cp-dp-pp", recipe={"zero": 2}),
        **{f"tp x {name}": case(name, tp=2) for name in SPLIT},
        "tp x zb_v full recompute": case("zb_v", tp=2, recipe={"recompute": "full"}),
        "tp x zb_v tied": case("zb_v", tp=2, model=TIED),
        "tp x dualpipe tied": case("dualpipe", tp=2, model=TIED),
        "tp x dualpipe_v without sequence parallelism": case(
            "dualpipe_v", tp=2, recipe={"sequence_parallel": False}
        ),
        **{f"split hsdp zero {zero}": alone(dp=4, recipe={"zero": zero, "dp_replicate": 2}) for zero in (1, 2, 3)},
        **{f"split tp x dp zero {zero}": alone(tp=2, dp=2, recipe={"zero": zero}) for zero in (1, 2, 3)},
    },
    8: {
        "tp x zb_h1 x dp zero 0": case("zb_h1", tp=2, dp=2),
        "tp x zb_v x dp zero 1": case("zb_v", tp=2, dp=2, recipe={"zero": 1}),
        "tp x dualpipe x dp zero 2": case("dualpipe", tp=2, dp=2, recipe={"zero": 2}),
        "tp x dualpipe_v x dp zero 3": case("dualpipe_v", tp=2, dp=2, recipe={"zero": 3}),
        **{
            f"tp x {name} x dp zero 3 tied, dp inside pp, full recompute": case(
                name, tp=2, dp=2, order="tp-cp-dp-pp", model=TIED, recipe={"zero": 3, "recompute": "full"}
            )
            for name in SPLIT
        },
        **{
            f"{name} x hsdp zero {zero}": case(name, dp=4, recipe={"zero": zero, "dp_replicate": 2})
            for name, zero in (("dualpipe", 1), ("zb_v", 2), ("zb_h1", 3))
        },
        "dualpipe pp 4 x dp zero 2 tied": case("dualpipe", pp=4, dp=2, recipe={"zero": 2}, model=TIED),
    },
}


def without_some_weight_gradients(trainer: Trainer) -> None:
    """Chunk 1 leaves out those of its first microbatch."""
    plain = trainer.pipeline._weight_gradient

    def but_for_one(act: Any, state: Any) -> None:
        if (act.microbatch, act.chunk) == (0, 1):
            state.weight_gradients[0, 1] = WeightGradients()
        plain(act, state)

    trainer.pipeline._weight_gradient = but_for_one  # type: ignore[method-assign]


def without_the_sum_over_twins(trainer: Trainer) -> None:
    trainer.mesh.groups["twins"] = dist.new_group([trainer.mesh.rank], use_local_synchronization=True)  # type: ignore[assignment]


def with_twins_in_the_norm_twice(trainer: Trainer) -> None:
    plain = trainer.data_parallel.copies
    trainer.data_parallel.copies = lambda parameter: plain(parameter) / 2  # type: ignore[method-assign, assignment, return-value]


CONTROLS: dict[str, tuple[dict[str, Any], Callable[[Trainer], None]]] = {
    "zb_v without some weight gradients of a chunk": (case("zb_v"), without_some_weight_gradients),
    "dualpipe without the sum over twins": (case("dualpipe"), without_the_sum_over_twins),
    "dualpipe whose twins both count in the norm": (case("dualpipe"), with_twins_in_the_norm_twice),
}
"""Of two ranks."""
