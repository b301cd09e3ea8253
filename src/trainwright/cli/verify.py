"""`trainwright verify`: the run's layout at small width on this machine, in float64, against the plain model."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trainwright.cli.options import AsJson, Assignments
from trainwright.cli.worker import Stream, run_workers, started_by_torchrun, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainwright.spec.run import Run
    from trainwright.spec.verdict import AxisFinding, Verdict, Verification

EXAMPLE = (
    "Example: trainwright verify run.toml; trainwright verify run.toml --inject norm-tp, which must be found; "
    "trainwright verify --inject list"
)
LIST = "list"

Processes = Annotated[
    int, typer.Option(min=1, metavar="N", help="At most so many ranks; a larger layout is scaled down to them.")
]


def verify(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.TOML", help="A run file, as `plan --out` writes it.")
    ] = None,
    processes: Processes = 8,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps that are compared.")] = 3,
    inject: Annotated[
        str | None,
        typer.Option(metavar="FAULT", help="Plant a known fault, which must be found; `list` names them."),
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
    stream: Stream = False,
) -> None:
    """Hold loss, gradients, norm and weights of a run's layout against the plain model. Exit status 1 if unequal.

    The run goes through its own program on this machine's processors: same kinds of parallelism, schedule,
    sharding and recompute, with few narrow layers, short sequences and float64. Where a step differs, the run is
    repeated with each axis at degree 1, to tell which of them the difference hangs on.
    """
    from trainwright.cli import files, output
    from trainwright.cli.planner import resolved
    from trainwright.cli.progress import Progress
    from trainwright.spec.errors import reject
    from trainwright.spec.miniature import miniature

    if inject == LIST:
        _list_faults(as_json)
        return
    if run_file is None:
        reject("RUN.TOML", "", "is missing; name a run file, or see --inject list")
    if stream and started_by_torchrun():
        _work(files.read_run(run_file), steps, inject or "")
    refuse_torchrun("verify")
    run = resolved(files.read_run(run_file, assignments))
    small = miniature(run, processes)
    require_verifiable(small.run, inject or "")
    with Progress(output.console(errors=True)) as progress:
        found = verified(small.run, steps, inject or "", progress.show)
    if as_json:
        changes = [change._asdict() for change in small.changes]
        output.show_json({**found.report(), "run": small.run.plain(), "scaled": changes})
    else:
        from trainwright.present.verification import miniature_view, verdict_view

        output.show(miniature_view(run, small), verdict_view(small.run, found))
    if not found.verdict.equal:
        raise typer.Exit(1)


def refuse_torchrun(verb: str) -> None:
    """Of verbs that scale a run to this machine, and so start their own processes."""
    from trainwright.spec.errors import InvalidSpec

    if started_by_torchrun():
        raise InvalidSpec(f"{verb} starts its own processes; call it without torchrun")


def require_verifiable(run: "Run", fault: str) -> None:
    """Refuse what the trainer can't do, and a fault that the run can't have."""
    from trainwright.train.door import require_trainable
    from trainwright.train.verify.faults import require_fault

    require_trainable(run)
    if fault:
        require_fault(fault, run)


def verified(run: "Run", steps: int, fault: str, on_progress: "Callable[[str, float], None]") -> "Verification":
    """A miniature's verdict; and where it is no, what becomes of it without each axis."""
    from trainwright.spec.miniature import without
    from trainwright.spec.verdict import Verification
    from trainwright.train.verify.faults import FAULTS

    on_progress(f"{steps} steps on {run.layout.world} processes", 0.0)
    verdict = _verdict(run, steps, fault)
    findings: dict[str, AxisFinding] = {}
    if verdict.first is not None:
        axes = [axis for axis in ("tp", "cp", "ep", "pp", "dp") if getattr(run.layout, axis) > 1]
        for at, axis in enumerate(axes):
            on_progress(f"again with {axis} at 1", at / len(axes))
            other = without(run, axis)
            if fault and FAULTS[fault].needs(other):
                findings[axis] = "not there"
            else:
                found = _verdict(other, verdict.first.step, fault)
                findings[axis] = "equal" if found.equal else "unequal"
    return Verification(verdict=verdict, fault=fault, without=findings)


def _verdict(run: "Run", steps: int, fault: str) -> "Verdict":
    from trainwright.cli import files
    from trainwright.spec import toml
    from trainwright.spec.verdict import Verdict

    messages: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.toml"
        files.write_text(path, toml.write(run))
        arguments = ["verify", str(path), "--steps", str(steps), *(["--inject", fault] if fault else [])]
        run_workers(arguments, run.layout.world, messages.append)
    return Verdict.parse(messages[-1])


def _work(run: "Run", steps: int, fault: str) -> NoReturn:
    """What each rank does."""
    from trainwright.train.mesh import failing_in_turn, joined, leave
    from trainwright.train.verify.verify import verify as carry_out

    with joined(run.layout, run.recipe.dp_replicate, on_cpu=True) as mesh, failing_in_turn(mesh):
        verdict = carry_out(run, mesh, steps, fault)
    if mesh.rank == 0:
        tell(verdict.plain())
    leave(0)


def _list_faults(as_json: bool) -> None:
    from trainwright.cli import output
    from trainwright.train.verify.faults import FAULTS

    if as_json:
        output.show_json({"faults": {name: fault.text for name, fault in FAULTS.items()}})
        return
    from trainwright.present.parts import facts

    output.show(facts((name, fault.text) for name, fault in FAULTS.items()))
