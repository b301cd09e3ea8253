"""Benchmarks that drive the trainer's parts run, and print what the marks are read from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (["bubbles.py", "1", "--json"], {"1f1b", "zb_h1", "zb_v", "dualpipe_v"}),
        (["single_process.py", "fp32", "2", "--json"], {"ratio", "mark", "steps", "runs"}),
        (
            ["closed_loop.py", "--quick", "--max-noise", "100", "--json"],
            {"layouts", "median_error", "worst_error"},
        ),
        (
            ["telemetry.py", "--steps", "2", "--json"],
            {
                *("ratio", "ratio_error", "nothing_ratio", "nothing_error", "wall_ratio"),
                *("bound", "changes", "step_s", "fours", "mark"),
            },
        ),
        (["fp8_emulation.py", "--steps", "1", "--json"], {"mark", "step_s", "ratios"}),
        (["debug_model.py", "--work", "single", "--steps", "1"], {"seconds", "matmul_flops_per_s"}),
    ],
)
def test_a_benchmark_runs(command: list[str], keys: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / command[0]), *command[1:]], capture_output=True, text=True, timeout=240
    )
    # Whether a mark is reached is the benchmark's to say, by its status; not a test's on a busy machine.
    assert done.returncode in (0, 1), done.stderr
    assert set(json.loads(done.stdout.strip().splitlines()[-1])) == keys
