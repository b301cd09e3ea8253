"""Free constants fitted to measured step times: a robust maximum a posteriori estimate, and its folds.

Unknowns are the logarithms of the constants. Data ask for small log(predicted / seen), weighed by source, under a
soft-L1 loss whose scale is the noise floor of published runs, so that an outlier pulls no harder than its sign; a
log-normal prior holds each constant, and its physical range bounds it. `predict` is the planner, handed in: it
is asked for those rows alone that a constant touches.

A fold is judged with constants that were fitted without its rows, again from the priors. What it costs is linear
algebra: steps of a fold take the Jacobian of the full fit, and one that goes far is followed by an exact
evaluation and another step. Judged rows are always predicted exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.spec.constants import Constant

Floats = NDArray[np.float64]
Predict = Callable[[Mapping[str, float], Sequence[int]], Floats]
"""Step times of some rows, in seconds, for values of the constants by name."""

NOISE = 0.055
"""Scale of soft-L1, in log units: equal configurations measured in several releases differ by 4% to 7%."""

STEP = 2e-3
"""Of numeric derivatives, in log units: far above the rounding of a step time, far below what a fit moves."""

ROUNDS = 2
"""Gauss-Newton steps of a fold."""

NEAR = 0.04
"""Change of a row's log time up to which the full fit's derivatives are taken as exact."""


@dataclass(frozen=True)
class Problem:
    """What is fitted to what."""

    constants: Sequence[Constant]
    seen_s: Floats
    weights: Floats
    """Of the rows; 1/sqrt(rows of the source) keeps a long table from outvoting many short ones."""
    touched: Mapping[str, Sequence[int]]
    """Rows that each constant has a part in."""
    predict: Predict

    @property
    def prior(self) -> Floats:
        return np.log([each.prior for each in self.constants])

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        return np.log([each.low for each in self.constants]), np.log([each.high for each in self.constants])

    def values(self, unknowns: Floats) -> dict[str, float]:
        """Constants by name."""
        return {each.name: float(value) for each, value in zip(self.constants, np.exp(unknowns), strict=True)}

    def errors(self, unknowns: Floats, rows: Sequence[int] | None = None) -> Floats:
        """log(predicted / seen) of some rows, or of all."""
        rows = range(len(self.seen_s)) if rows is None else rows
        return np.log(self.predict(self.values(unknowns), rows)) - np.log(self.seen_s[list(rows)])

    def jacobian(self, unknowns: Floats, errors: Floats, like: Floats | None = None) -> Floats:
        """Derivatives of the errors, (rows, constants); `errors` are those at the same place. Where `like`, an
        earlier one, is zero, it is taken as zero again: an fp8 rate has no part in a bf16 run."""
        _, high = self.bounds
        columns = np.zeros((len(errors), len(unknowns)))
        for at, constant in enumerate(self.constants):
            touched = self.touched[constant.name]
            rows = [row for row in touched if like is None or like[row, at]]
            if not rows:
                continue
            step = STEP if unknowns[at] + STEP <= high[at] else -STEP
            moved = unknowns.copy()
            moved[at] += step
            columns[rows, at] = (self.errors(moved, rows) - errors[rows]) / step
        return columns


@dataclass(frozen=True)
class Fitted:
    """A fit, and what its folds need."""

    unknowns: Floats
    errors: Floats
    """log(predicted / seen) of each row there."""
    jacobian: Floats


def fit(problem: Problem, most_steps: int = 12) -> Fitted:
    """The constants that fit all rows, from the priors."""
    rows = np.arange(len(problem.seen_s))
    known: dict[bytes, Floats] = {}

    def errors(unknowns: Floats) -> Floats:
        key = unknowns.tobytes()
        if key not in known:
            known.clear()
            known[key] = problem.errors(unknowns)
        return known[key]

    first = problem.jacobian(problem.prior, errors(problem.prior))

    def jacobian(unknowns: Floats) -> Floats:
        return problem.jacobian(unknowns, errors(unknowns), like=first)

    unknowns = _solve(problem, rows, errors, jacobian, problem.prior, most_steps)
    return Fitted(unknowns, errors(unknowns), problem.jacobian(unknowns, errors(unknowns)))


def leave_out(problem: Problem, fitted: Fitted, folds: Sequence[str]) -> Floats:
    """Predicted seconds of every row by constants that were fitted without the rows of its fold; `folds` names the
    fold of each row."""
    predicted = np.zeros(len(problem.seen_s))
    names = np.array(folds)
    for fold in sorted(set(folds)):
        judged = np.flatnonzero(names == fold)
        unknowns = without(problem, fitted, np.flatnonzero(names != fold))
        predicted[judged] = problem.predict(problem.values(unknowns), judged.tolist())
    return predicted


def without(problem: Problem, fitted: Fitted, rows: NDArray[np.intp]) -> Floats:
    """The unknowns that fit `rows` alone, from the priors; no other row's measurement is used."""
    at, known, slopes = fitted.unknowns, fitted.errors, fitted.jacobian
    for _ in range(ROUNDS):

        def linear(unknowns: Floats, at: Floats = at, known: Floats = known) -> Floats:
            return known + slopes @ (unknowns - at)

        found = _solve(problem, rows, linear, lambda _: slopes, problem.prior, 200)
        moved = np.abs(slopes[rows] @ (found - at)).max(initial=0.0)
        at = found
        if moved < NEAR:
            break
        known = known.copy()
        known[rows] = problem.errors(found, rows.tolist())
    return at


def _solve(
    problem: Problem,
    rows: NDArray[np.intp],
    errors: Callable[[Floats], Floats],
    jacobian: Callable[[Floats], Floats],
    start: Floats,
    most_steps: int,
) -> Floats:
    """The minimum over `rows`, with the priors as further residuals."""
    from scipy.optimize import least_squares  # half a second to import

    scale = np.array([each.log_sd for each in problem.constants])
    prior, weights = problem.prior, problem.weights[rows]

    def residuals(unknowns: Floats) -> Floats:
        return np.concatenate([errors(unknowns)[rows] / NOISE, (unknowns - prior) / scale])

    def slopes(unknowns: Floats) -> Floats:
        return np.concatenate([jacobian(unknowns)[rows] / NOISE, np.diag(1 / scale)])

    found = least_squares(
        residuals,
        start,
        jac=slopes,  # pyright: ignore[reportArgumentType]
        bounds=problem.bounds,
        loss=lambda squares: _loss(squares, weights),  # pyright: ignore[reportArgumentType]
        max_nfev=most_steps,
        xtol=1e-4,
        ftol=1e-5,
    )
    return found.x


def _loss(squares: Floats, weights: Floats) -> Floats:
    """Weighed soft-L1 of the data, squares of the priors: value and two derivatives, as scipy wants them."""
    data, prior = squares[: len(weights)], squares[len(weights) :]
    root = np.sqrt(1 + data)
    return np.stack(
        [
            np.concatenate([2 * weights * (root - 1), prior]),
            np.concatenate([weights / root, np.ones_like(prior)]),
            np.concatenate([-0.5 * weights / root**3, np.zeros_like(prior)]),
        ]
    )


def source_weights(sources: Sequence[str]) -> Floats:
    """1/sqrt(rows of the source) for each row."""
    count = {source: sources.count(source) for source in set(sources)}
    return np.array([count[source] ** -0.5 for source in sources])
