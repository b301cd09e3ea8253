"""What parts that start whole runs by the command itself share: a run file, and the command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.cli.catalogue import load_cluster
from trainwright.spec import toml
from trainwright.spec.run import Run
from trainwright.train.shards import write_shards

COMMAND = [sys.executable, "-m", "trainwright"]


def run_file(directory: Path, d_model: int, steps: int, tables: dict[str, Any]) -> Path:
    """A run of four layers over random tokens; `tables` are merged into its own."""
    shards = directory / "shards"
    if not shards.is_dir():
        shards.mkdir(parents=True)
        tokens = np.random.default_rng(0).integers(97, size=60_000, dtype=np.uint32)
        write_shards(shards, [tokens], 258, "survival")
    layer = {
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": d_model // 4},
        "mlp": {"kind": "dense", "d_ff": 2 * d_model},
    }
    recipe = {"seq_len": 16, "global_batch": 8, "micro_batch": 1, "precision": "fp64", "zero": 0}
    recipe |= tables.get("recipe", {})
    values = {
        "layout": {},
        "recipe": recipe,
        "model": {
            "name": "survival",
            "d_model": d_model,
            "vocab_size": 260,
            "rope": {"theta": 10000.0},
            "layer_groups": [{"repeat": 4, "pattern": [layer]}],
        },
        "data": {"source": "shards", "path": str(shards), "vocab_size": 258},
        "cluster": load_cluster("local-cpu").plain(),
        "budget": {"tokens": steps * recipe["seq_len"] * recipe["global_batch"]},
    }
    path = directory / "run.toml"
    own = {name: each for name, each in tables.items() if name != "recipe"}
    path.write_text(toml.write(Run.parse(values | own).check()))
    return path


def trained(
    file: Path, out: Path, plan: list[dict[str, Any]], *, before: list[str] | None = None
) -> tuple[int, str]:
    """Status, and what was said; `plan` are faults that are put in. `before`: what the command is run by."""
    command = [*(before or []), *COMMAND, "train", str(file), "--out", str(out)]
    if plan:
        plants = file.with_name(f"{out.name}.plants.json")
        plants.write_text(json.dumps(plan))
        command += ["--plants", str(plants)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def told(out: Path) -> list[dict[str, Any]]:
    """Lines of faults.jsonl; none where nothing happened."""
    path = out / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
