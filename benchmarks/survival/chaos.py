"""Chaos: `trainwright chaos` over four layouts, ten faults each, in turn from all kinds that the
layout can have; a model of four layers in float64, 60 steps, a commit every fifth."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whole_runs import COMMAND, run_file

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {"layout": {"dp": 2}},
    "dp 2, zero 1": {"layout": {"dp": 2}, "recipe": {"zero": 1}},
    "tp 2, dp 2": {"layout": {"tp": 2, "dp": 2}},
    "pp 2, dp 2": {"layout": {"pp": 2, "dp": 2}},
}
STEPS, FAULTS = 60, 10


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    """One for each layout, the first one by the seed; seeds are other drawn faults."""
    names = [*LAYOUTS] * 2
    for name in names[seed % len(LAYOUTS) :][: max(1, round(len(LAYOUTS) * share))]:
        with tempfile.TemporaryDirectory() as scratch:
            file = run_file(Path(scratch), 64, STEPS, LAYOUTS[name])
            more = ["--steps", str(STEPS), "--faults", str(FAULTS), "--seed", str(seed), "--json"]
            command = [*COMMAND, "chaos", str(file), "--out", str(Path(scratch) / "out"), *more]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.stdout.startswith("{"):
                raise SystemExit(f"{name}, seed {seed}, ended with {done.returncode}:\n{done.stderr}")
            yield {"layout": name, **json.loads(done.stdout)}
