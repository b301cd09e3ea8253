"""Memory: one rank of 2, and of 4, is killed again and again, and every third time the memory of its host is lost
with it; 192 MiB of weights and moments a rank are kept in memory after every step and never in storage. Seconds
are of the slowest rank, from the first look at what hosts hold until the state is in place; a process's start
comes before, and is in `back_s`."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whole_runs import run_file, told, trained

KILLS = 12
D_MODEL = 672
"""192 MiB of weights and two moments in fp32."""


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    for ranks in (2, 4):
        yield _of(ranks, max(3, round(KILLS * share)), seed)


def _of(ranks: int, kills: int, seed: int) -> dict[str, Any]:
    plan = [
        {
            "kind": "lose" if number % 3 == 2 else "kill",
            "rank": (7 * number + 1 + seed) % ranks,
            "step": 4 + 3 * number,
        }
        for number in range(kills)
    ]
    tables = {
        "layout": {"dp": ranks},
        "recipe": {"precision": "fp32"},
        "checkpoint": {"every_steps": 1_000_000, "memory_every_steps": 1},
        "supervision": {"lemon_after": 1_000_000},
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        status, said = trained(run_file(Path(scratch), D_MODEL, 4 + 3 * kills, tables), out, plan)
        if status:
            raise SystemExit(f"{ranks} ranks ended with {status}:\n{said[-3000:]}")
        seconds = [float(each) for each in re.findall(r"from memory.* in ([\d.]+) s", said)]
        resumed = [each for each in told(out) if each["kind"] == "resumed"]
        held = json.loads((out / "ledger.jsonl").read_text().splitlines()[0])["bytes"]
        assert len(resumed) == kills, said
        return {
            "ranks": ranks,
            "mib": (held["parameters"] + held["optimizer"]) / 2**20,
            "seconds": seconds,
            "back_s": [each["found_after_s"] for each in resumed],
            "from_storage": kills - len(seconds),
            "lost_steps": [each["done_again"] - 1 for each in resumed],
        }
