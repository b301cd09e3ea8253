"""Silent corruption: one bit of a weight or a moment of one replica flips in memory after a drawn step of a run
whose replicas are held against one another every third step. All ranks must end within that interval with the step
and the tensor, and with the rank where three or more hold it. What the next update rounds away (the lowest bits of
a moment that is multiplied by its decay) can't be found: then the state at the end must be that of a run to which
nothing happened, to the bit. Flips in shards of ZeRO, which no other rank holds, are counted apart: nobody can see
them."""

import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forks import attempt, shards_in, small_run

from trainwright.spec.run import Run
from trainwright.train.faults.campaign import state_digest

FLIPS, IN_SHARDS = 150, 12
EVERY, STEPS = 3, 12
LAYOUTS: dict[str, dict[str, int]] = {"dp 2": {"dp": 2}, "dp 3": {"dp": 3}, "dp 4": {"dp": 4}}
SHARDS = "dp 2, zero 3"


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        unhurt: dict[str, str] = {}
        replicas = max(len(LAYOUTS), round(FLIPS * share))
        names = [list(LAYOUTS)[number % len(LAYOUTS)] for number in range(replicas)]
        names += [SHARDS] * max(2, round(IN_SHARDS * share))
        for number, name in enumerate(names):
            tables = {"supervision": {"digest_every_steps": EVERY}, "checkpoint": {"every_steps": STEPS}}
            recipe = {"recipe": {"zero": 3}} if name == SHARDS else {}
            run = small_run(shards_in(home), tables | recipe, STEPS, **LAYOUTS.get(name, {"dp": 2}))
            if name not in unhurt:
                assert attempt(run, home / name, STEPS).is_done
                unhurt[name] = state_digest(home / name)
            yield _one(run, name, home / str(number), unhurt[name], chosen)
            shutil.rmtree(home / str(number))


def _one(run: Run, name: str, own: Path, unhurt: str, chosen: random.Random) -> dict[str, Any]:
    (own / "attempt").mkdir(parents=True)
    rank, step = chosen.randrange(run.layout.world), chosen.randint(1, STEPS - EVERY)
    plant = {"kind": "flip", "rank": rank, "step": step, "place": chosen.randrange(100_000)}
    (own / "plan.json").write_text(json.dumps([plant]))
    seen = attempt(run, own / "out", STEPS, plants=own / "plan.json", shared=own / "attempt")
    reasons = [json.loads(each.read_text()) for each in (own / "attempt").glob("*.reason")]
    text = reasons[0]["text"] if reasons else ""
    found_at = re.match(r"step (\d+): ", text)
    return {
        "kind": "shard" if name == SHARDS else "replica",
        "layout": name,
        # Replicas were the same at the end, and the state is that of a run to which nothing happened.
        "is_gone": seen.is_done and state_digest(own / "out") == unhurt,
        "is_found": bool(found_at) and not any(status == 0 for status in seen.statuses),
        "after_steps": int(found_at[1]) - step if found_at else -1,
        "replicas": run.layout.world,
        "is_named": bool(reasons) and reasons[0].get("rank") == rank,
    }
