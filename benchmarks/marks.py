"""Measures every mark that was asked for and writes `benchmarks/marks.md`: mark, figure, command, hardware, date.

One function per mark; each gives the figure, whether it was reached, and the command that anyone can repeat.
Whole processes are timed from outside, medians of several. Run it as `make marks` on an otherwise idle machine.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PLAN = (
    "trainwright plan llama-3.1-405b --cluster h100-sxm --gpus 16384 --seq-len 8192 --global-batch 2048 "
    "--tokens 15.6T"
)


class Measured(NamedTuple):
    figure: str
    reached: bool
    command: str


def shell(command: str, **environment: str) -> tuple[float, str]:
    """Seconds of a whole process, and what it printed; `trainwright` and `python` are this environment's."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    started = time.perf_counter()
    variables = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, env=variables)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds, done.stdout


def median_s(command: str, times: int = 7) -> float:
    return statistics.median(shell(command)[0] for _ in range(times))


def help_process() -> Measured:
    seconds = median_s("trainwright --help")
    return Measured(f"{seconds:.2f} s", seconds < 0.4, "trainwright --help (median of 7)")


def plan_process() -> Measured:
    seconds = median_s(PLAN)
    return Measured(f"{seconds:.2f} s", seconds < 2.0, f"{PLAN} (median of 7)")


def plan_without_torch() -> Measured:
    _, modules = shell(f"python -X importtime -m {PLAN} 2>&1 >/dev/null | grep -c ' torch$' || true")
    count = int(modules.strip() or 0)
    return Measured(f"{count} imports", count == 0, f"python -X importtime -m {PLAN} and count the lines of torch")


def demo() -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        command = f"trainwright demo --out {folder}/demo --json"
        seconds, text = shell(command, XDG_CACHE_HOME=folder)
    report = json.loads(text)
    losses = report["losses"]
    return Measured(
        f"{seconds:.0f} s with an empty cache; loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps",
        seconds < 90 and losses[-1] < 0.8 * losses[0],
        "trainwright demo --json",
    )


def single_process() -> Measured:
    command = "python benchmarks/single_process.py --json"
    report = json.loads(shell(command)[1].strip().splitlines()[-1])
    return Measured(f"{report['ratio']:.3f}", report["ratio"] >= 0.95, command)


def test_suite() -> Measured:
    seconds, text = shell("python -m pytest")
    return Measured(f"{seconds / 60:.1f} minutes, {text.strip().splitlines()[-1]}", seconds < 600, "make test")


MARKS: list[tuple[str, Callable[[], Measured]]] = [
    ("`trainwright --help` under 0.4 s as a whole process", help_process),
    ("`trainwright plan` for 405B on 16,384 GPUs under 2 s as a whole process", plan_process),
    ("`trainwright plan` does not import torch", plan_without_torch),
    ("single process at 95% or more of a bare loop's tokens/s", single_process),
    ("`trainwright demo` under 90 s on 2 cores, loss falls visibly", demo),
    ("`make test` under 10 minutes on 2 cores", test_suite),
]


def hardware() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{os.cpu_count()} cores, {model}"


def main() -> None:
    """Measure, print as it goes, and write the table."""
    rows = []
    for mark, measure in MARKS:
        measured = measure()
        verdict = "reached" if measured.reached else "MISSED"
        print(f"{verdict:8} {mark}: {measured.figure}", flush=True)
        rows.append(
            f"| {mark} | {measured.figure} | {verdict} | `{measured.command}` | {hardware()} | {date.today()} |"
        )
    text = "\n".join(
        [
            "# Marks",
            "",
            "Written by `make marks`; one line for each mark that was asked for, the missed ones too.",
            "",
            "| mark | measured | verdict | command | hardware | date |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    (ROOT / "benchmarks" / "marks.md").write_text(text)


if __name__ == "__main__":
    main()
