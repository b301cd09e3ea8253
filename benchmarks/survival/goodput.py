"""Goodput: runs of two ranks in which one is killed at random moments, whatever they do then, restarts among it
(exponential times between, one seed); against the complete form of `trainwright goodput`.

What the form is given is measured in the same runs, as a machine is faster at one time than at another: the mean
seconds of a step, of a save that the steps wait for, and from a death until steps go on. The failure rate given is
the number of deaths over the seconds in which they struck; what the planted rate gives stands beside it. What is
held against each other is the share of the time that is in the state in the end, and what the form makes of these
seconds: the work that is lost, and failures during saves and restarts.
"""

import mmap
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from forks import Attempt, attempt, shards_in, small_run

from trainwright.plan.goodput.closed_forms import complete
from trainwright.spec.run import Run
from trainwright.spec.saving import Saving
from trainwright.train.checkpoint.directory import saves_in
from trainwright.train.faults.attendant import Attendant

BLOCKS, BLOCK_S = 3, 80.0
MTTF_S = 2.0
EVERY = 12
"""Steps between saves."""
SETTLED = 4
"""Steps of a start until they take what all do: the first ones are looked at for their memory."""
MOST_STEPS = 200_000


class Times:
    """When each step ended, of the first rank, in memory that it shares with its parent."""

    def __init__(self) -> None:
        self.ns = np.frombuffer(mmap.mmap(-1, 8 * MOST_STEPS), dtype=np.int64)

    def watch(self, rank: int) -> None:
        plain = Attendant.begin

        def begin(own: Attendant, step: int) -> None:
            if rank == 0:
                self.ns[step - 1] = time.monotonic_ns()  # of the step before, with its save
            plain(own, step)

        Attendant.begin = begin  # type: ignore[method-assign]


def hurt(run: Run, home: Path, seconds: float, chosen: random.Random) -> dict[str, Any]:
    """Steps that are in the state after so many seconds of kills, deaths, and what took how long."""
    begun_s = now_s = time.monotonic()
    died_s, next_s = begun_s, begun_s + chosen.expovariate(1 / MTTF_S)
    deaths = 0
    took: dict[str, list[float]] = {"step_s": [], "saving_s": [], "back_s": []}
    while now_s < begun_s + seconds:
        times = Times()
        victim = chosen.randrange(run.layout.world)
        seen: Attempt = attempt(run, home, MOST_STEPS, killed_at_s=next_s, victim=victim, before=times.watch)
        assert not seen.is_done
        now_s = time.monotonic()
        deaths += 1
        # Steps that had ended, the first one of this start among them, and when.
        steps = np.flatnonzero(times.ns)
        ended_s = times.ns[steps] / 1e9
        if len(steps) > SETTLED + 1:
            each_s, is_saved = np.diff(ended_s), steps[1:] % EVERY == 0
            settled = np.arange(len(each_s)) >= SETTLED
            took["step_s"] += each_s[settled & ~is_saved].tolist()
            took["saving_s"] += each_s[settled & is_saved].tolist()
            # Until the step that is settled, without what such steps take.
            took["back_s"].append(float(ended_s[SETTLED] - died_s - SETTLED * np.median(each_s[SETTLED:])))
        died_s, next_s = next_s, now_s + chosen.expovariate(1 / MTTF_S)
    kept = next((save.step for save in saves_in(home / "checkpoints") if save.is_committed), 0)
    means = {name: statistics.fmean(values) for name, values in took.items()}
    return {"steps": kept, "seconds": now_s - begun_s, "deaths": deaths, **means}


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        tables = {"checkpoint": {"every_steps": EVERY, "asynchronous": False}}
        run = small_run(shards_in(home), tables, MOST_STEPS, dp=2)
        for block in range(BLOCKS):
            yield hurt(run, home / f"hurt-{block}", BLOCK_S * share, chosen)


def predicted(records: list[dict[str, Any]], mttf_s: float) -> float:
    """The share by the complete form, over all blocks, which each have their own seconds."""
    shares = []
    for each in records:
        saving = Saving(kind="synchronous", blocked_s=each["saving_s"] - each["step_s"], recover_s=each["back_s"])
        shares.append(each["seconds"] * complete(saving, mttf_s, EVERY * each["step_s"]))
    return sum(shares) / sum(each["seconds"] for each in records)


def held_against(records: list[dict[str, Any]]) -> dict[str, float]:
    """Observed and predicted shares over all blocks."""
    seconds, deaths = (sum(each[key] for each in records) for key in ("seconds", "deaths"))
    means = {key: statistics.fmean(each[key] for each in records) for key in ("step_s", "saving_s", "back_s")}
    return {
        "observed": sum(each["steps"] * each["step_s"] for each in records) / seconds,
        "predicted": predicted(records, seconds / deaths),
        "planted": predicted(records, MTTF_S),
        "deaths": deaths,
        "seconds": seconds,
        "interval_s": EVERY * means["step_s"],
        "save_s": means["saving_s"] - means["step_s"],
        "back_s": means["back_s"],
    }
