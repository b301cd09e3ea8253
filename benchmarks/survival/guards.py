"""Numbers that are none, and spikes: put into a drawn rank at a drawn step of a run that is guarded. The update
must not be made, which is seen by the state of the commit before and behind; and the same must happen twice, the
second time with a death in between."""

import json
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forks import Aim, attempt, losses_in, shards_in, small_run

from trainwright.train.checkpoint.directory import saves_in
from trainwright.train.faults.guard import FIRST_LOSSES

TRIALS = 24
BEHIND = 3
"""Steps behind the bad one."""
DEVIATIONS = 100.0
"""Above the noise of so short a past; a planted spike is hundreds above it, and a
batch of these random tokens was 50."""
CASES = [(kind, action) for kind in ("nan", "spike") for action in ("skip", "roll_back")]


def state_of(out: Path, step: int) -> list[Any]:
    """Digests of all blocks of the commit of a step."""
    save = next(each for each in saves_in(out / "checkpoints") if each.step == step)
    pieces = [piece for part in save.manifest().parts for piece in part.pieces]
    return sorted([piece.tensor, piece.start, piece.digests] for piece in pieces)


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        for number in range(max(len(CASES), round(TRIALS * share))):
            kind, action = CASES[number % len(CASES)]
            guard: dict[str, Any] = {"action": action}
            if kind == "spike":
                guard |= {"spike_deviations": DEVIATIONS, "window": FIRST_LOSSES}
            step = FIRST_LOSSES + chosen.randint(1, 4) if kind == "spike" else chosen.randint(2, 10)
            steps = step + BEHIND
            tables = {
                "guard": guard,
                "checkpoint": {"every_steps": 1, "keep": BEHIND + 2, "asynchronous": False},
                "supervision": {"lemon_after": 100},
            }
            run = small_run(shards_in(home), tables, steps, dp=2)
            plant = {"kind": kind, "rank": chosen.randrange(2), "step": step}
            own = home / str(number)
            own.mkdir()
            (own / "plan.json").write_text(json.dumps([plant]))
            once, twice = own / "once", own / "twice"
            (own / "one" / "attempt").mkdir(parents=True)
            (own / "two" / "attempt").mkdir(parents=True)
            first = attempt(run, once, steps, plants=own / "plan.json", shared=own / "one" / "attempt")
            # A rank of the second run dies behind the next commit: before it, the batch would come again without
            # the fault, which is put in once.
            aim = Aim(chosen.randrange(2), "step", chosen.randint(step + 2, steps), 0.5, 0.005)
            second = attempt(run, twice, steps, aim, plants=own / "plan.json", shared=own / "two" / "attempt")
            has_died = -signal.SIGKILL in second.statuses
            if has_died:
                second = attempt(run, twice, steps, plants=own / "plan.json", shared=own / "two" / "attempt")
            is_done = first.is_done and second.is_done
            lines = [json.loads(each) for each in (once / "metrics.jsonl").read_text().splitlines()]
            if action == "skip":
                is_unmoved = (
                    is_done and lines[step - 1]["lr"] == 0 and state_of(once, step) == state_of(once, step - 1)
                )
            else:  # rolled back to the commit before, and over the batch
                newest = saves_in(once / "checkpoints")[0].manifest()
                is_unmoved = is_done and newest.samples == (steps + 1) * run.recipe.global_batch
            yield {
                "fault": kind,
                "action": action,
                "is_unmoved": is_unmoved,
                "is_repeated": is_done
                and losses_in(once) == losses_in(twice)
                and state_of(once, steps) == state_of(twice, steps),
                "has_died": has_died,
            }
            shutil.rmtree(own)
