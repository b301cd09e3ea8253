"""What the ranks of an interleaved pipeline hold and send in a step, by ZeRO stage; run by `test_holding.py`.

A model of eight layers on two pipeline ranks of two chunks, each of which is two data-parallel ranks: every chunk
has two layers, and embedding or norm and head are a unit of their own at the ends. A rank's figures stand beside
the planner's bytes for it.
"""

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from example import example_batches, example_run, part_of
from ranked import TIMEOUT, begun, ended

from trainwright.plan.predict import predict
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.instrument import peak_bytes_of
from trainwright.train.mesh import build_mesh
from trainwright.train.parallel.local import bytes_of
from trainwright.train.parallelize import parallelize

CASES: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "zero 3 gathered once": {"zero": 3, "reshard_after_forward": False},
}


def interleaved(**recipe: Any) -> Run:
    layer = {
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": 32},
        "mlp": {"kind": "dense", "d_ff": 512},
    }
    return example_run(
        pp=2,
        vpp=2,
        dp=2,
        model={"d_model": 128, "vocab_size": 260, "layer_groups": [{"repeat": 8, "pattern": [layer]}]},
        recipe={
            "schedule": "interleaved_1f1b",
            "precision": "fp32",
            "seq_len": 64,
            "global_batch": 16,
            **recipe,
        },
    ).check()


class Sent(TorchDispatchMode):
    """Counts collectives and sends by name while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[str(func._opname)] += 1
        return func(*args, **(kwargs or {}))


def figures(run: Run, rank: int) -> dict[str, Any]:
    """This rank's bytes and collectives of a step that isn't the first."""
    mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, TIMEOUT)
    trainer = parallelize(run, mesh, Clock())
    batch = part_of(run, mesh.coordinate.dp, example_batches(run))
    with Sent() as sent:
        trainer.step(batch, 0.01)
    peak_bytes = peak_bytes_of(lambda: trainer.step(batch, 0.01), torch.device("cpu"))
    moments = [each for state in trainer.optimizer.state.values() for each in state.values() if each.ndim]
    predicted = predict(run).stages[mesh.coordinate.pp].ledger.bytes
    return {
        "held": {**trainer.data_parallel.held_bytes(), "optimizer": float(sum(map(bytes_of, moments)))},
        "peak": peak_bytes,
        "predicted": {str(cause): value for cause, value in predicted.items() if cause != "framework"},
        "sent": sent.counts,
    }


def main(output: Path) -> None:
    rank, results = begun(), {}
    for name, recipe in CASES.items():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, figures(interleaved(**recipe), rank))
        results[name] = everyone
        gc.collect()
    ended(output, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
