"""Goodput: runs of two ranks in which one is killed at random moments, whatever they do then, restarts among it
(exponential times between, one seed); against the complete form of `trainwright goodput`.

What the form is given is measured before and beside on the same machine: the seconds of steps between two saves,
of a save that the steps wait for, and from a death until steps go on. A block is a run in peace, then runs under
kills, then in peace again, so that a machine that gets slower does so for both. The failure rate given is the
number of deaths over the seconds in which they struck; what the planted rate gives stands beside it.
"""

import mmap
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
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
PEACE_STEPS = 120
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


def peace(run: Run, home: Path) -> tuple[float, float]:
    """Seconds of the steps between two saves, and of a save."""
    times = Times()
    seen = attempt(run, home, PEACE_STEPS, before=times.watch)
    assert seen.is_done, seen.said
    ended_s = times.ns[: PEACE_STEPS - 1] / 1e9
    each_s = np.diff(ended_s)  # of steps 1 and on
    steps = np.arange(1, PEACE_STEPS - 1)
    saving = steps % EVERY == 0
    settled = steps > SETTLED
    step_s = float(np.mean(each_s[settled & ~saving]))
    return step_s * EVERY, float(np.mean(each_s[settled & saving])) - step_s


def hurt(run: Run, home: Path, seconds: float, chosen: random.Random) -> dict[str, Any]:
    """Steps that are in the state after so many seconds of kills, deaths, and seconds from each to the next
    step."""
    begun_s = now_s = time.monotonic()
    next_s = begun_s + chosen.expovariate(1 / MTTF_S)
    deaths, died_s, back_s = 0, begun_s, []
    while now_s < begun_s + seconds:
        times = Times()
        victim = chosen.randrange(run.layout.world)
        seen: Attempt = attempt(run, home, MOST_STEPS, killed_at_s=next_s, victim=victim, before=times.watch)
        assert not seen.is_done
        now_s = time.monotonic()
        deaths += 1
        known = np.flatnonzero(times.ns)
        if deaths > 1 and len(known) > 2 * SETTLED:
            # To the step that is settled, less what steps take.
            first, last = known[SETTLED], known[-1]
            step_s = np.median(np.diff(times.ns[known[SETTLED:]])) / 1e9
            assert last > first
            back_s.append(float(times.ns[first] / 1e9 - died_s - SETTLED * step_s))
        died_s, next_s = next_s, now_s + chosen.expovariate(1 / MTTF_S)
    kept = next((save.step for save in saves_in(home / "checkpoints") if save.is_committed), 0)
    return {"steps": kept, "seconds": now_s - begun_s, "deaths": deaths, "back_s": back_s}


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        tables = {"checkpoint": {"every_steps": EVERY, "asynchronous": False}}
        run = small_run(shards_in(home), tables, MOST_STEPS, dp=2)
        for block in range(BLOCKS):
            before = peace(run, home / f"peace-{block}")
            seen = hurt(run, home / f"hurt-{block}", BLOCK_S * share, chosen)
            after = peace(run, home / f"peace-{block}-after")
            interval_s, saves_s = (statistics.fmean(pair) for pair in zip(before, after, strict=True))
            yield {"interval_s": interval_s, "save_s": saves_s, "changed": after[0] / before[0] - 1, **seen}


def held_against(records: list[dict[str, Any]]) -> dict[str, float]:
    """Observed and predicted shares over all blocks."""
    seconds = sum(each["seconds"] for each in records)
    deaths = sum(each["deaths"] for each in records)
    useful_s = sum(each["steps"] * each["interval_s"] / EVERY for each in records)
    interval_s, save_s = (statistics.fmean(each[key] for each in records) for key in ("interval_s", "save_s"))
    back_s = statistics.fmean(value for each in records for value in each["back_s"])
    saving = Saving(kind="synchronous", blocked_s=save_s, recover_s=back_s)
    predicted = partial(complete, saving, interval_s=interval_s)
    return {
        "observed": useful_s / seconds,
        "predicted": predicted(mttf_s=seconds / deaths),
        "planted": predicted(mttf_s=MTTF_S),
        "deaths": deaths,
        "seconds": seconds,
        "interval_s": interval_s,
        "save_s": save_s,
        "back_s": back_s,
    }
