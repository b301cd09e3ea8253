"""`trainwright compare`: a finished run against its prediction, by cause."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson

if TYPE_CHECKING:
    from trainwright.spec.answers import Comparison

EXAMPLE = "Example: trainwright compare out/run --tolerance 0.2"


def compare(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `train --out` wrote.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far the step's time may be off, as a fraction of the prediction.")
    ] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Hold what a run took against what was predicted. Exit status 1 where the step's time is out of tolerance."""
    from trainwright.measure.compare import within_tolerance

    comparison = compared(directory)
    accepted = within_tolerance(comparison, tolerance)
    if as_json:
        from trainwright.cli.output import show_json

        show_json({**comparison.report(), "tolerance": tolerance, "within_tolerance": accepted})
    else:
        from trainwright.cli.output import show
        from trainwright.present.comparisons import comparison_view, verdict_view

        show(comparison_view(comparison), verdict_view(comparison, tolerance, accepted))
    if not accepted:
        raise typer.Exit(1)


def compared(directory: Path) -> "Comparison":
    """The comparison of the run that a directory holds."""
    from trainwright.cli import files
    from trainwright.cli.planner import predicted
    from trainwright.measure.compare import compare as compare_records
    from trainwright.measure.records import parse_rank_records
    from trainwright.spec.errors import InvalidSpec

    if not directory.is_dir():
        raise InvalidSpec(f"{directory}: no such directory; name one that `train --out` wrote")
    run = files.read_run(directory / "run.toml")
    ledger = directory / "ledger.jsonl"
    if not ledger.exists():
        raise InvalidSpec(f"{ledger}: no such file; a run writes it at its end: train this one to the end")
    return compare_records(run, predicted(run), parse_rank_records(files.read_text(ledger), str(ledger)))
