"""False alarms: a whole run of two ranks under supervision, with digests and saves, of which nothing may be told
for 10,000 healthy steps, on a machine that may have other work. Hangs themselves are in the part chaos."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whole_runs import run_file, told, trained

HEALTHY = 10_000


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    steps = max(50, round(HEALTHY * share))
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        tables: dict[str, Any] = {
            "layout": {"dp": 2},
            "recipe": {"micro_batch": 4},
            "checkpoint": {"every_steps": 500},
            "supervision": {"digest_every_steps": 50},
        }
        status, said = trained(run_file(home, 32, steps, tables), home / "healthy", [])
        assert status == 0, said
        yield {"steps": steps, "told": [[each["kind"], each["text"]] for each in told(home / "healthy")]}
