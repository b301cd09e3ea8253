"""Fits the planner's free constants to the published runs that come with it, and says how well it does.

Prints each constant with its prior, its range and its fit, and the errors in three ways: with the constants of the
fit (in-sample), and with constants that were fitted without a row's source, or without its publisher. Ends with
status 1 where a constant runs into the end of its physical range: then the model of an operation is wrong, not the
constant. `--write` puts the values into `data/constants.toml`, the bands into `data/bands.toml`, and the report
into `benchmarks/planner_validation.md`. Takes minutes on one core.

    python benchmarks/fit_published.py [--write]
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tomlkit

from trainwright.cli import catalogue
from trainwright.cli.fitting import cross_validated, fitted_to
from trainwright.cli.published import judge, read_runs
from trainwright.measure.bands import bands_of
from trainwright.measure.validation import summary
from trainwright.spec.constants import Constant
from trainwright.spec.published import Bands
from trainwright.spec.validation import Judged, Summary

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "src" / "trainwright" / "data"
SPLITS = ("all", "dense", "moe")
WORST = 25


def split(judged: Sequence[Judged], name: str) -> list[Judged]:
    return [each for each in judged if name in ("all", each.published.architecture)]


def errors_table(ways: dict[str, Sequence[Judged]], bands: Bands) -> list[str]:
    """Median / mean / P90 of each way and split."""
    lines = [
        "| constants | rows | n | median | mean | P90 | bias | in band |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, judged in ways.items():
        for name in SPLITS:
            lines.append(f"| {way} | {name} | {_cells(summary(name, split(judged, name), bands))} |")
    return lines


def _cells(each: Summary) -> str:
    covered = "" if each.band_coverage is None else f"{each.band_coverage:.0%}"
    figures = (each.median_abs, each.mean_abs, each.p90_abs)
    return f"{each.n} | {' | '.join(f'{figure:.1%}' for figure in figures)} | {each.bias:+.1%} | {covered}"


def groups_table(
    title: str, judged: Sequence[Judged], name_of: Callable[[Judged], str], bands: Bands
) -> list[str]:
    """The same by group, the largest first."""
    members: dict[str, list[Judged]] = {}
    for each in judged:
        members.setdefault(name_of(each), []).append(each)
    lines = [f"| {title} | n | median | mean | P90 | bias | in band |", "|---|---|---|---|---|---|---|"]
    for name, rows in sorted(members.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        lines.append(f"| {name} | {_cells(summary(name, rows, bands))} |")
    return lines


def constants_table(constants: Sequence[Constant]) -> list[str]:
    lines = ["| constant | prior | fit | in sd | range | |", "|---|---|---|---|---|---|"]
    for each in constants:
        sds = np.log(each.value / each.prior) / each.log_sd
        mark = "AT THE END OF ITS RANGE" if each.is_at_its_border else ""
        within = f"{each.low:.3g} to {each.high:.3g}"
        lines.append(f"| `{each.name}` | {each.prior:.4g} | {each.value:.4g} | {sds:+.1f} | {within} | {mark} |")
    return lines


def worst_table(judged: Sequence[Judged]) -> list[str]:
    lines = ["| row | run | error | source |", "|---|---|---|---|"]
    for each in sorted(judged, key=lambda one: -abs(one.error))[:WORST]:
        run = each.published
        lines.append(
            f"| {run.id} | {run.model.name}, {run.layout.world} x {run.gpu}, {run.recipe.precision} | "
            f"{each.error:+.0%} | {run.source} |"
        )
    return lines


def write_constants(constants: Sequence[Constant]) -> None:
    """Only the values change; comments and order stay."""
    path = DATA / "constants.toml"
    document = tomlkit.parse(path.read_text("utf-8"))
    values = {each.name: each.value for each in constants}
    for entry in document["constant"]:  # pyright: ignore[reportGeneralTypeIssues]
        if entry["name"] in values:  # another may have come while this ran
            entry["value"] = values[entry["name"]]
    path.write_text(tomlkit.dumps(document), "utf-8")


def write_bands(bands: Bands) -> None:
    heading = (
        "# How measured step times lie about predictions of a planner that had not seen them: multipliers of the\n"
        "# prediction. Written by benchmarks/fit_published.py --write.\n\n"
    )
    (DATA / "bands.toml").write_text(heading + tomlkit.dumps(bands.plain()), "utf-8")


def main() -> int:
    started_s = time.perf_counter()
    runs, unread = read_runs(None)
    judged, refused = judge(runs)
    problem, fitted = fitted_to(judged)
    values = problem.values(fitted.unknowns)
    constants = [
        each.changed(value=min(max(float(f"{values[each.name]:.4g}"), each.low), each.high))
        for each in catalogue.constants()
    ]
    predicted_s = np.exp(fitted.errors) * problem.seen_s
    inside = [one.changed(predicted_step_s=float(each)) for one, each in zip(judged, predicted_s, strict=True)]
    by_source = cross_validated(problem, fitted, judged, "source")
    by_publisher = cross_validated(problem, fitted, judged, "publisher")
    bands = bands_of(by_source, by_publisher)
    ways = {"fitted to all rows": inside, "without the row's source": by_source}
    ways["without the row's publisher"] = by_publisher
    lines = [
        "# How well the planner predicts published runs",
        "",
        f"Written by `python benchmarks/fit_published.py --write`: {len(judged)} published, measured runs of",
        f"`data/published_runs.csv` predicted, {len(refused) + len(unread)} refused. An error is",
        "predicted / published - 1; median, mean and 90th percentile are of its absolute value, the bias is the",
        "median of the signed one. Flags and kinds of software were chosen with a look at these rows, so unseen",
        "ones will be somewhat worse.",
        "",
        *errors_table(ways, bands),
        "",
        "## Constants",
        "",
        *constants_table(constants),
        "",
        "## By software, without the row's source",
        "",
        *groups_table("software", by_source, lambda each: each.published.software, bands),
        "",
        "## By device, without the row's source",
        "",
        *groups_table("cluster", by_source, lambda each: each.published.cluster, bands),
        "",
        "## By publisher, without the row's publisher",
        "",
        *groups_table("publisher", by_publisher, lambda each: each.published.publisher, bands),
        "",
        "## By source, without the row's source",
        "",
        *groups_table("source", by_source, lambda each: each.published.source, bands),
        "",
        "## Bands",
        "",
        f"{bands.share:.0%} of measured step times lie between these multiples of the predicted one; the exponent",
        f"{bands.widening} widens them where something is not known.",
        "",
        "| class | from | to | runs |",
        "|---|---|---|---|",
        *(
            f"| {name.replace('_', ', software ')} | {band.low:.2f} | {band.high:.2f} | {band.rows} |"
            for name, band in (
                (name, getattr(bands, name)) for name in ("dense_seen", "dense_unseen", "moe_seen", "moe_unseen")
            )
        ),
        "",
        "## Largest errors, without the row's source",
        "",
        *worst_table(by_source),
    ]
    print("\n".join(lines))
    print(f"\n{time.perf_counter() - started_s:.0f} s")
    if "--write" in sys.argv[1:]:
        write_constants(constants)
        write_bands(bands)
        (HERE / "planner_validation.md").write_text("\n".join(lines) + "\n", "utf-8")
    return 1 if any(each.is_at_its_border for each in constants) else 0


if __name__ == "__main__":
    sys.exit(main())
