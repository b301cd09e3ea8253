"""Steps whose collectives `test_trace.py` counts by hand, by world size; and the worker that records them."""

import gc
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from example import example_run
from ranked import TIMEOUT, begun, ended

from trainwright.train.mesh import build_mesh, leave
from trainwright.train.trace.trace import trace

SMALL = {"global_batch": 4, "micro_batch": 1}


def experts(**fields: Any) -> dict[str, Any]:
    """All layers have experts, and shared ones beside them."""
    return {"mlp": {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": 16, "d_ff_shared": 32}, **fields}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp": {"tp": 2, "recipe": SMALL},
        "tp recomputed": {"tp": 2, "recipe": {**SMALL, "recompute": "full"}},
        "tp beside matmuls": {"tp": 2, "recipe": {**SMALL, "overlap": {"tp": True}}},
        "tp without sequence parallelism": {"tp": 2, "recipe": {**SMALL, "sequence_parallel": False}},
        "dp": {"dp": 2, "recipe": SMALL},
        "dp bf16": {"dp": 2, "recipe": {**SMALL, "precision": "bf16"}},
        "dp without overlap": {"dp": 2, "recipe": {**SMALL, "overlap": {"dp": False}}},
        "zero 1": {"dp": 2, "recipe": {**SMALL, "zero": 1}},
        "zero 3": {"dp": 2, "recipe": {**SMALL, "zero": 3}},
        "pp tied": {"pp": 2, "model": {"tied_embeddings": True}, "recipe": SMALL},
        "ep": experts(dp=2, ep=2, recipe=SMALL),
        "ep beside shared experts": experts(dp=2, ep=2, recipe={**SMALL, "overlap": {"ep": True}}),
        "ep of tp beside shared experts": experts(tp=2, ep=2, recipe={**SMALL, "overlap": {"ep": True}}),
        "pp interleaved": {"pp": 2, "vpp": 2, "recipe": {**SMALL, "schedule": "interleaved_1f1b"}},
    },
    4: {
        "tp x zero 3": {"tp": 2, "dp": 2, "recipe": {**SMALL, "zero": 3}},
        "hsdp": {"dp": 4, "recipe": {**SMALL, "zero": 2, "dp_replicate": 2}},
        "tp x pp": {"tp": 2, "pp": 2, "recipe": SMALL},
    },
}


def main(world: int, output: Path, only: list[str]) -> None:
    rank, results = begun(), {}
    for name, fields in CASES[world].items():
        if only and name not in only:
            continue
        run = example_run(**fields).check()
        mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, TIMEOUT)
        try:
            results[name] = trace(run, mesh).plain()
        except Exception:
            print(f"case {name!r} failed on rank {rank}\n{traceback.format_exc()}", file=sys.stderr)
            leave(1)
        gc.collect()
    ended(output, results)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
