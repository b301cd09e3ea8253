"""Samples of one operation as points: each measured size by the median of its repetitions, which outliers don't
move; and the line through points that are a latency and a rate."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from trainwright.spec.errors import reject
from trainwright.spec.record import Fit, Sample


class Point(NamedTuple):
    """One measured size: median seconds, and how many repetitions it is the median of."""

    size: float
    work: float
    seconds: float
    repetitions: int


def points(
    samples: Iterable[Sample], op: str, precision: str | None, busy_ranks: int, group_size: int = 1
) -> list[Point]:
    """The measured sizes of an operation, smallest first, all repetitions together. Calls of one size and
    different work (matmuls of two shapes) are one point of the median rate."""
    groups: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        is_same = (sample.op, sample.busy_ranks, sample.group_size) == (op, busy_ranks, group_size)
        if is_same and precision in (None, sample.precision):
            groups[sample.size].append(sample)
    found = []
    for size, group in sorted(groups.items()):
        work = group[0].work
        seconds = [each * work / sample.work for sample in group for each in sample.seconds]
        found.append(Point(size, work, median(seconds), len(seconds)))
    return found


def fit_line(points: Sequence[Point]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte, both of least absolute relative deviation from the points.

    Such a line goes through two of the points, so all pairs are tried (Bloomfield and Steiger, Least Absolute
    Deviations, 1983). Latency is at least zero, and a byte takes some time. `InvalidSpec` for less than two sizes.
    """
    if len(points) < 2:
        reject("samples", f"{len(points)} message size(s)", "measure a collective at two sizes at least")
    through_zero = [(0.0, point.seconds / point.work) for point in points]
    through_two = [_line(first, second) for first, second in combinations(points, 2)]
    lines = [line for line in (*through_zero, *through_two) if line[0] >= 0 and line[1] > 0]

    def deviation(line: tuple[float, float]) -> float:
        return sum(abs(line[0] + line[1] * point.work - point.seconds) / point.seconds for point in points)

    return min(lines, key=deviation)


def _line(first: Point, second: Point) -> tuple[float, float]:
    slope = (second.seconds - first.seconds) / (second.work - first.work)
    return first.seconds - slope * first.work, slope


def fit_of(name: str, points: Sequence[Point], predict: Callable[[Point], float]) -> Fit:
    """How well `predict` says the points."""
    residuals = [point.seconds / predict(point) - 1 for point in points]
    errors = [abs(predict(point) - point.seconds) / point.seconds for point in points]
    return Fit(
        name=name,
        samples=sum(point.repetitions for point in points),
        median_error=median(errors),
        worst_error=max(errors),
        sizes=tuple(point.size for point in points),
        residuals=tuple(residuals),
    )


def median(values: Iterable[float]) -> float:
    found = float(np.median(list(values)))
    assert math.isfinite(found)
    return found
