"""`trainwright validate`: the planner held against a table of published, measured runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson

EXAMPLE = "Example: trainwright validate published_runs.csv --json"


class Fold(StrEnum):
    """What is left out together."""

    source = "source"
    publisher = "publisher"


def validate(
    table: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CSV]", help="A table of runs, one a row; by default the one that comes with the program."
        ),
    ] = None,
    cv: Annotated[
        Fold | None,
        typer.Option(
            help="Judge each row with constants fitted to these and the program's rows without its source, or "
            "publisher; takes minutes."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict every run of a table and compare with what was measured, by GPU, architecture and source. Exit
    status 1 where all rows are refused."""
    from trainwright.cli import catalogue
    from trainwright.cli.published import judge, read_runs
    from trainwright.measure.validation import validation

    runs, unread = read_runs(table)
    judged, refused = judge(runs)
    if cv is not None and judged:
        from trainwright.cli.fitting import judged_apart

        judged = judged_apart(judged, cv.value)
    result = validation(judged, [*unread, *refused], catalogue.bands(), folds=None if cv is None else cv.value)
    if as_json:
        from trainwright.cli.output import show_json

        show_json(result.report())
    else:
        from trainwright.cli.output import show
        from trainwright.present.validation import validation_view

        show(validation_view(result))
    if not judged:
        raise typer.Exit(1)
