"""A seen step beside the predicted one, by the causes that what saw it tells apart."""

import json
import statistics
from collections.abc import Mapping, Sequence

from trainwright.measure.records import parse_step_seconds
from trainwright.spec.answers import Prediction
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.explanation import RUN_CAUSES, CauseGap, Explanation, SeenStep
from trainwright.spec.ledger import STEP_SECONDS, SecondsCause
from trainwright.spec.record import StepSeconds
from trainwright.spec.run import Run

WARM_UP = 2
"""Steps of a run that are left out: they are slower, and looked at for memory. One more where layers are
compiled."""
FEWEST = 3
"""Steady steps that make a step."""


def explained(
    run: Run, prediction: Prediction, seen: SeenStep, causes: Mapping[str, Sequence[SecondsCause]]
) -> Explanation:
    """The gaps, the largest loss first."""
    gaps = [
        CauseGap(
            name=name,
            predicted_s=sum(prediction.ledger.seconds.get(part, 0.0) for part in parts),
            seen_s=seen.seconds.get(name, 0.0),
            at_peak_s=sum(work.at_peak_s for kind, work in prediction.computed.items() if kind in parts),
        )
        for name, parts in causes.items()
    ]
    there = [gap for gap in gaps if gap.seen_s or gap.predicted_s]
    return Explanation(
        run_name=run.name,
        run_hash=run.hash,
        seen=seen,
        prediction=prediction,
        causes=tuple(sorted(there, key=lambda gap: -gap.gap_s)),
    )


def seen_by_telemetry(run: Run, texts: Mapping[int, str], name: str) -> SeenStep:
    """A median step of a run of ours, a mean over its ranks; `texts` is what each rank wrote. `InvalidSpec` where
    ranks are missing or no steps are steady."""
    world = run.layout.world
    if sorted(texts) != list(range(world)):
        raise InvalidSpec(f"{name}: seconds of {len(texts)} ranks; the run has {world}: train it on all of them")
    first = WARM_UP + run.recipe.compile
    ranks = [
        _steady(parse_step_seconds(text, f"{name}/rank-{rank}.jsonl"), first, name) for rank, text in texts.items()
    ]
    seconds = dict.fromkeys(RUN_CAUSES, 0.0)
    data_s = saved_s = 0.0
    for records in ranks:
        medians = {
            cause: statistics.median(each.seconds.get(cause, 0.0) for each in records) for cause in STEP_SECONDS
        }
        step_s = statistics.median(sum(each.seconds.values()) for each in records)
        scale = step_s / (sum(medians.values()) or 1.0)
        for cause, value in medians.items():
            seconds["host" if cause == "data" else cause] += value * scale / world
        data_s += medians["data"] * scale / world
        saved_s += sum(each.checkpoint_s for each in records) / len(records) / world
    notes = ["bubble: waits for a tensor of another stage, its transfer included"] if run.layout.pp > 1 else []
    if data_s:
        notes.append(f"of host, {data_s:.3g} s make the batch")
    if saved_s:
        notes.append(f"saving held the program up by {saved_s:.3g} s a step, beside the steps")
    return SeenStep(
        source=f"telemetry of {world} rank{'s' if world > 1 else ''}",
        steps=min(map(len, ranks)),
        seconds=seconds,
        notes=tuple(notes),
    )


def _steady(records: Sequence[StepSeconds], first: int, name: str) -> Sequence[StepSeconds]:
    steady = records[first:]
    if len(steady) < FEWEST:
        raise InvalidSpec(
            f"{name}: no steady steps: {len(records)} were trained, of which the first {first} warm up; "
            f"train at least {first + FEWEST}"
        )
    return steady


def run_hash_of(ledger: str) -> str | None:
    """The hash that the first line of a ledger.jsonl names; None where it can't be read."""
    try:
        values = json.loads(ledger.splitlines()[0])
        return values["run_hash"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
