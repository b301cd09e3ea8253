"""Slow ranks: what four ranks took for their own work in every step of a healthy run under supervision is
recorded; then a drawn rank is made 1.5 times slower from a drawn step on, and the rule that the watchdog goes by
is told of the steps as it would be; and of healthy stretches, for its false alarms. There are more ranks than
cores here: noise is all there is."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whole_runs import run_file, told, trained

from trainwright.spec.supervision import Supervision
from trainwright.train.faults.beats import OWN_WORK
from trainwright.train.faults.plant import SLOW_FACTOR
from trainwright.train.faults.slowness import Slowness

STEPS, TRIALS, HEALTHY = 600, 1000, 10_000
WITHIN = 20
"""Steps, of the mark."""
NEAR = 50
"""Healthy stretches are put together of pieces of so many steps, for what is near in time is alike."""


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    steps = max(60, round(STEPS * share))
    tables = {"layout": {"dp": 4}, "recipe": {"micro_batch": 2, "seq_len": 64}, "supervision": {}}
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        status, said = trained(run_file(home, 128, steps, tables), home / "four", [])
        assert status == 0, said
        own_s = [_own_work(home / "four" / "causes" / f"rank-{rank}.jsonl") for rank in range(4)]
        yield {"told": len(told(home / "four")), **_judged(own_s, share, random.Random(seed))}


def _own_work(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [sum(each["seconds"].get(cause, 0.0) for cause in OWN_WORK) for each in lines][3:]


def _judged(own_s: list[list[float]], share: float, chosen: random.Random) -> dict[str, Any]:
    factor, steps = Supervision().slow_factor, len(own_s[0])
    typical_ms = 1e3 * sorted(own_s[0])[steps // 2]
    found = wrong = alarms = healthy = 0
    tried = max(20, round(TRIALS * share))
    for _ in range(tried):
        rule, at, slow = Slowness([range(4)], factor), chosen.randrange(steps), chosen.randrange(4)
        for number in range(WITHIN + WITHIN):  # a healthy stretch, then the slow one
            seen = {rank: each[(at + number) % steps] for rank, each in enumerate(own_s)}
            if number >= WITHIN:
                seen[slow] *= SLOW_FACTOR
            named = rule.step(seen)
            if named and number < WITHIN:
                alarms += 1
            elif named:
                found += slow in named
                wrong += any(rank != slow for rank in named)
                break
        healthy += WITHIN
    rule = Slowness([range(4)], factor)
    for _ in range(HEALTHY // NEAR):
        start = chosen.randrange(steps)
        for number in range(start, start + NEAR):
            alarms += len(rule.step({rank: each[number % steps] for rank, each in enumerate(own_s)}))
    return {
        "tried": tried,
        "found": found,
        "wrong": wrong,
        "alarms": alarms,
        "healthy_steps": HEALTHY + healthy,
        "own_ms": typical_ms,
    }
