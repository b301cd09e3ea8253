"""A validation for people: summaries by group, the worst rows, and the rows that were refused."""

from collections.abc import Iterable

from rich.console import Group, RenderableType

from trainwright.present.parts import bullets, facts, headline, section, table
from trainwright.spec.units import seconds_text
from trainwright.spec.validation import Judged, Summary, Validation

TITLES = {
    "architecture": "By architecture",
    "gpu": "By cluster",
    "precision": "By precision",
    "software": "By software",
    "publisher": "By publisher",
    "source": "By source",
}
WORST = 15
"""Rows that are shown one by one."""


def validation_view(validation: Validation) -> RenderableType:
    """All of a validation as tables."""
    n, refused = len(validation.judged), len(validation.refused)
    how = (
        f"constants fitted without each row's {validation.folds}"
        if validation.folds
        else "the catalogue's constants"
    )
    parts: list[RenderableType] = [
        headline(f"{n} published runs predicted, {refused} refused", f"error = predicted / published - 1; {how}")
    ]
    if validation.whole is not None:
        parts.append(section("Step time", facts(_facts(validation.whole))))
    if validation.memory is not None:
        memory = [each for each in _facts(validation.memory) if each[0] != "inside the band"]
        parts.append(section(f"Peak memory, {validation.memory.n} runs", facts(memory)))
    parts += [section(title, _summaries(validation.groups[by])) for by, title in TITLES.items()]
    worst = sorted(validation.judged, key=lambda each: -abs(each.error))[:WORST]
    if worst:
        parts.append(section("Largest errors", _rows(worst)))
    if refused:
        parts.append(section("Refused", bullets(f"{each.id}: {each.reason}" for each in validation.refused)))
    return Group(*parts)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("median error", f"{summary.median_abs:.1%}"),
        ("mean", f"{summary.mean_abs:.1%}"),
        ("90th percentile", f"{summary.p90_abs:.1%}"),
        ("bias", f"{summary.bias:+.1%}"),
    ]
    covered = summary.band_coverage
    return rows if covered is None else [*rows, ("inside the band", f"{covered:.0%}")]


def _summaries(summaries: Iterable[Summary]) -> RenderableType:
    columns = [("", "<"), *((title, ">") for title in ("runs", "median", "mean", "P90", "bias", "in band"))]
    return table(
        columns,
        [
            [
                each.name,
                str(each.n),
                f"{each.median_abs:.1%}",
                f"{each.mean_abs:.1%}",
                f"{each.p90_abs:.1%}",
                f"{each.bias:+.1%}",
                "" if each.band_coverage is None else f"{each.band_coverage:.0%}",
            ]
            for each in summaries
        ],
    )


def _rows(judged: Iterable[Judged]) -> RenderableType:
    columns = [("id", "<"), ("predicted", ">"), ("published", ">"), ("error", ">"), ("run", "<"), ("source", "<")]
    return table(
        columns,
        [
            [
                each.published.id,
                seconds_text(each.predicted_step_s),
                seconds_text(each.published.step_s),
                f"{each.error:+.0%}",
                f"{each.published.model.name}, {each.published.layout.world} x {each.published.gpu}",
                each.published.source,
            ]
            for each in judged
        ],
    )
