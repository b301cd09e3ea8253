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

SCATTER = 0.2
"""Of the medians of collectives around a line, in log units: below it deviations count by their square."""


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
    """Latency in seconds and seconds per byte: the line of least soft-L1 deviation of log(line / seen), which
    takes twice as long and half as long for equally wrong, and an outlier for little more than its sign.

    Tried are all lines through two points or through one and the origin, which fit exact points exactly, and
    between them a grid: for each latency over slope the best scale. Latency is at least zero, and a byte takes
    some time. `InvalidSpec` for less than two sizes.
    """
    if len(points) < 2:
        reject("samples", f"{len(points)} message size(s)", "measure a collective at two sizes at least")
    work, seconds = (np.array([getattr(point, name) for point in points]) for name in ("work", "seconds"))
    lines = [(0.0, point.seconds / point.work) for point in points]
    lines += [_line(first, second) for first, second in combinations(points, 2)]
    shapes = np.concatenate([[0.0], np.geomspace(work.min() / 10, work.max() * 10, 100)])
    scales = np.log(seconds) - np.log(shapes[:, None] + work)
    slopes = np.exp(np.linspace(scales.min(axis=1), scales.max(axis=1), 41, axis=1))
    lines += zip((shapes[:, None] * slopes).ravel().tolist(), slopes.ravel().tolist(), strict=True)
    latency_s, s_per_byte = np.array([line for line in lines if line[0] >= 0 and line[1] > 0]).T
    errors = np.log((latency_s[:, None] + s_per_byte[:, None] * work) / seconds)
    best = int(np.sqrt(1 + (errors / SCATTER) ** 2).sum(axis=1).argmin())
    return float(latency_s[best]), float(s_per_byte[best])


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
