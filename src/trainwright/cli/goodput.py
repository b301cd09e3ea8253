"""`trainwright goodput`: what failures cost a run, how often to save and where to, and how many spares to hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

if TYPE_CHECKING:
    from trainwright.spec.cluster import ClusterSpec

EXAMPLE = "Example: trainwright goodput run.toml --failure-rate 6.5 --restart-s 60 --svg goodput.svg"

MOST_DAYS = 1_000_000
"""Of work: more is no training run."""

FailureRate = Annotated[
    float | None,
    typer.Option(metavar="R", help="Failures in 1,000 days of one node; without it the cluster's own."),
]
SvgFile = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="Plot the time that counts over intervals and devices, as SVG."),
]


def goodput(
    run_file: RunFile,
    failure_rate: FailureRate = None,
    detect_s: Annotated[
        float | None, typer.Option(metavar="S", help="From a failure until it is noticed.")
    ] = None,
    restart_s: Annotated[
        float | None, typer.Option(metavar="S", help="From then until processes are ready to load.")
    ] = None,
    repair_s: Annotated[
        float | None, typer.Option(metavar="S", help="Until a failed node is a spare again.")
    ] = None,
    storage_bytes_per_s: Annotated[
        float | None, typer.Option(metavar="B", help="Of storage, for one node while all use it.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(metavar="M", help="Nodes that hold each state in memory, its own among them.")
    ] = 2,
    interval_s: Annotated[
        float | None, typer.Option(metavar="S", help="Work between two saves; without it the best.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="Of work without failures; without it what the token budget takes.")
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="To simulate of each way to save.")] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the simulation.")] = 0,
    assignments: Assignments = None,
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what failures cost a run: time that counts by closed forms and by simulation, the best interval between
    saves, spares, days and dollars at P10, P50 and P90; saves to storage, beside the steps, and to other nodes'
    memory side by side.
    """
    from trainwright.cli import catalogue, files
    from trainwright.cli.planner import predicted
    from trainwright.plan.goodput.answer import goodput as judged
    from trainwright.spec.errors import reject
    from trainwright.spec.goodput import GoodputQuestion
    from trainwright.spec.units import SECONDS_PER_DAY

    if svg is not None:
        files.require_place(svg)
    said = {
        "--failure-rate": failure_rate,
        "--detect-s": detect_s,
        "--restart-s": restart_s,
        "--repair-s": repair_s,
        "--storage-bytes-per-s": storage_bytes_per_s,
        "--interval-s": interval_s,
        "--days": days,
    }
    may_be_zero = ("--detect-s", "--restart-s", "--repair-s")
    for option, value in said.items():
        least = 0.0 if option in may_be_zero else 1e-12
        if value is not None and not least <= value <= 1e15:
            reject(option, value, f"must be a number {'from zero on' if option in may_be_zero else 'above zero'}")
    for option, count, least, most in (("--replicas", replicas, 2, 64), ("--runs", runs, 10, 100_000)):
        if not least <= count <= most:
            reject(option, count, f"must be from {least} to {most:,}")
    if seed < 0:
        reject("--seed", seed, "must be 0 or more")

    run = files.read_run(run_file, assignments)
    prediction = predicted(run)
    useful_days = days or prediction.days
    if useful_days is None:
        reject("--days", "none", "the run has no token budget; give --days, or --set budget.tokens=15.6e12")
    if useful_days > MOST_DAYS:
        reject("--days", useful_days, f"must be at most {MOST_DAYS:,}; give fewer, or a smaller budget")
    cluster = _told(
        catalogue.with_recovery(run.cluster),
        failure_rate,
        detect_s=detect_s,
        restart_s=restart_s,
        repair_s=repair_s,
        storage_bytes_per_s=storage_bytes_per_s,
    )
    question = GoodputQuestion(
        useful_s=useful_days * SECONDS_PER_DAY, replicas=replicas, interval_s=interval_s, runs=runs, seed=seed
    )
    found = judged(run.changed(cluster=cluster), prediction.step_s, question, catalogue.published_failures())
    if svg is not None:
        from trainwright.present.goodput import goodput_svg

        files.write_text(svg, goodput_svg(found))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(found.report())
    else:
        from trainwright.cli.output import show
        from trainwright.present.goodput import goodput_view

        show(goodput_view(found))
        if svg is not None:
            show(f"wrote {svg}")


def _told(cluster: "ClusterSpec", failure_rate: float | None, **recovery: float | None) -> "ClusterSpec":
    """The cluster with what the options say; their source is the user."""
    from trainwright.spec.cluster import Provenance

    mark = Provenance(kind="assumed", source="set by the user")
    values: dict[str, float] = {f"recovery.{name}": value for name, value in recovery.items() if value is not None}
    if failure_rate is not None:
        values["failures_per_device_day"] = failure_rate / 1000 / cluster.node.devices
    if not values:
        return cluster
    sourced = cluster.model_copy(update={"provenance": {**cluster.provenance, **dict.fromkeys(values, mark)}})
    return sourced.with_values(values.items())
