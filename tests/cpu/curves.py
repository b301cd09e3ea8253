"""Steps of a small mixture of experts on the standard library's sources, under layouts that use every axis:
`test_curves.py` starts this on one rank and on four, and compares what it writes, the losses of each layout.

    curves.py WORLD OUTPUT.json SHARDS STEPS
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example import example_run
from parity_moe import DEEPSEEK, case

from trainwright.train.clock import Clock
from trainwright.train.data import PackedDataset
from trainwright.train.loop import batch_of
from trainwright.train.mesh import build_mesh, leave
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import parallelize
from trainwright.train.shards import open_shards

TIMEOUT = timedelta(seconds=120)

LAYOUTS: dict[int, dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    1: {"one rank": ({}, {})},
    4: {
        "tp x dp, ep of both": ({"tp": 2, "dp": 2, "ep": 4}, {"zero": 1, "recompute": "full"}),
        "cp x dp, ep, ring": ({"cp": 2, "dp": 2, "ep": 2}, {"zero": 3, "cp_method": "ring"}),
        "pp x dp, interleaved": ({"pp": 2, "vpp": 2, "dp": 2, "ep": 2}, {"schedule": "interleaved_1f1b"}),
        "pp x cp, zb_v, all_to_all": (
            {"pp": 2, "vpp": 2, "cp": 2},
            {"schedule": "zb_v", "cp_method": "all_to_all"},
        ),
        "tp x pp, dualpipe_v, etp": ({"tp": 2, "pp": 2, "vpp": 2, "etp": 2}, {"schedule": "dualpipe_v"}),
        "dp replicated and sharded": ({"dp": 4, "ep": 2}, {"zero": 2, "dp_replicate": 2}),
    },
}


def main(world: int, output: Path, shards: Path, steps: int) -> None:
    torch.set_num_threads(1)
    rank = 0
    if world > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        rank = dist.get_rank()
    losses = {
        name: curve(degrees, recipe, rank, shards, steps) for name, (degrees, recipe) in LAYOUTS[world].items()
    }
    if rank == 0:
        output.write_text(json.dumps(losses))
    leave(0)


def curve(degrees: dict[str, int], recipe: dict[str, Any], rank: int, shards: Path, steps: int) -> list[float]:
    """The loss of each step."""
    optimizer = {"lr": 0.003, "warmup_steps": 10, "schedule": "cosine"}
    common = {"global_batch": 4, "balance_rate": 0.01, "optimizer": optimizer}
    run = example_run(**case(DEEPSEEK, {**common, **recipe}), **degrees)
    mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, TIMEOUT)
    trainer = parallelize(run, mesh, Clock())
    dataset = PackedDataset(open_shards(shards), run.recipe.seq_len, run.recipe.seed, None)
    return [
        trainer.step(
            batch_of(run, dataset, step, mesh.coordinate.dp), learning_rate(run.recipe.optimizer, step, steps)
        ).loss
        for step in range(steps)
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
