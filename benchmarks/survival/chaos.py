"""What runs survive on this machine, and how fast: `chaos` over layouts and seeds, and how long the state takes to
come back from memory. Writes benchmarks/survival_<hardware>_<date>.md.

    python benchmarks/survival.py [--seeds 3] [--faults 10] [--kills 10] [--layouts 4] [--out FILE.md]

Chaos: a model of four layers in float64, 60 steps, a commit every fifth, faults in turn from all kinds. Memory:
192 MiB of weights and moments a rank, kept in memory after every step and never in storage; one rank is killed
again and again, and every third time the memory of its host is lost with it. Seconds are of the slowest rank, from
the first look at what hosts hold until the state is in place; a process's start comes before.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.cli.catalogue import load_cluster
from trainwright.spec import toml
from trainwright.spec.run import Run
from trainwright.train.shards import write_shards

COMMAND = [sys.executable, "-m", "trainwright"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {"layout": {"dp": 2}},
    "dp 2, zero 1": {"layout": {"dp": 2}, "recipe": {"zero": 1}},
    "tp 2, dp 2": {"layout": {"tp": 2, "dp": 2}},
    "pp 2, dp 2": {"layout": {"pp": 2, "dp": 2}},
}
STEPS = 60
COLUMNS = ("layout", "faults", "seen as what they are", "false alarms", "losses", "final state")
COLUMNS += ("in peace", "under faults")


def run_file(directory: Path, d_model: int, steps: int, tables: dict[str, Any]) -> Path:
    """A run over random tokens; `tables` are merged into its own."""
    shards = directory / "shards"
    if not shards.is_dir():
        shards.mkdir(parents=True)
        write_shards(
            shards, [np.random.default_rng(0).integers(97, size=60_000, dtype=np.uint32)], 258, "survival"
        )
    layer = {
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": d_model // 4},
        "mlp": {"kind": "dense", "d_ff": 2 * d_model},
    }
    recipe = {"seq_len": 16, "global_batch": 8, "micro_batch": 1, "precision": "fp64", "zero": 0}
    values = {
        "layout": {},
        "recipe": recipe | tables.pop("recipe", {}),
        "model": {
            "name": "survival",
            "d_model": d_model,
            "vocab_size": 260,
            "rope": {"theta": 10000.0},
            "layer_groups": [{"repeat": 4, "pattern": [layer]}],
        },
        "data": {"source": "shards", "path": str(shards), "vocab_size": 258},
        "cluster": load_cluster("local-cpu").plain(),
        "budget": {"tokens": steps * 16 * 8},
    }
    path = directory / "run.toml"
    path.write_text(toml.write(Run.parse(values | tables).check()))
    return path


def chaos(name: str, faults: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        file = run_file(Path(scratch), 64, STEPS, json.loads(json.dumps(LAYOUTS[name])))
        more = ["--steps", str(STEPS), "--faults", str(faults), "--seed", str(seed), "--json"]
        command = [*COMMAND, "chaos", str(file), "--out", str(Path(scratch) / "out"), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{name}, seed {seed}: status {done.returncode}", file=sys.stderr, flush=True)
        if not done.stdout.startswith("{"):
            raise SystemExit(f"{name}, seed {seed}, ended with {done.returncode}:\n{done.stderr}")
        return json.loads(done.stdout)


def recoveries(ranks: int, kills: int) -> tuple[list[float], list[int], float]:
    """Seconds and steps done again of each death, and MiB of state a rank."""
    plan = [
        {"kind": "lose" if number % 3 == 2 else "kill", "rank": (7 * number + 1) % ranks, "step": 4 + 3 * number}
        for number in range(kills)
    ]
    steps = 4 + 3 * kills
    tables = {
        "layout": {"dp": ranks},
        "recipe": {"precision": "fp32"},
        "checkpoint": {"every_steps": 1_000_000, "memory_every_steps": 1},
        "supervision": {"lemon_after": 1_000_000},
    }
    with tempfile.TemporaryDirectory() as scratch:
        out, plants = Path(scratch) / "out", Path(scratch) / "plan.json"
        plants.write_text(json.dumps(plan))
        file = run_file(Path(scratch), 672, steps, tables)
        command = [*COMMAND, "train", str(file), "--out", str(out), "--plants", str(plants)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{ranks} ranks ended with {done.returncode}:\n{done.stderr[-3000:]}")
        seconds = [float(each) for each in re.findall(r"from memory.* in ([\d.]+) s", done.stderr)]
        told = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
        again = [each["done_again"] for each in told if each["kind"] == "resumed"]
        held = [json.loads(line)["bytes"] for line in (out / "ledger.jsonl").read_text().splitlines()]
        print(f"{ranks} ranks: {seconds}, {again}", file=sys.stderr, flush=True)
        assert len(seconds) == kills, done.stderr
        return seconds, again, (held[0]["parameters"] + held[0]["optimizer"]) / 2**20


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def hardware() -> str:
    """`2-cores-amd-epyc-9b45`, say."""
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    words = re.sub(r"\(.*?\)|processor|cpu|@.*", " ", names[0].lower())
    return f"{os.cpu_count()}-cores-{'-'.join(re.findall(r'[a-z0-9]+', words))}"


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def report(layouts: list[str], seeds: int, faults: int, kills: int) -> str:
    how = (__doc__ or "").split("\n\n")[2]
    lines = [f"# What runs survive: {hardware()}, {date.today()}", "", how, ""]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    lines += _head(*COLUMNS)
    for name in layouts:
        found = [chaos(name, faults, seed) for seed in range(seeds)]
        blows = [blow for each in found for blow in each["blows"]]
        for blow in blows:
            by_kind.setdefault(blow["kind"], []).append(blow)
        right, alarms = sum(blow["is_right"] for blow in blows), sum(len(each["false_alarms"]) for each in found)
        equal = [
            "equal" if all(each[key] for each in found) else "DIFFER" for key in ("losses_equal", "state_equal")
        ]
        took = [f"{statistics.median(each[key] for each in found):.0f} s" for key in ("plain_s", "hurt_s")]
        lines.append(f"| {name} | {len(blows)} | {right} | {alarms} | {' | '.join(equal + took)} |")
    columns = ("found in, median, most", "steps go on after, median, most", "steps done again, most")
    lines += ["", *_head("fault", "times", *columns)]
    for kind, blows in sorted(by_kind.items()):
        found_s, back_s = ([each[key] for each in blows] for key in ("found_after_s", "back_after_s"))
        row = [kind, len(blows), f"{statistics.median(found_s):.1f}, {max(found_s):.1f} s"]
        row += [f"{statistics.median(back_s):.1f}, {max(back_s):.1f} s", max(each["done_again"] for each in blows)]
        lines.append(f"| {' | '.join(map(str, row))} |")
    marks = "marks: p50 0.5 s, p95 1.0 s, one step lost, no read of storage"
    lines += ["", f"State from memory, one rank killed; {marks}.", ""]
    lines += _head("ranks", "MiB a rank", "deaths", "p50", "p95", "most", "steps lost beside the one begun, most")
    for ranks in (2, 4):
        seconds, again, mib = recoveries(ranks, kills)
        figures = [f"{quantile(seconds, share):.2f} s" for share in (0.5, 0.95, 1.0)]
        lines.append(f"| {ranks} | {mib:.0f} | {len(seconds)} | {' | '.join(figures)} | {max(again) - 1} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="so many, the first ones")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    out = asked.out or Path(__file__).parent / f"survival_{hardware()}_{date.today()}.md"
    begun_s = time.perf_counter()
    text = report(list(LAYOUTS)[: asked.layouts], asked.seeds, asked.faults, asked.kills)
    out.write_text(text)
    print(text, f"\nwrote {out} after {time.perf_counter() - begun_s:.0f} s", sep="")


if __name__ == "__main__":
    main()
