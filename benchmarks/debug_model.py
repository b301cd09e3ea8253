"""torchtitan's debug model on CPU, in one process and in two by each axis: tokens/s of this trainer, beside those
of torchtitan and picotron where they are given, launched in turn; and which share of the matmul rate is reached.

The model has 6.16 M parameters (width 256, 6 layers, 16 heads, MLP 768, 2,048 words); a step is 4 sequences of 512
tokens in fp32, one thread a process. All make the same steps: forward, backward, clipping (but picotron), AdamW.
torchtitan recomputes selectively, as its debug model comes.

    python benchmarks/debug_model.py [--torchtitan PYTHON] [--picotron CHECKOUT] [--rounds 3] [--steps 8] [--json]

PYTHON is of an environment with torchtitan 0.3.0, torch 2.13.0 and triton.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainwright.cli.catalogue import load_cluster
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.mesh import joined
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import parallelize

HERE = Path(__file__).parent
SEQ_LEN, GLOBAL_BATCH, VOCAB, WARM_UP = 512, 4, 2048, 3
TOKENS = SEQ_LEN * GLOBAL_BATCH
MATMUL_SIZE = 512

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "single": ({}, {"micro_batch": 4}),
    "dp 2": ({"dp": 2}, {"micro_batch": 2, "zero": 0}),
    "tp 2": ({"tp": 2}, {"micro_batch": 4, "sequence_parallel": False}),
    "pp 2": ({"pp": 2}, {"micro_batch": 1}),
    "cp 2": ({"cp": 2}, {"micro_batch": 4}),
}
"""Degrees and recipe of each column."""

TORCHTITAN = {"single": {}, "dp 2": {"data_parallel_replicate_degree": 2}, "tp 2": {"tensor_parallel_degree": 2}}
PICOTRON = {"single": {}, **{f"{axis} 2": {axis: 2} for axis in ("dp", "tp", "pp", "cp")}}
"""What they are told of each column."""


def the_run(name: str) -> Run:
    degrees, recipe = LAYOUTS[name]
    attention = {"kind": "gqa", "num_heads": 16, "num_kv_heads": 16, "d_head": 16}
    layer = {"attention": attention, "mlp": {"kind": "dense", "d_ff": 768}}
    return Run.parse(
        {
            "layout": degrees,
            "recipe": {
                "seq_len": SEQ_LEN,
                "global_batch": GLOBAL_BATCH,
                "precision": "fp32",
                "zero": 0,
                "overlap": {"dp": True},
                **recipe,
            },
            "model": {
                "name": "debug",
                "d_model": 256,
                "vocab_size": VOCAB,
                "tied_embeddings": False,
                "rope": {"theta": 500000.0},
                "layer_groups": [{"repeat": 6, "pattern": [layer]}],
            },
            "data": {"vocab_size": VOCAB},
            "cluster": load_cluster("h100-sxm"),
        }
    ).check()


def work(name: str, steps: int) -> None:
    """What each rank does: steps of this trainer; the first one prints their seconds."""
    torch.set_num_threads(1)
    run = the_run(name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    with joined(run.layout) as mesh:
        trainer = parallelize(run, mesh, Clock())
        per_rank = GLOBAL_BATCH // run.layout.dp
        mine = tokens[mesh.coordinate.dp * per_rank : (mesh.coordinate.dp + 1) * per_rank]
        inputs, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        micro = run.recipe.micro_batch
        batch = Batch(list(inputs.split(micro)), list(targets.split(micro)), TOKENS, None, 0)
        seconds = []
        for step in range(WARM_UP + steps):
            start_s = time.perf_counter()
            trainer.step(batch, learning_rate(run.recipe.optimizer, step, 100))
            mesh.barrier()
            seconds.append(time.perf_counter() - start_s)
        if mesh.rank == 0:
            print(json.dumps({"seconds": seconds[WARM_UP:], "matmul_flops_per_s": matmul_flops_per_s()}))


def matmul_flops_per_s() -> float:
    """The best rate of a square fp32 matmul of this process."""
    left, right = torch.randn(MATMUL_SIZE, MATMUL_SIZE), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    best_s = 1.0
    for _ in range(40):
        start_s = time.perf_counter()
        left @ right
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * MATMUL_SIZE**3 / best_s


def launched(python: str, ranks: int, *arguments: str) -> dict[str, Any]:
    """What rank 0 of a script printed last."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def measure(torchtitan: str | None, picotron: str | None, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Of each column tokens/s of all, the ratios, and the share of the matmul rate."""
    sizes = (str(steps), str(SEQ_LEN), str(GLOBAL_BATCH))
    rivals = HERE / "rivals"
    table = {}
    for name, (degrees, _recipe) in LAYOUTS.items():
        ranks = max(degrees.values(), default=1)
        commands = {
            "trainwright": (sys.executable, str(HERE / "debug_model.py"), "--work", name, "--steps", sizes[0])
        }
        if torchtitan and name in TORCHTITAN:
            script = str(rivals / "torchtitan_steps.py")
            commands["torchtitan"] = (torchtitan, script, json.dumps(TORCHTITAN[name]), *sizes)
        if picotron:
            script = str(rivals / "picotron_steps.py")
            commands["picotron"] = (sys.executable, script, picotron, json.dumps(PICOTRON[name]), *sizes)
        seconds: dict[str, list[float]] = {each: [] for each in commands}
        rates = []
        for number in range(rounds):
            for each, (python, *arguments) in sorted(commands.items(), reverse=number % 2 == 1):
                answer = launched(python, ranks, *arguments)
                seconds[each].append(statistics.median(answer["seconds"]))
                rates += [answer["matmul_flops_per_s"]] if each == "trainwright" else []
        medians = {each: statistics.median(all_s) for each, all_s in seconds.items()}
        flops = the_run(name).model.flops_per_token(SEQ_LEN) * TOKENS
        table[name] = {f"{each}_tokens_per_s": TOKENS / step_s for each, step_s in medians.items()}
        table[name]["share_of_matmul_rate"] = flops / medians["trainwright"] / ranks / statistics.median(rates)
        for each in set(commands) - {"trainwright"}:
            # Neighbouring launches see the same machine.
            pairs = zip(seconds[each], seconds["trainwright"], strict=True)
            table[name][f"ratio_to_{each}"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", help="the Python of an environment that has torchtitan")
    parser.add_argument("--picotron", help="a checkout of huggingface/picotron")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps)
        return
    table = measure(options.torchtitan, options.picotron, options.rounds, options.steps)
    if options.json:
        print(json.dumps(table))
        return
    for name, row in table.items():
        beside = "".join(
            f"; {each} {row[f'{each}_tokens_per_s']:,.0f}, {row[f'ratio_to_{each}']:.2f}x"
            for each in ("torchtitan", "picotron")
            if f"ratio_to_{each}" in row
        )
        share = f"{row['share_of_matmul_rate']:.0%} of the matmul rate"
        print(f"{name}: {row['trainwright_tokens_per_s']:,.0f} tokens/s, {share}{beside}")


if __name__ == "__main__":
    main()
