"""Cases of context parallelism and of masked documents for `parity_cases.py`, by world size."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainwright.train.parallelize import Trainer

METHODS = ("all_gather", "ring", "all_to_all")
MQA = {"num_kv_heads": 1}
WINDOW = {"sliding_window": 5}
"""Longer than a chunk of two ranks or four: a chunk sees all of itself, and a part of others."""
NARROW = {"sliding_window": 3}
"""Shorter than a chunk of two ranks."""
TIED = {"tied_embeddings": True}
INTERLEAVED = {"schedule": "interleaved_1f1b"}
DOCUMENTS = {"data": {"document_mask": True}}
DP_INSIDE_PP = {"order": "tp-cp-dp-pp"}


def by_method(
    name: str, *, recipe: dict[str, Any] | None = None, methods: tuple[str, ...] = METHODS, **fields: Any
) -> dict[str, dict[str, Any]]:
    """The case with each way to see the others' positions."""
    return {
        f"{name} {method}": {**fields, "recipe": {"cp_method": method, **(recipe or {})}} for method in methods
    }


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "documents": DOCUMENTS,
        "documents, micro-batch of 4, recompute": {
            **DOCUMENTS,
            "recipe": {"micro_batch": 4, "recompute": "selective"},
        },
        "documents, sliding window": {**DOCUMENTS, "attention": WINDOW},
    },
    2: {
        "tp documents": {"tp": 2, **DOCUMENTS},
        "pp documents": {"pp": 2, **DOCUMENTS, "recipe": {"recompute": "full"}},
        "dp documents": {"dp": 2, **DOCUMENTS, "recipe": {"zero": 3}},
        **by_method("cp documents", cp=2, **DOCUMENTS, recipe={"micro_batch": 4}),
        **by_method("cp documents, narrow sliding window", cp=2, **DOCUMENTS, attention=NARROW),
        **by_method("cp", cp=2),
        **by_method("cp sliding window", cp=2, attention=WINDOW),
        **by_method("cp narrow sliding window", cp=2, attention=NARROW),
        **by_method("cp mqa", cp=2, attention=MQA),
        **by_method("cp three key heads", cp=2, attention={"num_heads": 6, "num_kv_heads": 3}),
        **by_method("cp tied", cp=2, model=TIED),
        **by_method(
            "cp query and key norm, query scale", cp=2, attention={"qk_norm": "per_head", "query_scale": 0.2}
        ),
        **by_method("cp without rotary", cp=2, model={"rope": None}),
        **by_method("cp ignored targets, micro-batch of 4", cp=2, recipe={"micro_batch": 4}, ignored=True),
        **by_method("cp selective recompute", cp=2, recipe={"recompute": "selective"}),
        **by_method("cp full recompute", cp=2, recipe={"recompute": "full"}),
        **by_method(
            "cp selective recompute, sliding window", cp=2, recipe={"recompute": "selective"}, attention=WINDOW
        ),
        **{
            name: case
            for zero in (1, 2, 3)
            for name, case in by_method(f"cp zero {zero}", cp=2, recipe={"zero": zero}).items()
        },
    },
    4: {
        **by_method("cp documents", cp=4, **DOCUMENTS),
        **by_method("tp x cp documents", tp=2, cp=2, **DOCUMENTS, recipe={"zero": 1, "recompute": "full"}),
        **by_method("cp x pp documents", cp=2, pp=2, vpp=2, **DOCUMENTS, recipe=INTERLEAVED, ignored=True),
        **by_method("cp", cp=4),
        **by_method("cp sliding window", cp=4, attention=WINDOW),
        **by_method("cp mqa", cp=4, attention=MQA),
        **by_method("tp x cp", tp=2, cp=2),
        **by_method("tp x cp mqa", tp=2, cp=2, attention=MQA),
        **by_method(
            "tp x cp sliding window, biases", tp=2, cp=2, attention={**WINDOW, "qkv_bias": True, "out_bias": True}
        ),
        **by_method("tp x cp without sequence parallelism", tp=2, cp=2, recipe={"sequence_parallel": False}),
        **by_method("tp x cp tied zero 3", tp=2, cp=2, recipe={"zero": 3}, model=TIED),
        **by_method("tp x cp full recompute", tp=2, cp=2, recipe={"recompute": "full"}),
        **by_method("tp x cp selective recompute", tp=2, cp=2, recipe={"recompute": "selective"}),
        **{
            name: case
            for zero in range(4)
            for name, case in by_method(f"cp x dp zero {zero}", cp=2, dp=2, recipe={"zero": zero}).items()
        },
        **by_method("cp x dp zero 0 ignored targets", cp=2, dp=2, ignored=True),
        **by_method("cp x dp zero 3 ignored targets", cp=2, dp=2, recipe={"zero": 3}, ignored=True),
        **by_method("cp x hsdp", cp=2, dp=2, recipe={"zero": 2, "dp_replicate": 2}),
        **by_method("cp x pp", cp=2, pp=2),
        **by_method("cp x pp, recompute", cp=2, pp=2, recipe={"recompute": "full"}),
        **by_method("cp x pp interleaved tied", cp=2, pp=2, vpp=2, recipe=INTERLEAVED, model=TIED),
        **by_method("cp x pp zero 1 tied", cp=2, pp=2, recipe={"zero": 1}, model=TIED),
        **by_method("cp x pp zero 3", cp=2, pp=2, recipe={"zero": 3}),
        **by_method(
            "cp x pp interleaved zero 2, dp inside pp",
            cp=2,
            pp=2,
            vpp=2,
            **DP_INSIDE_PP,
            recipe={"zero": 2, **INTERLEAVED},
        ),
    },
    8: {
        **by_method("tp x cp x pp", tp=2, cp=2, pp=2, recipe={"zero": 1}, model=TIED),
        **by_method("tp x cp x pp interleaved", tp=2, cp=2, pp=2, vpp=2, recipe=INTERLEAVED, attention=WINDOW),
        **by_method("tp x cp x dp, hsdp", tp=2, cp=2, dp=2, recipe={"zero": 3, "dp_replicate": 2}),
        **by_method("cp x pp x dp", cp=2, pp=2, dp=2, **DP_INSIDE_PP, recipe={"zero": 2}, ignored=True),
        **by_method("cp x hsdp of four", cp=2, dp=4, recipe={"zero": 1, "dp_replicate": 2}),
        **by_method("cp of four x pp", cp=4, pp=2, recipe={"zero": 3}, attention=MQA),
    },
}


def without_reduction(trainer: Trainer) -> None:
    trainer.data_parallel.reduce = lambda: None  # type: ignore[method-assign]


def without_documents(trainer: Trainer) -> None:
    plain = trainer.pipeline.run
    trainer.pipeline.run = lambda batch: plain(replace(batch, documents_BS=None))  # type: ignore[method-assign]


def without_offset_positions(trainer: Trainer) -> None:
    for piece in trainer.pieces:
        assert piece.rotary is not None
        piece.rotary.held = None


CONTROLS: dict[int, dict[str, tuple[dict[str, Any], Callable[[Trainer], None]]]] = {
    2: {
        "cp without its reduction": ({"cp": 2, "recipe": {"overlap": {"dp": False}}}, without_reduction),
        "cp without offset positions": ({"cp": 2}, without_offset_positions),
        "cp without documents": ({"cp": 2, **DOCUMENTS}, without_documents),
    },
}
"""A planted error each; the comparison must see it."""
