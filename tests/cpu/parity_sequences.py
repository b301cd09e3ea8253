"""Parity cases of what reads other positions of a sequence beside attention, where cp shares them out: capacities
of experts, the loss for their balance, later tokens. And of dropout in the layers that predict those."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from parity_context import METHODS
from parity_models import MTP, MTP_OF_THREE, on
from parity_moe import BIASES, DEEPSEEK, DROPPING, LOSS, QWEN, case
from parity_together import DEEPSEEK_V3, RECOMPUTED, SPLIT

from trainwright.train.data import Batch
from trainwright.train.model.experts import mixtures, whole_sequence
from trainwright.train.parallel.choices import Choices
from trainwright.train.parallelize import Trainer

BOTH = {**DROPPING, **LOSS}
TIGHT = {"capacity_factor": 0.5, **LOSS}
DROPOUT = {"dropout": 0.3, "attention_kernel": "unfused"}
UNFUSED = {"attention_kernel": "unfused"}
LATER_EXPERTS = on(DEEPSEEK_V3, recipe=TIGHT)
"""A later token whose module has experts with a capacity and a loss."""

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "mtp, dropout": on(MTP, recipe=DROPOUT),
        "mtp of three, dropout, micro-batch of 4": on(MTP_OF_THREE, recipe={**DROPOUT, "micro_batch": 4}),
        "mtp, unfused": on(MTP_OF_THREE, recipe=UNFUSED),
        "deepseek-v3, capacity, loss, dropout": on(LATER_EXPERTS, recipe=DROPOUT),
    },
    2: {
        **{
            f"cp {method} capacity, loss": case(DEEPSEEK, {**BOTH, "cp_method": method}, cp=2)
            for method in METHODS
        },
        **{
            f"cp {method} tight capacity, ep, biases": case(BIASES, {**TIGHT, "cp_method": method}, cp=2, ep=2)
            for method in METHODS
        },
        **{f"cp {method} loss, qwen": case(QWEN, {**LOSS, "cp_method": method}, cp=2) for method in METHODS},
        **{f"cp {method} mtp": on(MTP, cp=2, recipe={"cp_method": method}) for method in METHODS},
        **{
            f"cp {method} mtp of three, ignored targets": on(
                MTP_OF_THREE, cp=2, recipe={"cp_method": method, "micro_batch": 2}, ignored=True
            )
            for method in METHODS
        },
        **{
            f"cp {method} mtp of three, documents, recompute": on(
                MTP_OF_THREE, cp=2, recipe={"cp_method": method, **RECOMPUTED}, data={"document_mask": True}
            )
            for method in METHODS
        },
        **{
            f"cp {method} deepseek-v3, capacity, loss": on(LATER_EXPERTS, cp=2, recipe={"cp_method": method})
            for method in METHODS
        },
        "cp ring capacity, loss, full recompute": case(
            DEEPSEEK, {**BOTH, "cp_method": "ring", "recompute": "full"}, cp=2
        ),
        "cp all_gather capacity, loss, zero 3": case(DEEPSEEK, {**BOTH, "zero": 3}, cp=2, ep=2),
        "cp mtp, loss in chunks": on(MTP_OF_THREE, cp=2, recipe={"loss_chunks": 3, "loss_kernel": "fused"}),
        "cp mtp, dropout": on(MTP_OF_THREE, cp=2, recipe={**DROPOUT, "cp_method": "all_to_all"}),
        "tp mtp, dropout": on(MTP_OF_THREE, tp=2, recipe=DROPOUT),
        "tp mtp, dropout without sequence parallelism": on(
            MTP, tp=2, recipe={**DROPOUT, "sequence_parallel": False}
        ),
        "pp mtp, dropout, full recompute": on(MTP_OF_THREE, pp=2, recipe={**DROPOUT, "recompute": "full"}),
        "dp mtp, dropout, zero 3": on(MTP, dp=2, recipe={**DROPOUT, "zero": 3}),
        "zb_v mtp, dropout": on(MTP, **SPLIT["zb_v"], recipe={**DROPOUT, "schedule": "zb_v"}),
        "pp mtp, unfused": on(MTP, pp=2, recipe=UNFUSED),
    },
    4: {
        **{
            f"tp x cp {method} capacity, loss": case(DEEPSEEK, {**BOTH, "cp_method": method}, tp=2, cp=2)
            for method in METHODS
        },
        **{
            f"cp of four {method} tight capacity, loss, ep": case(
                DEEPSEEK, {**TIGHT, "cp_method": method}, cp=4, ep=2
            )
            for method in METHODS
        },
        **{f"cp of four {method} mtp": on(MTP_OF_THREE, cp=4, recipe={"cp_method": method}) for method in METHODS},
        **{
            f"tp x cp {method} deepseek-v3, capacity, loss": on(
                LATER_EXPERTS, tp=2, cp=2, ep=2, recipe={"cp_method": method, "zero": 1}
            )
            for method in METHODS
        },
        **{
            f"cp {method} x {schedule} mtp, capacity, loss": on(
                LATER_EXPERTS, cp=2, **layout, recipe={"cp_method": method, "schedule": schedule}
            )
            for (schedule, layout), method in zip(SPLIT.items(), (*METHODS, "ring"), strict=True)
        },
        "cp x pp mtp, tied across stages": on(MTP_OF_THREE, cp=2, pp=2, recipe={"cp_method": "ring", "zero": 2}),
        "cp x dp mtp, zero 3": on(MTP_OF_THREE, cp=2, dp=2, recipe={"cp_method": "ring", "zero": 3}),
        "tp x cp mtp, dropout": on(MTP_OF_THREE, tp=2, cp=2, recipe={**DROPOUT, "cp_method": "all_to_all"}),
    },
    8: {
        "tp x cp ring x dp deepseek-v3, capacity, loss": on(
            LATER_EXPERTS, tp=2, cp=2, dp=2, ep=4, recipe={"cp_method": "ring", "zero": 1}
        ),
        "tp x cp of four all_gather capacity, loss": case(DEEPSEEK, TIGHT, tp=2, cp=4, ep=4),
        "tp x cp all_to_all x pp mtp, dropout": on(
            MTP_OF_THREE, tp=2, cp=2, pp=2, recipe={**DROPOUT, "cp_method": "all_to_all"}
        ),
    },
}


def choices_of_the_rank_alone(trainer: Trainer) -> None:
    for piece in trainer.pieces:
        for _, mixture in mixtures(piece):
            mixture.cuts, mixture.over_sequence = (), whole_sequence


def runs_in_the_order_of_ranks(trainer: Trainer) -> None:
    """Of a sequence the same is counted, but not in its order."""
    for piece in trainer.pieces:
        for _, mixture in mixtures(piece):
            choices = mixture.over_sequence
            assert isinstance(choices, Choices)
            rank = trainer.mesh.coordinate.cp
            mixture.over_sequence = replace(choices, order=[0, 1, 2, 3], places=[2 * rank, 2 * rank + 1])


def later_tokens_of_the_rank_alone(trainer: Trainer) -> None:
    plain = trainer.pipeline.run

    def run(batch: Batch) -> torch.Tensor:
        inputs, targets = ([*map(of, range(len(batch.inputs_BS)))] for of in (batch.inputs, batch.targets))
        return plain(replace(batch, inputs_BS=inputs, targets_BS=targets, positions=None))

    trainer.pipeline.run = run  # type: ignore[method-assign]


CONTROLS: dict[int, dict[str, tuple[dict[str, Any], Callable[[Trainer], None]]]] = {
    2: {
        "cp loss for balance of a rank's positions": (case(DEEPSEEK, LOSS, cp=2), choices_of_the_rank_alone),
        "cp capacity in the order of ranks": (case(DEEPSEEK, DROPPING, cp=2), runs_in_the_order_of_ranks),
        "cp later tokens of a rank's positions": (on(MTP, cp=2), later_tokens_of_the_rank_alone),
    },
}
"""A planted error each; the comparison must see it."""
