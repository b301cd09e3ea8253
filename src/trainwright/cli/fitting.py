"""The fit of the free constants to a table of published runs, as verbs and benchmarks ask for it."""

from collections.abc import Callable, Sequence

import numpy as np

from trainwright.cli import catalogue
from trainwright.cli.published import Predictor, judge, read_runs
from trainwright.measure.fit import Fitted, Problem, fit, leave_out, source_weights
from trainwright.spec.errors import reject
from trainwright.spec.published import PublishedRun
from trainwright.spec.validation import Judged

FOLDS: dict[str, Callable[[PublishedRun], str]] = {
    "source": lambda each: each.siblings,
    "publisher": lambda each: each.publisher,
}
"""What is left out together."""


def problem_of(judged: Sequence[Judged]) -> Problem:
    """The fit to rows that the planner can predict."""
    runs = [each.published for each in judged]
    predictor = Predictor(runs)
    return Problem(
        constants=catalogue.constants(),
        seen_s=np.array([each.step_s for each in runs]),
        weights=source_weights([each.siblings for each in runs]),
        touched=predictor.touched(),
        predict=predictor.seconds,
    )


def fold_of(by: str) -> Callable[[PublishedRun], str]:
    if by not in FOLDS:
        reject("--cv", by, f"must be {' or '.join(FOLDS)}")
    return FOLDS[by]


def cross_validated(problem: Problem, fitted: Fitted, judged: Sequence[Judged], by: str) -> list[Judged]:
    """The rows, each predicted with constants that were fitted without its source or publisher."""
    folds = [fold_of(by)(each.published) for each in judged]
    predicted = leave_out(problem, fitted, folds)
    return [each.changed(predicted_step_s=float(value)) for each, value in zip(judged, predicted, strict=True)]


def judged_apart(judged: Sequence[Judged], by: str) -> list[Judged]:
    """Rows of a table, each predicted with constants that were fitted to its other rows and the catalogue's,
    without any of its source or publisher."""
    own = {each.published.id for each in judged}
    shipped, _ = judge([run for run in read_runs(None)[0] if run.id not in own])
    together = [*judged, *shipped]
    return cross_validated(*fitted_to(together), together, by)[: len(judged)]


def fitted_to(judged: Sequence[Judged]) -> tuple[Problem, Fitted]:
    """The problem and its fit."""
    problem = problem_of(judged)
    return problem, fit(problem)
