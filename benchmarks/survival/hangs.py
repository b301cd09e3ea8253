"""False alarms, and slow ranks. Healthy: whole runs under supervision of 10,000 steps in all, of which nothing
may be told. Slow: what four ranks took for their own work in every step of a healthy run with steps of some 50
ms; a drawn rank is made 1.5 times slower from a drawn step on, and the rule that the watchdog goes by is told of
the steps as it would be; and of healthy stretches, for its false alarms. Processes are few where there are two
cores: noise is all there is. Hangs themselves are in the part chaos."""

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

HEALTHY = 10_000
NOISY_STEPS, TRIALS = 600, 1000
WITHIN = 20
"""Steps, of the mark."""


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
        alarms = told(home / "healthy")
        yield {"kind": "healthy", "steps": steps, "alarms": len(alarms), "status": status, "told": alarms[:3]}
        steps = max(60, round(NOISY_STEPS * share))
        tables = {"layout": {"dp": 4}, "recipe": {"micro_batch": 2, "seq_len": 64}, "supervision": {}}
        status, said = trained(run_file(home, 128, steps, tables), home / "four", [])
        assert status == 0, said
        own_s = [_own_work(home / "four" / "causes" / f"rank-{rank}.jsonl") for rank in range(4)]
        yield {"kind": "slow", "told": len(told(home / "four")), **_judged(own_s, share, random.Random(seed))}


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
    for number in range(HEALTHY):
        # Blocks of 50 steps in a drawn order: what is near in time stays so.
        block = chosen.randrange(steps) if number % 50 == 0 else block + 1  # noqa: F821
        alarms += len(rule.step({rank: each[block % steps] for rank, each in enumerate(own_s)}))
    return {
        "tried": tried,
        "found": found,
        "wrong": wrong,
        "alarms": alarms,
        "healthy_steps": HEALTHY + healthy,
        "own_ms": typical_ms,
    }
