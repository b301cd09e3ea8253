"""`trainwright trace`: one step of the run's program on this machine, with every collective in order."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile
from trainwright.cli.verify import Processes, refuse_torchrun
from trainwright.cli.worker import Stream, run_workers, started_by_torchrun

if TYPE_CHECKING:
    from trainwright.spec.run import Run
    from trainwright.spec.traffic import Traffic

EXAMPLE = (
    "Example: trainwright trace run.toml --rank 2; "
    "trainwright trace run.toml --out trace.json, and open trace.json in ui.perfetto.dev"
)


def trace(
    run_file: RunFile,
    processes: Processes = 8,
    rank: Annotated[int, typer.Option(min=0, help="Whose collectives the table shows.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write a trace of all ranks here, as JSON.")
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
    stream: Stream = False,
) -> None:
    """Run one step at small width, scaled as `verify` does it, and show each collective: where, on which axis and
    ranks, how many bytes, and what it overlaps with."""
    from trainwright.cli import files, output
    from trainwright.cli.planner import resolved
    from trainwright.cli.progress import Progress
    from trainwright.spec.errors import reject
    from trainwright.spec.miniature import miniature
    from trainwright.train.door import require_trainable

    if stream and started_by_torchrun():
        assert out is not None
        _work(files.read_run(run_file), out)
    refuse_torchrun("trace")
    if out is not None:
        files.require_place(out)
    run = resolved(files.read_run(run_file, assignments))
    small = miniature(run, processes)
    require_trainable(small.run)
    if rank >= small.run.layout.world:
        reject("--rank", rank, f"must be below the {small.run.layout.world} ranks that are run")
    with Progress(output.console(errors=True)) as progress:
        progress.show(f"a step on {small.run.layout.world} processes", 0.0)
        found = _traffic(small.run)
    if out is not None:
        from trainwright.present.traffic import traffic_json

        files.write_text(out, traffic_json(small.run, found))
    if as_json:
        changes = [change._asdict() for change in small.changes]
        output.show_json({**found.report(), "run": small.run.plain(), "scaled": changes})
        return
    from trainwright.present.traffic import traffic_view
    from trainwright.present.verification import miniature_view

    output.show(miniature_view(run, small), traffic_view(found, rank))
    if out is not None:
        output.show(f"\nwrote {out}: {len(found.collectives):,} collectives on {small.run.layout.world} ranks")


def _traffic(run: "Run") -> "Traffic":
    """What the workers saw."""
    import json

    from trainwright.cli import files
    from trainwright.spec import toml
    from trainwright.spec.traffic import Traffic

    with tempfile.TemporaryDirectory() as directory:
        path, kept = Path(directory) / "run.toml", Path(directory) / "traffic.json"
        files.write_text(path, toml.write(run))
        arguments = ["trace", str(path), "--out", str(kept)]
        run_workers(arguments, run.layout.world, lambda message: None)
        return Traffic.parse(json.loads(files.read_text(kept)))


def _work(run: "Run", out: Path) -> NoReturn:
    """What each rank does; the first one writes what all saw."""
    from trainwright.cli import files
    from trainwright.train.mesh import failing_in_turn, joined, leave
    from trainwright.train.trace.trace import trace as carry_out

    with joined(run.layout, run.recipe.dp_replicate, on_cpu=True) as mesh, failing_in_turn(mesh):
        found = carry_out(run, mesh)
    if mesh.rank == 0:
        files.write_text(out, found.model_dump_json())
    leave(0)
