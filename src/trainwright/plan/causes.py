"""Seconds of one candidate's step by cause: those of the busiest pipeline rank, and what surrounds the pipeline.

They sum to the step. What the schedule adds to the busiest rank's own work is bubble, what sends add is pp, and
what paired acts hide of expert dispatch is taken from ep.
"""

import numpy as np

from trainwright.plan import pipeline
from trainwright.plan.acts import Acts
from trainwright.plan.assembly import assembly
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.figures import PAIRED
from trainwright.plan.table import Floats
from trainwright.spec.ledger import SecondsCause


def step_seconds(evaluation: Evaluation, row: int) -> dict[SecondsCause, float]:
    """Seconds of the row's step by cause."""
    pipe = evaluation.pipe(row)
    with_sends = pipeline.makespan(pipe)
    without = pipeline.makespan(evaluation.pipe(row, sends=False)) if pipe.pp > 1 else with_sends
    seconds = busiest_seconds(evaluation, row)
    if pipe.schedule in PAIRED:
        hidden = pipeline.makespan(evaluation.pipe(row, sends=False, pairs=False)) - without
        seconds["ep"] = max(seconds.get("ep", 0.0) - hidden, 0.0)
    seconds.setdefault("recompute", 0.0)
    seconds["bubble"] = without - sum(seconds.values())
    seconds["pp"] = with_sends - without
    for cause, value in evaluation.around(row, with_sends, evaluation.sharing_s(row, with_sends)).items():
        seconds[cause] = seconds.get(cause, 0.0) + value
    return seconds


def busiest_seconds(evaluation: Evaluation, row: int) -> dict[SecondsCause, float]:
    """Seconds of all acts of a step, by cause, of the pipeline rank that has most of them."""
    counts, acts = _counts(evaluation, row), _acts(evaluation, row)
    inside, table = evaluation.inside_of(row), evaluation.table
    twice = counts.sum() > assembly(evaluation.shape(row)).stages.sum() + 0.5
    microbatches = float(table.num_microbatches[row]) / (2 if twice else 1)
    work = np.array([sum(at(value, inside) for half in halves(each) for value in half.values()) for each in acts])
    busiest = counts[int((counts @ work).argmax())]
    seconds: dict[SecondsCause, float] = {}
    for count, each in zip(busiest, acts, strict=True):
        for half in halves(each):
            for cause, value in half.items():
                seconds[cause] = seconds.get(cause, 0.0) + count * at(value, inside) * microbatches
    overhead = 2 * table.cluster.rates.microbatch_overhead_s * float(table.columns.vpp[row]) * microbatches
    seconds["host"] = seconds.get("host", 0.0) + overhead
    return seconds


def flops_recomputed(evaluation: Evaluation, row: int) -> float:
    """FLOPs that recompute adds in a step, averaged over the pipeline's ranks."""
    shape, inside = evaluation.shape(row), evaluation.inside_of(row)
    counts = assembly(shape).stages.sum(axis=0)
    again = np.array([at(each.flops_again, inside) for each in _acts(evaluation, row)])
    return float(counts @ again) * float(evaluation.table.num_microbatches[row]) / shape.pp


def halves(acts: Acts) -> tuple[dict, dict, dict]:
    return acts.forward, acts.input, acts.weight


def _acts(evaluation: Evaluation, row: int) -> list[Acts]:
    return evaluation.parts.acts[evaluation.table.columns.policy[row]]


def _counts(evaluation: Evaluation, row: int) -> np.ndarray:
    return assembly(evaluation.shape(row)).ranks


def at(values: Floats | float, inside: int) -> float:
    """Of figures of all insides, or one for all of them, those of one inside."""
    return float(values[inside if len(values) > 1 else 0] if isinstance(values, np.ndarray) else values)
