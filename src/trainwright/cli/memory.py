"""`trainwright memory`: what each pipeline rank holds over the time of a step, by cause."""

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

EXAMPLE = "Example: trainwright memory run.toml --rank 0 --svg memory.svg"

Rank = Annotated[
    int | None, typer.Option(metavar="R", help="The pipeline rank to show over time; by default the fullest.")
]
SvgFile = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="Draw its bytes by cause over time into this file, as SVG."),
]


def memory(
    run_file: RunFile,
    rank: Rank = None,
    assignments: Assignments = None,
    svg: SvgFile = None,
    as_json: AsJson = False,
) -> None:
    """Show when each pipeline rank is fullest and with what. Exit status 1 where a rank doesn't fit."""
    from trainwright.cli import files
    from trainwright.cli.planner import predicted
    from trainwright.plan.memory_over_time import memory_over_time
    from trainwright.spec.errors import reject

    if svg is not None:
        files.require_place(svg)
    run = files.read_run(run_file, assignments)
    last = run.layout.pp - 1
    if rank is not None and not 0 <= rank <= last:
        reject("--rank", rank, f"the run has {last + 1:,} pipeline rank(s); it may be 0 to {last:,}")
    predicted(run)  # refuses numbers that overflow
    held = memory_over_time(run)
    chosen = held.fullest if rank is None else held.ranks[rank]
    if svg is not None:
        from trainwright.present.memory import memory_svg

        files.write_text(svg, memory_svg(held, chosen))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(held.report(chosen.pp_rank))
    else:
        from trainwright.cli.output import show
        from trainwright.present.memory import memory_view

        show(memory_view(held, chosen))
        if svg is not None:
            show(f"wrote {svg}")
    if not held.fits:
        raise typer.Exit(1)
