"""What telemetry costs a step: with it over without it, step about in the same processes.

With it the clock charges every cause, FSDP2's waits are charged, and a line is written after each step; without it
the clock's `of` does nothing, waits are plain, and nothing is written. Steps of both kinds alternate (with,
without, without, with, ...), so that whatever slows the machine slows both; ranks meet before each step. The mark
is 1.01.

Where ranks share cores with other work, steps differ by more than the mark; so the mark is held against the ratio
of the process's own CPU seconds, beside which that of the wall clock stands. The bound says what the cost can be:
how often a step changes its cause, times what that costs in a loop, plus the line's write, over the step.

    python benchmarks/telemetry.py [--ranks 1] [--layout tp|dp|pp] [--steps 40] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright.cli.catalogue import load_cluster, load_model
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.instrument import waits_charged
from trainwright.train.mesh import joined, leave
from trainwright.train.parallelize import parallelize
from trainwright.train.telemetry import Telemetry

MARK = 1.01
WARM_UP = 4
SEQ_LEN, GLOBAL_BATCH = 128, 4
LOOP = 20_000


def run_of(layout: str, ranks: int) -> Run:
    degrees = {layout: ranks} if ranks > 1 else {}
    recipe = {
        "seq_len": SEQ_LEN,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": 1,
        "precision": "fp32",
        "zero": 3 if layout == "dp" and ranks > 1 else 0,
    }
    model, cluster = load_model("llama-local-6m"), load_cluster("local-cpu")
    values = {"layout": degrees, "recipe": recipe, "model": model.plain(), "cluster": cluster.plain()}
    return Run.parse(values | {"data": {"vocab_size": 4096}}).check()


def measure(run: Run, steps: int, directory: Path) -> dict[str, float] | None:
    """Figures of the first rank; nothing elsewhere."""
    torch.manual_seed(0)
    with joined(run.layout, 1) as mesh:
        clock = Clock()
        trainer = parallelize(run, mesh, clock)
        per_rank = GLOBAL_BATCH // run.layout.dp
        tokens = torch.randint(4096, (per_rank, SEQ_LEN + 1))
        inputs, targets = tokens[:, :-1].contiguous().split(1), tokens[:, 1:].contiguous().split(1)
        batch = Batch(list(inputs), list(targets), GLOBAL_BATCH * SEQ_LEN)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        cpu_s: dict[bool, list[float]] = {True: [], False: []}
        changes = 0
        charged = clock.of

        def counted(cause: str):
            nonlocal changes
            changes += 1
            return charged(cause)

        with Telemetry(directory, mesh.rank, None) as telemetry:
            for number in range(WARM_UP + 2 * steps):
                is_on = number % 4 in (0, 3)
                clock.of = charged if is_on else lambda cause: nullcontext()
                if number == 0:
                    clock.of = counted
                if run.layout.world > 1:
                    dist.barrier()
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                with waits_charged(clock, mesh.device) if is_on else nullcontext():
                    clock.restart()
                    trainer.step(batch, 1e-4)
                    if is_on:
                        telemetry.ended(number + 1, clock.read())
                        telemetry.saved(number + 1, 0.0)
                if number >= WARM_UP:
                    seconds[is_on].append(time.perf_counter() - began_s)
                    cpu_s[is_on].append(time.process_time() - began_cpu_s)
            clock.of = charged
            began_s = time.perf_counter()
            for _ in range(LOOP):
                with clock.of("compute"):
                    pass
            change_s = (time.perf_counter() - began_s) / LOOP
            began_s = time.perf_counter()
            for number in range(100):
                telemetry.ended(10**6 + number, clock.read())
                telemetry.saved(10**6 + number, 0.0)
            line_s = (time.perf_counter() - began_s) / 100
        if mesh.rank:
            return None
        on_s, off_s = statistics.median(seconds[True]), statistics.median(seconds[False])
        bound = (changes * change_s + line_s) / off_s
        ratio = statistics.median(cpu_s[True]) / statistics.median(cpu_s[False])
        found = {"ratio": ratio, "wall_ratio": on_s / off_s, "bound": bound}
        return found | {"changes": changes, "step_s": off_s, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", choices=("tp", "dp", "pp"), default="tp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.ranks > 1 and not asked.work:
        os.execvp(
            sys.executable,
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(asked.ranks), __file__, *sys.argv[1:], "--work"),
            ],
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(run_of(asked.layout, asked.ranks), asked.steps, Path(directory))
    is_reached = True
    if found is not None:
        is_reached = found["ratio"] < MARK
        if asked.json:
            print(json.dumps(found | {"mark": MARK}))
        else:
            changes = f"{found['changes']:.0f} changes of cause a step"
            wall = f"wall clock {found['wall_ratio']:.4f}; step {found['step_s']:.4f} s"
            print(f"with telemetry over without it: CPU seconds {found['ratio']:.4f} (mark {MARK}), {wall}")
            print(f"bound by counting: {found['bound']:.5f} of the step ({changes})")
    if asked.work:
        sys.stdout.flush()
        leave(0 if is_reached else 1)
    sys.exit(0 if is_reached else 1)


if __name__ == "__main__":
    main()
