"""Digests of replicas on several ranks: `test_replicas.py` starts this on four.

    replica_cases.py OUTPUT.json

Each layout takes some steps with digests compared after each; then one bit of one rank's state is flipped, and
what is found is written down.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

from checkpoint_cases import trainer_of
from example import example_run
from parity_moe import DEEPSEEK, case
from ranked import begun, ended

from trainwright.train.checkpoint.state import held_blocks
from trainwright.train.faults.plant import flip
from trainwright.train.faults.reasons import Corrupt
from trainwright.train.faults.replicas import Replicas
from trainwright.train.loop import batch_of
from trainwright.train.mesh import leave
from trainwright.train.verify.subject import random_tokens

RUNS = {
    "dp 4": example_run(dp=4),
    "dp 4 in bf16": example_run(dp=4, recipe={"precision": "bf16"}),
    "dp 4 by Muon with int8 moments": example_run(
        dp=4, recipe={"precision": "fp32", "optimizer": {"name": "muon", "moments": "int8"}}
    ),
    "tp 2, dp 2": example_run(tp=2, dp=2),
    "tp 2 without sequence parallelism, cp 2": example_run(tp=2, cp=2, recipe={"sequence_parallel": False}),
    "pp 2, dp 2, tied": example_run(pp=2, dp=2, model={"tied_embeddings": True}),
    "HSDP": example_run(dp=4, recipe={"zero": 3, "dp_replicate": 2}),
    "experts": example_run(**case(DEEPSEEK, {"balance_rate": 0.01}, tp=2, dp=2, ep=2)),
    "shards": example_run(dp=4, recipe={"zero": 3}),
}
STEPS = 3
ODD = 2
"""The rank whose bit flips."""


def seen_of(name: str, rank: int) -> list[dict[str, Any]]:
    run = RUNS[name]
    trainer, data = trainer_of(run, rank), random_tokens(run, STEPS)
    replicas, found = Replicas(trainer), []
    for step in range(STEPS):
        trainer.step(batch_of(run, data, step, trainer.mesh.coordinate.dp), 0.01)
        replicas.compare(step + 1)
    number = len(list(held_blocks(trainer)))
    for place in range(3, number, max(1, number // 4)):
        tensor = flip(trainer, place) if rank == ODD else ""
        try:
            replicas.compare(STEPS)
            found.append({"tensor": tensor, "found": False})
        except Corrupt as corrupt:
            found.append({"tensor": tensor, "found": True, "text": str(corrupt), "ranks": corrupt.ranks})
        if rank == ODD:
            flip(trainer, place)  # back again
        replicas.compare(STEPS)
    return found


def main(output: Path) -> None:
    rank = begun()
    results: dict[str, Any] = {}
    try:
        for name in RUNS:
            own = seen_of(name, rank)
            everyone = Replicas(trainer_of(RUNS["dp 4"], rank))._of_all(own)
            results[name] = [
                {**seen, "tensor": odd["tensor"]} for seen, odd in zip(own, everyone[ODD], strict=True)
            ]
    except BaseException:
        traceback.print_exc()
        leave(1)
    ended(output, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
