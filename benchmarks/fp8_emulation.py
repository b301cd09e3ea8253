"""What emulating low precision costs on a CPU: a step of each recipe over one in bf16, dense and with experts.

Trainers of all precisions stand in one process and step in turn on the same batches, first in one order, then in
the other, so that whatever slows the machine slows all. The ratio is that of the medians. The mark, 3, is
fp8-block's, of both models.

    python benchmarks/fp8_emulation.py [--steps 12] [--model dense|moe] [--json]
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from trainwright.cli.catalogue import load_cluster
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.mesh import Mesh
from trainwright.train.parallelize import parallelize

MARK = 3.0
MARKED = "fp8-block"
PLAIN = "bf16"
WARM_UP = 2
D_MODEL, LAYERS, VOCAB, SEQ_LEN, SEQUENCES = 512, 2, 4096, 256, 4
MLPS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense", "d_ff": 1536},
    "moe": {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": 512, "d_ff_shared": 512},
}


def run_of(model: str, precision: str) -> Run:
    attention = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "d_head": 64}
    return Run.parse(
        {
            "layout": {},
            "recipe": {
                "seq_len": SEQ_LEN,
                "global_batch": SEQUENCES,
                "micro_batch": SEQUENCES,
                "precision": precision,
                "emulate_precision": precision in LOW_PRECISION,
                "zero": 0,
            },
            "model": {
                "name": model,
                "d_model": D_MODEL,
                "vocab_size": VOCAB,
                "rope": {"theta": 10000.0},
                "layer_groups": [{"repeat": LAYERS, "pattern": [{"attention": attention, "mlp": MLPS[model]}]}],
            },
            "data": {"vocab_size": VOCAB},
            "cluster": load_cluster("local-cpu"),
        }
    ).check()


def measure(model: str, steps: int) -> dict[str, float]:
    """Median seconds of a step, by precision."""
    torch.set_num_threads(1)
    mesh_device = torch.device("cpu")
    trainers = {}
    for precision in (PLAIN, *LOW_PRECISION):
        run = run_of(model, precision)
        trainers[precision] = parallelize(run, Mesh(run.layout, 0, mesh_device), Clock())
    seconds: dict[str, list[float]] = {precision: [] for precision in trainers}
    generator = torch.Generator().manual_seed(0)
    for number in range(WARM_UP + steps):
        tokens = torch.randint(VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator)
        batch = Batch([tokens[:, :-1].contiguous()], [tokens[:, 1:].contiguous()], SEQUENCES * SEQ_LEN)
        for precision in list(trainers)[:: 1 if number % 2 else -1]:
            began_s = time.perf_counter()
            trainers[precision].step(batch, 1e-4)
            if number >= WARM_UP:
                seconds[precision].append(time.perf_counter() - began_s)
    return {precision: statistics.median(each) for precision, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=sorted(MLPS), nargs="+", default=sorted(MLPS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {model: measure(model, options.steps) for model in options.model}
    ratios = {
        model: {precision: each / medians[PLAIN] for precision, each in medians.items()}
        for model, medians in found.items()
    }
    if options.json:
        print(json.dumps({"mark": MARK, "step_s": found, "ratios": ratios}))
    else:
        for model, medians in found.items():
            for precision, step_s in medians.items():
                print(f"{model:<6} {precision:<12} {step_s * 1e3:8.1f} ms  {ratios[model][precision]:.2f}x")
    sys.exit(0 if all(each[MARKED] <= MARK for each in ratios.values()) else 1)


if __name__ == "__main__":
    main()
