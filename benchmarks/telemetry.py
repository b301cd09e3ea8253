"""What telemetry costs a step: with it over without it, step about in the same processes.

With it the clock charges every cause and tells it to the rank's heartbeat, as in a supervised run, FSDP2's waits
are charged, and a line is written after each step; without it the clock's `of` does nothing, waits are plain, and
nothing is written. Steps come in fours (with, without, without, with), so that whatever slows the machine slows
both kinds; ranks meet before each step. The mark is 1.01.

Where ranks share cores with other work, single steps differ by far more than the mark. So the mark is held
against the process's own CPU seconds: each four gives one ratio, of which the median is told with its standard
error (by resampling), and beside it the same of steps without against steps without: what the machine can tell at
all. The bound says what the cost can be: how often a step changes its cause, times what that costs in a loop, plus
the line's write, over the step.

    python benchmarks/telemetry.py [--ranks 1] [--layout tp|dp|pp] [--steps 150] [--json]
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright.cli.catalogue import load_cluster, load_model
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.faults.beats import Pulse
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
        wall_s: list[float] = []
        cpu_s: list[float] = []
        """Of each step after the warm-up."""
        changes = 0
        charged, pulse = clock.of, Pulse(directory, mesh.rank)
        silent = clock.on_change

        def counted(cause: str):
            nonlocal changes
            changes += 1
            return charged(cause)

        with Telemetry(directory, mesh.rank, None) as telemetry:
            for number in range(WARM_UP + 4 * steps):
                is_on = is_with(number)
                clock.of = charged if is_on else lambda cause: nullcontext()
                clock.on_change = pulse.change if is_on else silent
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
                    wall_s.append(time.perf_counter() - began_s)
                    cpu_s.append(time.process_time() - began_cpu_s)
            clock.of, clock.on_change = charged, pulse.change
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
        step_s = statistics.median(wall_s)
        ratios, wall_ratios = (in_fours(each, lambda a, b, c, d: (a + d) / (b + c)) for each in (cpu_s, wall_s))
        nothing = in_fours(cpu_s, lambda a, b, c, d: b / c)
        return {
            "ratio": statistics.median(ratios),
            "ratio_error": standard_error(ratios),
            "nothing_ratio": statistics.median(nothing),
            "nothing_error": standard_error(nothing),
            "wall_ratio": statistics.median(wall_ratios),
            "bound": (changes * change_s + line_s) / step_s,
            "changes": changes,
            "step_s": step_s,
            "fours": steps,
        }


def is_with(number: int) -> bool:
    """Whether step `number` of the loop has telemetry."""
    return number % 4 in (0, 3)


def in_fours(values: Sequence[float], ratio: Callable[[float, float, float, float], float]) -> list[float]:
    """Of each four steps."""
    return [ratio(*values[first : first + 4]) for first in range(0, len(values), 4)]


def standard_error(values: Sequence[float]) -> float:
    """Of the median."""
    draw = random.Random(0)
    return statistics.stdev(statistics.median(draw.choices(values, k=len(values))) for _ in range(400))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layout", choices=("tp", "dp", "pp"), default="tp")
    parser.add_argument("--steps", type=int, default=150, help="fours of steps")
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
            error, nothing = f"± {found['ratio_error']:.4f}", f"{found['nothing_ratio']:.4f}"
            print(f"with telemetry over without it: CPU seconds {found['ratio']:.4f} {error} (mark {MARK})")
            print(f"without over without: {nothing} ± {found['nothing_error']:.4f}")
            print(f"wall clock: {found['wall_ratio']:.4f}; step {found['step_s']:.4f} s")
            print(f"bound by counting: {found['bound']:.5f} of the step ({changes})")
    if asked.work:
        sys.stdout.flush()
        leave(0 if is_reached else 1)
    sys.exit(0 if is_reached else 1)


if __name__ == "__main__":
    main()
