"""Steps of real processes, counted as the dry run counts; `test_exact.py` holds one against the other."""

import gc
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from example import example_run
from ranked import TIMEOUT, begun, ended

from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.dryrun.program import choose_evenly
from trainwright.train.dryrun.record import recorded
from trainwright.train.mesh import build_mesh, leave
from trainwright.train.parallelize import parallelize
from trainwright.train.verify.subject import Subject, random_tokens

SMALL = {"global_batch": 8, "micro_batch": 1}
MOE = {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": 16, "d_ff_shared": 32, "balance_bias": True}
MLA = {"kind": "mla", "kv_lora_rank": 16, "q_lora_rank": 16, "d_nope": 8, "d_rope": 8, "d_value": 8}

CASES: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "tp x zero 3": {"tp": 2, "dp": 2, "recipe": {**SMALL, "zero": 3, "precision": "bf16"}},
        "tp x pp, recomputed": {"tp": 2, "pp": 2, "recipe": {**SMALL, "recompute": "full"}},
        "zero bubble x zero 2": {
            "pp": 2,
            "dp": 2,
            "vpp": 2,
            "recipe": {**SMALL, "zero": 2, "schedule": "zb_v", "precision": "bf16"},
        },
        "ring": {"cp": 4, "recipe": {**SMALL, "cp_method": "ring"}},
        "experts": {"mlp": MOE, "attention": MLA, "tp": 2, "dp": 2, "ep": 2, "recipe": {**SMALL, "zero": 1}},
        "experts in fp32": {"mlp": MOE, "dp": 4, "ep": 4, "recipe": {**SMALL, "precision": "fp32"}},
    },
    8: {
        "tp x pp x dp, experts": {
            **{"mlp": MOE, "attention": MLA, "tp": 2, "pp": 2, "dp": 2, "ep": 4},
            "recipe": {
                **SMALL,
                "zero": 1,
                "precision": "bf16",
                "recompute": "selective",
                "recompute_ops": ["moe"],
            },
        },
        "tp x cp x pp, interleaved": {
            **{"tp": 2, "cp": 2, "pp": 2, "vpp": 2},
            "recipe": {**SMALL, "zero": 2, "schedule": "interleaved_1f1b"},
        },
    },
}


def run_of(world: int, name: str) -> Run:
    return example_run(**CASES[world][name]).check()


def main(world: int, output: Path) -> None:
    rank, cpu, results, made = begun(), torch.device("cpu"), {}, {}
    for name in CASES[world]:
        run = run_of(world, name)
        # DTensor takes the groups of the first mesh that looks alike, so all cases share theirs.
        mesh = build_mesh(run.layout, rank, cpu, run.recipe.dp_replicate, TIMEOUT, made)
        try:
            trainer = parallelize(run, mesh, Clock())
            choose_evenly(trainer)
            subject = Subject(trainer, random_tokens(run, 2), mesh.coordinate.dp)
            trainer.step(subject.batch(0), run.recipe.optimizer.lr)
            results[name] = recorded(trainer, subject.batch(1)).plain()
        except Exception:
            print(f"case {name!r} failed on rank {rank}\n{traceback.format_exc()}", file=sys.stderr)
            leave(1)
        gc.collect()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, results)
    ended(output, everyone)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
