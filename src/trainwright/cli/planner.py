"""The planner as verbs ask it: with the time that a search took, and no answer of numbers that overflowed.

What takes long says on a terminal how far it is.
"""

import math
import time
from typing import NamedTuple

import numpy as np

from trainwright.cli import catalogue
from trainwright.cli.bands import with_band
from trainwright.cli.output import console
from trainwright.cli.progress import Progress
from trainwright.plan import predict as planner
from trainwright.plan import recompute_budget
from trainwright.plan.answer import answer
from trainwright.plan.gain import gain
from trainwright.plan.goodput.budget import with_failures
from trainwright.plan.remedies import diagnosed
from trainwright.plan.sizing import counts_between, counts_to_try, tried
from trainwright.spec.answers import Answer, Prediction
from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.diagnosis import Diagnosis
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.gain import PrecisionGain
from trainwright.spec.model import ModelSpec
from trainwright.spec.question import Question
from trainwright.spec.run import Run
from trainwright.spec.sizing import Goal, Sizing, Tried


class Searched(NamedTuple):
    """A question, its answer, and the seconds that the search took."""

    question: Question
    answer: Answer
    search_s: float


def predicted(run: Run) -> Prediction:
    """The prediction of a run."""
    with np.errstate(all="ignore"):
        prediction = planner.predict(run)
    _require_finite(prediction)
    return _completed(prediction, run.model, run.cluster, run.checkpoint)


def resolved(run: Run) -> Run:
    """The run with its recompute said, where that is left to a budget."""
    with np.errstate(all="ignore"):
        return recompute_budget.resolved(run).run


def searched(question: Question) -> Searched:
    """The answer to a question."""
    started_s = time.perf_counter()
    with np.errstate(all="ignore"):
        found = answer(question)
    search_s = time.perf_counter() - started_s
    for plan in found.plans:
        _require_finite(plan)
    plans = tuple(_completed(plan, question.model, question.cluster, None) for plan in found.plans)
    return Searched(question, found.changed(plans=plans), search_s)


def gained(question: Question, answer: Answer) -> PrecisionGain | None:
    """What a low precision buys the best plan; None where there is no plan, or no low precision."""
    if not answer.plans or not question.recipe.is_low_precision:
        return None
    with np.errstate(all="ignore"):
        return gain(question, answer.plans[0])


def explained(question: Question) -> Diagnosis:
    """What makes a question infeasible, and the remedies."""
    screen = console(errors=True)
    with np.errstate(all="ignore"), Progress(screen) as progress:
        return diagnosed(
            question, lambda name: progress.show(f"tried {name}", 0.5) if screen.is_terminal else None
        )


def sized(question: Question, goal: Goal) -> tuple[Sizing, Searched]:
    """What each number of devices leads to, and the whole answer for the one that reaches the goal; no plans where
    none does. The question's own devices don't count."""
    started_s = time.perf_counter()
    found: list[Tried] = []
    illegal: list[int] = []
    screen = console(errors=True)

    def search_each(counts: list[int]) -> Sizing:
        for at, count in enumerate(counts):
            if screen.is_terminal:
                progress.show(f"searching {count:,} devices", at / len(counts))
            each = tried(question, count)
            if each is None:
                illegal.append(count)
            else:
                found.append(each)
        found.sort(key=lambda each: each.devices)
        return Sizing(goal=goal, tried=tuple(found), illegal=tuple(sorted(illegal)))

    with np.errstate(all="ignore"), Progress(screen) as progress:
        sizing = search_each(counts_to_try(question, goal))
        sizing = search_each(counts_between(question, sizing))
    if sizing.answer is None:
        nothing = Answer(considered=0, judged=0, feasible=0, plans=(), why=(sizing.text,))
        return sizing, Searched(question, nothing, time.perf_counter() - started_s)
    best = searched(question.changed(devices=sizing.answer.devices))
    # The whole answer balances more plans than the first one, so that its plan may be faster still.
    plan = Tried(devices=sizing.answer.devices, plan=best.answer.plans[0])
    rest = [each for each in found if each is not sizing.answer]
    whole = sorted([plan, *rest], key=lambda each: each.devices)
    sizing = sizing.changed(tried=tuple(whole))
    return sizing, best._replace(search_s=time.perf_counter() - started_s)


def _completed(
    prediction: Prediction, model: ModelSpec, cluster: ClusterSpec, checkpoint: Checkpointing | None
) -> Prediction:
    """With what the catalogue knows beside the planner: the band of measured steps, and what failures cost."""
    failing = with_failures(prediction, model, catalogue.with_recovery(cluster), checkpoint)
    return with_band(failing, model, cluster)


def _require_finite(prediction: Prediction) -> None:
    totals = (prediction.gpu_hours, prediction.days, prediction.cost_usd)
    numbers = [prediction.step_s, prediction.peak_bytes, *(each for each in totals if each is not None)]
    if not all(map(math.isfinite, numbers)):
        raise InvalidSpec(
            "the prediction has numbers beyond 1e308; look for a field that is far too large or small"
        )
