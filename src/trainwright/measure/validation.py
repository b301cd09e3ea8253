"""Predictions of published runs held against what was measured: summaries of all rows and of groups of them."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from trainwright.spec.published import Bands, RefusedRow
from trainwright.spec.validation import Judged, Summary, Validation

GROUPS: dict[str, Callable[[Judged], str]] = {
    "architecture": lambda each: each.published.architecture,
    "gpu": lambda each: each.published.cluster,
    "precision": lambda each: each.published.precision_class,
    "software": lambda each: each.published.software,
    "publisher": lambda each: each.published.publisher,
    "source": lambda each: each.published.source,
}


def validation(
    judged: Sequence[Judged], refused: Iterable[RefusedRow], bands: Bands | None, folds: str | None = None
) -> Validation:
    """The validation of rows that were judged."""
    groups: dict[str, tuple[Summary, ...]] = {}
    for by, name_of in GROUPS.items():
        members: dict[str, list[Judged]] = {}
        for each in judged:
            members.setdefault(name_of(each), []).append(each)
        summaries = (summary(name, rows, bands) for name, rows in members.items())
        groups[by] = tuple(sorted(summaries, key=lambda each: (-each.n, each.name)))
    errors = [each.memory_error for each in judged if each.memory_error is not None]
    return Validation(
        judged=tuple(judged),
        refused=tuple(refused),
        whole=summary("all", judged, bands) if judged else None,
        groups=groups,
        memory=summary_of_errors("memory", errors) if errors else None,
        folds=folds,
    )


def summary(name: str, judged: Sequence[Judged], bands: Bands | None = None) -> Summary:
    """Errors of the step times of several rows."""
    coverage = None if bands is None else float(np.mean([each.is_inside(bands) for each in judged]))
    return summary_of_errors(name, [each.error for each in judged]).changed(band_coverage=coverage)


def summary_of_errors(name: str, errors: Sequence[float]) -> Summary:
    absolute = np.abs(errors)
    return Summary(
        name=name,
        n=len(errors),
        median_abs=float(np.median(absolute)),
        mean_abs=float(np.mean(absolute)),
        p90_abs=float(np.quantile(absolute, 0.9)),
        bias=float(np.median(errors)),
    )
