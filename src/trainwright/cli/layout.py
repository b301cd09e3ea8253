"""`trainwright layout`: the picture of a run's ranks, groups and links."""

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

EXAMPLE = "Example: trainwright layout run.toml --set layout.order=tp-cp-dp-pp --svg layout.svg"

SvgFile = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into this file, as SVG.")]


def layout(
    run_file: RunFile, assignments: Assignments = None, svg: SvgFile = None, as_json: AsJson = False
) -> None:
    """Show which rank does what, the groups of each axis, and the links that their communication rides."""
    from trainwright.cli import files
    from trainwright.spec.wiring import wiring

    if svg is not None:
        files.require_place(svg)
    placed = wiring(files.read_run(run_file, assignments))
    if svg is not None:
        from trainwright.present.layout_drawing import layout_svg

        files.write_text(svg, layout_svg(placed))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(placed.report())
        return
    from trainwright.cli.output import show
    from trainwright.present.layout import layout_view

    show(layout_view(placed))
    if svg is not None:
        show(f"wrote {svg}")
