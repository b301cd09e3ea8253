"""Kills: runs of 2 to 4 ranks are killed by SIGKILL again and again, each time in a phase that has had the fewest
so far, until they are done. After each death the directory of commits is read to the last byte; in the end losses
and state are held against a run that was never stopped."""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_crashes import good
from forks import PHASES, attempt, drawn_aim, losses_in, shards_in, small_run

from trainwright.spec.run import Run
from trainwright.train.faults.campaign import state_digest

KILLS = 1000
STEPS = 16
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "dp 2, zero 1": ({"dp": 2}, 1),
    "tp 2": ({"tp": 2}, 0),
    "dp 3, zero 3": ({"dp": 3}, 3),
    "tp 2, dp 2, zero 2": ({"tp": 2, "dp": 2}, 2),
}
"""Degrees and ZeRO; two of four runs are of two ranks."""


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    """One for each death, and one for each run that came to its end."""
    chosen, wanted = random.Random(seed), round(KILLS * share)
    had: Counter[str] = Counter()
    number = 0
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        plain: dict[str, tuple[Run, dict[str, float]]] = {}
        for name, (degrees, zero) in LAYOUTS.items():
            tables = {"recipe": {"zero": zero}, "checkpoint": {"every_steps": 1}}
            run = small_run(shards_in(home), tables, STEPS, **degrees)
            unhurt = attempt(run, home / name, STEPS)
            assert unhurt.is_done, unhurt
            plain[name] = run, unhurt.typical_s
        while sum(had.values()) < wanted:
            name = list(plain)[number % len(plain)]
            run, typical_s = plain[name]
            out = home / f"run-{number}"
            number += 1
            yield from _killed(run, name, out, typical_s, chosen, had, wanted)
            yield {
                "kind": "run",
                "layout": name,
                "losses_equal": losses_in(out) == losses_in(home / name),
                "state_equal": state_digest(out) == state_digest(home / name),
            }
            shutil.rmtree(out)


def _killed(
    run: Run,
    name: str,
    out: Path,
    typical_s: dict[str, float],
    chosen: random.Random,
    had: Counter[str],
    wanted: int,
) -> Iterator[dict[str, Any]]:
    commits, newest = out / "checkpoints", 0
    while True:
        aim = None
        if sum(had.values()) < wanted:
            phase = min(PHASES, key=lambda each: (had[each], chosen.random()))
            aim = drawn_aim(chosen, phase, run.layout.world, typical_s)
        seen = attempt(run, out, STEPS, aim, after_s=chosen.choice((0.0, 0.02 * chosen.random())))
        assert aim is not None or seen.is_done, seen.said
        if seen.is_done:
            return
        whole = good(commits)
        newest = max(newest, seen.committed)
        # A kill that came after the phase had ended counts for where it struck.
        struck = aim.phase if aim and aim.phase in seen.died_in else next(iter(seen.died_in), "between")
        if struck in PHASES:
            had[struck] += 1
        assert seen.died_in or aim is None or seen.statuses[aim.rank] == -9, seen.said
        yield {
            "kind": "kill",
            "layout": name,
            "phase": struck,
            "lost": newest - max(whole, default=0) if newest > max(whole, default=0) else 0,
            "seconds": seen.seconds,
        }
