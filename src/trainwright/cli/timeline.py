"""`trainwright timeline`: the predicted step, act by act, as a trace for ui.perfetto.dev."""

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import Assignments, RunFile

EXAMPLE = "Example: trainwright timeline run.toml --out trace.json, and open trace.json in ui.perfetto.dev"

Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the trace here, as JSON.")]
Microbatches = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Show a step of N microbatches; by default all, or where that is too many, as many as fit.",
    ),
]


def timeline(
    run_file: RunFile, out: Out, assignments: Assignments = None, microbatches: Microbatches = None
) -> None:
    """Write the predicted step of every pipeline rank as a trace: acts, exposed communication, bubbles, sends."""
    from trainwright.cli import files
    from trainwright.cli.planner import predicted
    from trainwright.plan import timeline as planner
    from trainwright.present.trace import trace_json
    from trainwright.spec.units import seconds_text

    files.require_place(out)
    run = files.read_run(run_file, assignments)
    predicted(run)  # refuses numbers that overflow
    made = planner.timeline(run, microbatches)
    files.write_text(out, trace_json(made))
    told = f"wrote {out}: {len(made.events):,} events on {len(made.stages):,} pipeline rank(s), a step of "
    told += f"{seconds_text(made.step_s)} with {made.num_microbatches:,} microbatch(es)"
    if made.is_shortened:
        told += f", shown instead of the run's {made.of_microbatches:,}; --microbatches says how many"
    typer.echo(told)
