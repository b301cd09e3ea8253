"""Silent corruption: one bit of a weight or a moment of one replica flips in memory after a drawn step of a run
whose replicas are held against one another every third step. All ranks must end within that interval with the step
and the tensor, and with the rank where three or more hold it; unless the next update rounds the bit away (the
lowest ones of a moment that is multiplied by its decay), so that nothing is left to be found: then the state at the
end must be that of a run to which nothing happened, to the bit."""

import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forks import attempt, shards_in, small_run

from trainwright.train.faults.campaign import state_digest

FLIPS = 150
EVERY, STEPS = 3, 12
LAYOUTS: dict[str, dict[str, int]] = {"dp 2": {"dp": 2}, "dp 3": {"dp": 3}, "dp 4": {"dp": 4}}


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        unhurt: dict[str, str] = {}
        for number in range(max(len(LAYOUTS), round(FLIPS * share))):
            name = list(LAYOUTS)[number % len(LAYOUTS)]
            tables = {"supervision": {"digest_every_steps": EVERY}, "checkpoint": {"every_steps": STEPS}}
            run = small_run(shards_in(home), tables, STEPS, **LAYOUTS[name])
            if name not in unhurt:
                assert attempt(run, home / name, STEPS).is_done
                unhurt[name] = state_digest(home / name)
            own = home / str(number)
            (own / "attempt").mkdir(parents=True)
            rank, step = chosen.randrange(run.layout.world), chosen.randint(1, STEPS - EVERY)
            plant = {"kind": "flip", "rank": rank, "step": step, "place": chosen.randrange(100_000)}
            (own / "plan.json").write_text(json.dumps([plant]))
            seen = attempt(run, own / "out", STEPS, plants=own / "plan.json", shared=own / "attempt")
            reasons = [json.loads(each.read_text()) for each in (own / "attempt").glob("*.reason")]
            text = reasons[0]["text"] if reasons else ""
            found_at = re.match(r"step (\d+): ", text)
            yield {
                "layout": name,
                # Replicas were the same at the end, and the state is that of a run to which nothing happened.
                "is_gone": seen.is_done and state_digest(own / "out") == unhurt[name],
                "is_found": bool(found_at) and not any(status == 0 for status in seen.statuses),
                "after_steps": int(found_at[1]) - step if found_at else -1,
                "replicas": run.layout.world,
                "is_named": bool(reasons) and reasons[0].get("rank") == rank,
            }
            shutil.rmtree(own)
