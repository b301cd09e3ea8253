"""Restarts: whole runs of two ranks under supervision, in each of which a rank dies 25 times in a row, once in
every step. Each death must be followed by processes that find one another at the first try and do the step."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whole_runs import run_file, told, trained

RESTARTS, OF_A_RUN = 100, 25


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    left = max(1, round(RESTARTS * share))
    number = 0
    while left > 0:
        deaths = min(left, OF_A_RUN)
        left -= deaths
        number += 1
        plan = [
            {"kind": "kill", "rank": (step + number + seed) % 2, "step": step} for step in range(2, deaths + 2)
        ]
        tables = {
            "layout": {"dp": 2},
            "checkpoint": {"every_steps": 1, "asynchronous": False},
            "supervision": {"lemon_after": 1_000_000},
        }
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            status, said = trained(run_file(Path(scratch), 32, deaths + 2, tables), out, plan)
            lines = told(out)
            resumed = {each["attempt"] for each in lines if each["kind"] == "resumed"}
            yield {
                "deaths": sum(each["kind"] == "died" and each["rank"] is not None for each in lines),
                "wanted": deaths,
                "first_try": len(resumed & set(range(1, deaths + 1))),
                "other": sum(each["kind"] not in ("died", "resumed") for each in lines),
                "status": status,
                "back_s": [each["found_after_s"] for each in lines if each["kind"] == "resumed"],
                "said": "" if not status else said[-500:],
            }
