"""Layouts and recipes whose peak is predicted; `test_peak.py` holds fake tensors to it, and real processes.

Widths are such that weights, activations and logits each matter. In bf16 a rank has masters, whose gradients are
made in one format and leave in another; real processes train in fp32, which every CPU multiplies fast.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from example import example_run
from ranked import TIMEOUT, begun, ended

from trainwright.plan.memory_over_time import memory_over_time
from trainwright.spec.memory import RankMemory
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.instrument import live_storages, peak_bytes_of
from trainwright.train.mesh import build_mesh, leave
from trainwright.train.parallelize import parallelize
from trainwright.train.verify.subject import Subject, random_tokens

MOE, MLA = "experts", "latent attention"
"""In the place of parts of the model."""
CHUNKS: dict[str, Any] = {"pp": 2, "vpp": 2, "dp": 2, "global_batch": 16}

BLOCK = {"precision": "fp8-block", "emulate_precision": True}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "all recomputed": {"recompute": "full"},
    "norm, activation, attention recomputed": {
        "recompute": "selective",
        "recompute_ops": ["norm", "activation", "attention"],
    },
    "dp 4": {"dp": 4},
    "dp 4, zero 1": {"dp": 4, "zero": 1},
    "dp 4, zero 2": {"dp": 4, "zero": 2},
    "dp 4, zero 3": {"dp": 4, "zero": 3},
    "dp 4, zero 3, gathered in fp8": {"dp": 4, "zero": 3, "gather_fp8": True},
    "dp 4, zero 3, gathered in fp8 once": {"dp": 4, "zero": 3, "gather_fp8": True, "reshard_after_forward": False},
    "dp 4, zero 2, gathered in fp8": {"dp": 4, "zero": 2, "gather_fp8": True},
    "tp 4": {"tp": 4},
    "pp 4": {"pp": 4},
    "zb_h1": {"pp": 4, "schedule": "zb_h1"},
    "experts": {"mlp": MOE},
    "ep 2, zero 3, gathered in fp8": {"mlp": MOE, "dp": 4, "ep": 2, "zero": 3, "gather_fp8": True},
    "ep 4": {"mlp": MOE, "dp": 4, "ep": 4},
    "latent attention": {"attention": MLA},
}
OTHERS = ("fp8-delayed", "fp8-current", "fp8-rowwise", "mxfp8", "nvfp4")

CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "all recomputed": {"recompute": "full"},
    "norm, activation, attention recomputed": {
        "recompute": "selective",
        "recompute_ops": ["norm", "activation", "attention"],
    },
    "loss in chunks": {"loss_chunks": 4},
    "fused loss": {"loss_kernel": "fused"},
    "dp 4": {"dp": 4},
    "dp 4, one microbatch": {"dp": 4, "global_batch": 4},
    "dp 4, short": {"dp": 4, "short": 8},
    "dp 4, zero 1": {"dp": 4, "zero": 1},
    "dp 4, zero 2": {"dp": 4, "zero": 2},
    "dp 4, zero 3": {"dp": 4, "zero": 3},
    "dp 4, zero 3, gathered once": {"dp": 4, "zero": 3, "reshard_after_forward": False},
    "dp 4, zero 3, one microbatch": {"dp": 4, "zero": 3, "global_batch": 4},
    "dp 4, zero 1, tied": {"dp": 4, "zero": 1, "tied": True},
    "tp 4": {"tp": 4},
    "tp 4, whole sequences": {"tp": 4, "sequence_parallel": False},
    "tp 2, zero 1": {"tp": 2, "dp": 2, "zero": 1},
    "cp 2": {"cp": 2},
    "cp 2, ring": {"cp": 2, "cp_method": "ring"},
    "cp 2, heads": {"cp": 2, "cp_method": "all_to_all"},
    "pp 4": {"pp": 4},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "zb_h1": {"pp": 4, "schedule": "zb_h1"},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "zb_v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "dualpipe_v": {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"},
    "interleaved, zero 2": {
        **{"pp": 2, "vpp": 2, "dp": 2, "zero": 2},
        **{"schedule": "interleaved_1f1b", "global_batch": 16},
    },
    "pp 2, zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "breadth first, zero 2": {**CHUNKS, "zero": 2, "schedule": "breadth_first"},
    "breadth first, zero 3": {**CHUNKS, "zero": 3, "schedule": "breadth_first"},
    "interleaved, zero 3": {**CHUNKS, "zero": 3, "schedule": "interleaved_1f1b"},
    "interleaved, zero 3, gathered once": {
        **{**CHUNKS, "zero": 3, "schedule": "interleaved_1f1b"},
        "reshard_after_forward": False,
    },
    "zb_h1, zero 2": {"pp": 2, "dp": 2, "zero": 2, "schedule": "zb_h1", "global_batch": 16},
    "zb_v, zero 3": {**CHUNKS, "zero": 3, "schedule": "zb_v"},
    "dp 4, zero 3, short": {"dp": 4, "zero": 3, "short": 8},
    "dp 4, zero 3, gathered once, short": {"dp": 4, "zero": 3, "short": 8, "reshard_after_forward": False},
    "dp 4, zero 2, short": {"dp": 4, "zero": 2, "short": 8},
    "experts": {"mlp": MOE},
    "ep 4": {"mlp": MOE, "dp": 4, "ep": 4},
    "ep 2, zero 2": {"mlp": MOE, "dp": 4, "ep": 2, "zero": 2},
    "experts, zero 3": {"mlp": MOE, "dp": 4, "zero": 3},
    "ep 2, zero 3": {"mlp": MOE, "dp": 4, "ep": 2, "zero": 3},
    "ep 4, zero 3": {"mlp": MOE, "dp": 4, "ep": 4, "zero": 3},
    "ep 4, zero 3, short": {"mlp": MOE, "dp": 4, "ep": 4, "zero": 3, "short": 8},
    "ep 4, zero 1, short": {"mlp": MOE, "dp": 4, "ep": 4, "zero": 1, "short": 8},
    "latent attention": {"attention": MLA},
    "more words to come": {"dp": 4, "zero": 2, "mtp_depth": 1},
    **{f"fp8-block, {name}": {**BLOCK, **fields} for name, fields in IN_BLOCKS.items()},
    **{precision: {"precision": precision, "emulate_precision": True} for precision in OTHERS},
    "tp 4, beside matmuls": {"tp": 4, "overlap": {"tp": True}},
    "ep 4, zero 3, few bits": {"mlp": MOE, "dp": 4, "ep": 4, "zero": 3, **BLOCK},
    "ep 4, zero 3, few bits gathered": {"mlp": MOE, "dp": 4, "ep": 4, "zero": 3, **BLOCK, "gather_fp8": True},
}


def run_of(name: str, precision: str, heads: int) -> Run:
    """heads: of 64 wide; all widths and the sequence's length go with them."""
    recipe = {"precision": precision, "seq_len": 64 * heads, "micro_batch": 1, "global_batch": 8, **CASES[name]}
    width, short = 64 * heads, recipe.pop("short", 1)
    recipe["seq_len"] //= short
    attention: dict[str, Any] = {"kind": "gqa", "num_heads": heads, "num_kv_heads": heads // 2, "d_head": 64}
    if recipe.pop("attention", None) == MLA:
        ranks = {"kv_lora_rank": width // 4, "q_lora_rank": width // 2}
        attention = {"kind": "mla", "num_heads": heads, **ranks, "d_nope": 64, "d_rope": 32, "d_value": 64}
    mlp: dict[str, Any] = {"kind": "dense", "d_ff": 4 * width}
    if recipe.pop("mlp", None) == MOE:
        mlp = {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": width, "d_ff_shared": width}
    model = {
        "d_model": width,
        "vocab_size": 16 * width,
        "tied_embeddings": recipe.pop("tied", False),
        "mtp_depth": recipe.pop("mtp_depth", 0),
        "layer_groups": [{"repeat": 8, "pattern": [{"attention": attention, "mlp": mlp}]}],
    }
    layout = {axis: recipe.pop(axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep") if axis in recipe}
    return example_run(model=model, recipe=recipe, **layout).check()


def predicted_bytes(rank: RankMemory) -> float:
    """At the peak, without what the software has beside its tensors."""
    framework = rank.bytes["framework"]
    return max(total - own for total, own in zip(rank.total_bytes, framework, strict=True))


def seen_and_predicted(run: Run, rank: int) -> tuple[float, float]:
    """Of this rank, in the second step; without what the cases before have left."""
    gc.collect()
    left = sum(each.nbytes() for each in live_storages())
    mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, TIMEOUT)
    trainer = parallelize(run, mesh, Clock())
    subject = Subject(trainer, random_tokens(run, 2), mesh.coordinate.dp)
    trainer.step(subject.batch(0), 1e-3)
    gc.collect()
    seen = peak_bytes_of(lambda: trainer.step(subject.batch(1), 1e-3), torch.device("cpu"))
    return float(seen - left), predicted_bytes(memory_over_time(run).ranks[mesh.coordinate.pp])


def main(world: int, every: int, output: Path) -> None:
    rank, results = begun(), {}
    for name in [*CASES] if every == 1 else [*CASES][2::every]:
        run = run_of(name, "fp32", 4)
        if run.layout.world != world:
            continue
        try:
            mine = seen_and_predicted(run, rank)
        except Exception as error:
            print(f"case {name!r} failed on rank {rank}: {error}", file=sys.stderr)
            leave(1)
            raise
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        results[name] = everyone
        gc.collect()
    ended(output, results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
