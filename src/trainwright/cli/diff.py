"""`trainwright diff`: two runs, field by field and cause by cause."""

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson

EXAMPLE = "Example: trainwright diff run.toml run.toml --set recipe.recompute=full"

FirstRun = Annotated[Path, typer.Argument(metavar="A.TOML", help="A run file.")]
SecondRun = Annotated[Path, typer.Argument(metavar="B.TOML", help="The run file that is held against it.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set any field of B; may be given again."),
]


def diff(a_file: FirstRun, b_file: SecondRun, assignments: Changes = None, as_json: AsJson = False) -> None:
    """Say in which fields two runs differ, which one is faster, and which causes of time and memory make it so."""
    from trainwright.cli import files
    from trainwright.cli.planner import predicted
    from trainwright.spec.difference import difference

    a, b = files.read_run(a_file), files.read_run(b_file, assignments)
    found = difference(a, b, predicted(a), predicted(b))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(found.report())
        return
    from trainwright.cli.output import show
    from trainwright.present.diff import diff_view

    show(diff_view(found, str(a_file), " ".join([str(b_file), *(f"--set {each}" for each in assignments or [])])))
