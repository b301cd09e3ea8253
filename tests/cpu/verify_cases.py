"""Runs that `verify` finds equal, and faults that it must find, by world size; and the worker that runs them all.

One launch per world size runs all its cases, each with a mesh of its own over one process group.
"""

import gc
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from example import example_run
from parity_moe import case
from parity_together import DEEPSEEK_V3

from trainwright.spec.miniature import miniature
from trainwright.train.mesh import build_mesh, leave
from trainwright.train.verify.verify import verify

TIED = {"tied_embeddings": True}
INTERLEAVED = {"schedule": "interleaved_1f1b"}
BATCH = {"global_batch": 16}

CLEAN: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}, "one rank, a window and a tie": {"attention": {"sliding_window": 5}, "model": TIED}},
    4: {
        "tp x pp tied": {"tp": 2, "pp": 2, "model": TIED},
        "dp x pp interleaved zero 2": {"dp": 2, "pp": 2, "vpp": 2, "recipe": {"zero": 2, **INTERLEAVED}},
        "tp beside matmuls x dp zero 3 recomputed": {
            "tp": 2,
            "dp": 2,
            "recipe": {"zero": 3, "recompute": "full", "overlap": {"tp": True}},
        },
        "cp ring from 8 ranks, documents": {
            "cp": 4,
            "tp": 2,
            "data": {"document_mask": True},
            "recipe": {"cp_method": "ring", "zero": 1, "global_batch": 8},
        },
        "deepseek-v3": {
            **DEEPSEEK_V3,
            "pp": 2,
            "vpp": 2,
            "dp": 4,
            "ep": 4,
            "recipe": {"schedule": "dualpipe", "zero": 1, "global_batch": 32},
        },
        "dropout, muon, z-loss": {
            "tp": 2,
            "dp": 2,
            "recipe": {
                "dropout": 0.1,
                "attention_kernel": "unfused",
                "z_loss": 1e-3,
                "loss_chunks": 2,
                "optimizer": {"name": "muon", "lr": 0.01},
            },
        },
        "gradients that are zero by nature": {
            "tp": 2,
            "dp": 2,
            "attention": {"qkv_bias": True},
            "mlp": {"kind": "moe", "num_experts": 4, "top_k": 1, "d_ff": 16, "router_bias": True},
            "model": {"rope": None, "learned_positions": 16},
            # By default AdamW makes 1e-12 of a step's size of rounding.
            "recipe": {"optimizer": {"lr": 0.01, "epsilon": 1e-6}},
        },
        "hsdp from 64 ranks": {"dp": 64, "recipe": {"zero": 3, "dp_replicate": 8, "global_batch": 64}},
    },
}

FAULTY: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "microbatch-scale": {},
        "last-microbatch": {},
        "rotary": {},
        "rotary, windows with a theta of their own": {
            "attention": {"sliding_window": 5},
            "model": {"rope": {"theta": 10000.0, "local_theta": 500.0}},
        },
    },
    4: {
        "dp-reduction": {"dp": 2, "tp": 2},
        "dp-reduction, without overlap": {"dp": 2, "pp": 2, "recipe": {"overlap": {"dp": False}}},
        "dp-reduction, zero 1": {"dp": 2, "pp": 2, "recipe": {"zero": 1}},
        "dp-reduction, zero 3": {"dp": 2, "tp": 2, "recipe": {"zero": 3}},
        "cp-reduction": {"cp": 2, "dp": 2},
        "expert-reduction": case(dp=4, ep=2),
        "zero-mean": {"dp": 2, "tp": 2, "recipe": {"zero": 1}},
        "zero-mean, hsdp": {"dp": 4, "recipe": {"zero": 2, "dp_replicate": 2}},
        "microbatch-scale": {"pp": 2, "tp": 2},
        "last-microbatch": {"pp": 2, "dp": 2},
        "norm-tp": {"tp": 2, "dp": 2},
        "norm-pp": {"pp": 2, "dp": 2},
        "norm-dp": {"dp": 2, "tp": 2, "recipe": {"zero": 3}},
        "tied": {"pp": 2, "tp": 2, "model": TIED},
        "sequence-norms": {"tp": 2, "pp": 2},
        "sequence-norms, zero 3": {"tp": 2, "dp": 2, "recipe": {"zero": 3, "recompute": "full"}},
        "data-order": {"dp": 2, "pp": 2},
        "initial-weights": {"tp": 2, "dp": 2},
        "initial-weights, zero 3": {"dp": 4, "recipe": {"zero": 3}},
        "rotary": {"tp": 2, "pp": 2},
        "rotary, positions shared out": {"cp": 2, "tp": 2, "recipe": {"cp_method": "ring"}},
    },
}
"""By the fault's name and, after a comma, what is special."""


def main(world: int, output: Path) -> None:
    torch.set_num_threads(1)
    rank = 0
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank = dist.get_rank()
    results: dict[str, Any] = {}
    clean = {f"clean: {name}": (fields, "") for name, fields in CLEAN[world].items()}
    faulty = {name: (fields, name.partition(",")[0]) for name, fields in FAULTY[world].items()}
    for name, (fields, fault) in {**clean, **faulty}.items():
        run = miniature(example_run(**fields), world).run
        assert run.layout.world == world, name
        mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, timedelta(seconds=60))
        try:
            results[name] = verify(run, mesh, 2, fault).plain()
        except Exception:
            # The others may wait for this rank now: report and end the launch.
            print(f"case {name!r} failed on rank {rank}\n{traceback.format_exc()}", file=sys.stderr)
            leave(1)
        gc.collect()
    if rank == 0:
        output.write_text(json.dumps(results))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
