"""`trainwright sweep`: predictions of a run at many values of its fields, or on more and more devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

if TYPE_CHECKING:
    from trainwright.spec.run import Run
    from trainwright.spec.sweep import Sweep

EXAMPLE = "Example: trainwright sweep run.toml --over recipe.micro_batch=1,2,4 --over recipe.recompute=none,full"

Over = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=V1,V2,...",
        help="Values of any field, as --set takes them; given again, all combinations are predicted.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N1,N2,...", help="Numbers of devices: dp grows, all else and the global batch stay as they are."
    ),
]
SvgFile = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Plot step time and MFU into this file, as SVG.")
]


def sweep(
    run_file: RunFile,
    over: Over = None,
    gpus: Gpus = None,
    assignments: Assignments = None,
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Predict a run at each combination of some fields' values. Exit status 1 where nothing fits.

    What is no legal run is listed with the reason: --over layout.tp=1,2,3 --over recipe.micro_batch=1,2.
    """
    from trainwright.cli import files
    from trainwright.spec.sweep import axes

    if svg is not None:
        files.require_place(svg)
    values = axes(over or [], gpus)
    swept = _swept(files.read_run(run_file, assignments), values).require_legal()
    if svg is not None:
        from trainwright.present.sweep import sweep_svg

        files.write_text(svg, sweep_svg(swept))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(swept.report())
    else:
        from trainwright.cli.output import show
        from trainwright.present.sweep import sweep_view

        show(sweep_view(swept))
        if svg is not None:
            show(f"wrote {svg}")
    if not swept.fitting:
        raise typer.Exit(1)


def _swept(run: "Run", values: dict[str, list]) -> "Sweep":
    """All points predicted; on a terminal a bar shows how far it is."""
    from trainwright.cli.output import console
    from trainwright.cli.planner import predicted
    from trainwright.cli.progress import Progress
    from trainwright.spec.errors import InvalidSpec
    from trainwright.spec.sweep import IllegalPoint, Sweep, SweepPoint, combinations, varied

    points, illegal = [], []
    combined = list(combinations(values))
    screen = console(errors=True)
    with Progress(screen) as progress:
        for at, point in enumerate(combined):
            if screen.is_terminal:
                progress.show("predicting", at / len(combined))
            try:
                points.append(SweepPoint(values=point, prediction=predicted(varied(run, point))))
            except InvalidSpec as error:
                illegal.append(IllegalPoint(point, str(error)))
    return Sweep(run_name=run.name, fields=tuple(values), points=tuple(points), illegal=tuple(illegal))
