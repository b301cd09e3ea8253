"""The planner as verbs ask it: with the time that a search took, and no answer of numbers that overflowed."""

import math
import time
from typing import NamedTuple

import numpy as np

from trainwright.plan import predict as planner
from trainwright.plan.search import search
from trainwright.spec.answers import Answer, Prediction
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.question import Question
from trainwright.spec.run import Run


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
    return prediction


def searched(question: Question) -> Searched:
    """The answer to a question."""
    started_s = time.perf_counter()
    with np.errstate(all="ignore"):
        answer = search(question)
    search_s = time.perf_counter() - started_s
    for plan in answer.plans:
        _require_finite(plan)
    return Searched(question, answer, search_s)


def _require_finite(prediction: Prediction) -> None:
    totals = (prediction.gpu_hours, prediction.days, prediction.cost_usd)
    numbers = [prediction.step_s, prediction.peak_bytes, *(each for each in totals if each is not None)]
    if not all(map(math.isfinite, numbers)):
        raise InvalidSpec(
            "the prediction has numbers beyond 1e308; look for a field that is far too large or small"
        )
