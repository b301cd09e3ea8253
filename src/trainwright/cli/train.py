"""`trainwright train`: carry out a run file on this node's processes, or as one worker of one's own torchrun."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile
from trainwright.cli.worker import NOTE, Stream, run_workers, started_by_torchrun, tell

if TYPE_CHECKING:
    from trainwright.spec.record import RankRecord, StepRecord, StepSeconds
    from trainwright.spec.run import Run
    from trainwright.spec.window import StepWindow

EXAMPLE = (
    "Example: trainwright train run.toml --steps 100 --out out/run; "
    "or, under your own launcher: torchrun --nproc-per-node 4 -m trainwright train run.toml"
)

ACCELERATORS = {"cuda": "/dev/nvidiactl", "rocm": "/dev/kfd"}
"""The file by which a driver shows that it is there."""

AFTER_THE_FIRST_S = 2.0
FAULTS, MOST_SAID = "faults.jsonl", 40
"""The file of what went wrong, and how many lines of the workers' output a fault has with it."""

NEXT = "compare with: trainwright compare {out}; ask where the time went: trainwright explain {out}"

PROFILE, SNAPSHOT = "--profile", "--memory-snapshot"
Profile = Annotated[
    str | None,
    typer.Option(
        PROFILE,
        metavar="FIRST:LAST",
        help="Record these steps by torch.profiler, both among them, counted from 1.",
    ),
]
MemorySnapshot = Annotated[
    str | None,
    typer.Option(
        SNAPSHOT,
        metavar="FIRST:LAST",
        help="Record a GPU's allocations in these steps, for pytorch.org/memory_viz.",
    ),
]

Watched = Annotated[Path | None, typer.Option(hidden=True, help="Where this worker beats for its supervisor.")]
Plants = Annotated[
    Path | None, typer.Option(hidden=True, help="Faults to put into a supervised run, as `chaos` and tests do.")
]

OnProgress = Callable[[str, float], None]
"""Told what is being done, and which fraction of it is done."""


def train(
    run_file: RunFile,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after so many; without it the run's token budget says how many."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Gets run.toml, metrics.jsonl, ledger.jsonl and checkpoints; a run that left some here goes on.",
        ),
    ] = Path("out/run"),
    profile: Profile = None,
    memory_snapshot: MemorySnapshot = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
    stream: Stream = False,
    watched: Watched = None,
    plants: Plants = None,
) -> None:
    """Train a run: one process per rank of its layout, started on this node, as planned."""
    from trainwright.cli import files, output

    run = _resolved(files.read_run(run_file, assignments))
    planned = steps_of(run, steps)
    recorded = {name: text for name, text in ((PROFILE, profile), (SNAPSHOT, memory_snapshot)) if text is not None}
    windows_of(recorded, run, planned)
    if started_by_torchrun():
        _work(run, planned, out, stream, recorded, watched, plants)
    from trainwright.cli.progress import Progress

    with Progress(output.console(errors=True)) as progress:
        records = trained(run, planned, out, progress.show, recorded, plants)
    if as_json:
        # As in metrics.jsonl: null for the loss of a run that diverged, of which JSON has no number.
        last = json.loads(records[-1].model_dump_json()) if records else {}
        output.show_json({"path": str(out), "run_hash": run.hash, "steps": len(records), "last": last})
        return
    from trainwright.present.training import training_view

    ranks = ranks_of(out) if records else ()
    output.show(training_view(run, records, ranks), f"\nwrote {out}; {NEXT.format(out=out)}")


def steps_of(run: "Run", steps: int | None) -> int:
    """How many steps to train: what the user said, else what the budget buys."""
    from trainwright.spec.errors import reject

    chosen = steps or run.steps
    if chosen is None:
        reject("budget", "none", "the run has no token budget; say how far with --steps")
    return chosen


def windows_of(recorded: dict[str, str], run: "Run", steps: int) -> "dict[str, StepWindow]":
    """The windows of steps that options say; refuses what can't be recorded."""
    from trainwright.spec.window import parse_window
    from trainwright.train.door import require_recordable

    windows = {name: parse_window(text, name) for name, text in recorded.items()}
    require_recordable(run, steps, windows.get(PROFILE), windows.get(SNAPSHOT))
    return windows


def ranks_of(out: Path) -> "tuple[RankRecord, ...]":
    """What a finished run's ledger holds of each rank."""
    from trainwright.cli import files
    from trainwright.measure.records import parse_rank_records

    ledger = out / "ledger.jsonl"
    return parse_rank_records(files.read_text(ledger), str(ledger))


def trained(
    run: "Run",
    steps: int,
    out: Path,
    on_progress: OnProgress,
    recorded: dict[str, str] | None = None,
    plants: Path | None = None,
) -> "list[StepRecord]":
    """Train a run on this node and return its steps; the directory gets the run's files. `recorded`: windows of
    steps, by the option that says them. `plants`: faults to put into a run that is supervised."""
    from trainwright.present.training import causes_text
    from trainwright.spec.errors import reject
    from trainwright.spec.record import StepRecord, StepSeconds
    from trainwright.spec.supervision import FaultRecord
    from trainwright.train.door import require_trainable

    run = _resolved(run)
    require_trainable(run)
    require_machine(run)
    require_own_directory(run, out)
    if plants is not None and run.supervision is None:
        reject("--plants", str(plants), "is for a run that is supervised; set supervision.max_restarts")
    records: list[StepRecord] = []

    def on_message(message: dict[str, Any]) -> None:
        seconds = message.pop("causes", None)
        record = StepRecord.parse(message)
        while records and records[-1].step >= record.step:
            records.pop()  # a run that goes on from a commit does some steps again
        records.append(record)
        causes = "" if seconds is None else f"; {causes_text(StepSeconds.parse(seconds), record.step)}"
        on_progress(f"step {record.step} of {steps}, loss {record.loss:.3f}{causes}", record.step / steps)

    def on_fault(message: dict[str, Any], said: list[str]) -> None:
        fault = FaultRecord.parse(message)
        with (out / FAULTS).open("a") as file:
            file.write(json.dumps(fault.plain() | ({"said": said[-MOST_SAID:]} if said else {})) + "\n")
        typer.echo(f"{NOTE}{fault.text}", err=True)

    arguments = ["train", str(out / "run.toml"), "--steps", str(steps), "--out", str(out)]
    for name, text in (recorded or {}).items():
        arguments += [name, text]
    with _nothing_left_if_refused(out, records):
        keep_run(run, out)
        shards_of(run, on_progress)
        on_progress("starting processes", 0.0)
        supervised = run if run.supervision is not None else None
        run_workers(
            arguments, run.layout.world, on_message, on_fault=on_fault, supervised=supervised, plants=plants
        )
    return records


@contextmanager
def _nothing_left_if_refused(out: Path, records: "list[StepRecord]") -> Iterator[None]:
    """Leave nothing new where a run ends before its first step: what is wrong with data, say, workers find."""
    before, kept = set(out.glob("*")), out / "run.toml"
    missing = [each for each in (out, *out.parents) if not each.exists()]
    earlier = kept.read_bytes() if kept.is_file() else None
    try:
        yield
    except BaseException:
        if not records:
            for made in set(out.glob("*")) - before:
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            for made in missing:
                if made.is_dir() and not any(made.iterdir()):
                    made.rmdir()
            if earlier is not None:
                kept.write_bytes(earlier)
        raise


def _resolved(run: "Run") -> "Run":
    """The planner is asked only where recompute is left to it."""
    if run.recipe.recompute != "budget":
        return run
    from trainwright.cli.planner import resolved

    return resolved(run)


def require_machine(run: "Run") -> None:
    """Refuse a run that this node can't hold: of other devices, of more ranks, or of more memory."""
    from trainwright.cli.planner import predicted
    from trainwright.spec.errors import reject
    from trainwright.spec.units import bytes_text

    kind, ranks, node = run.cluster.device.kind, run.layout.world, run.cluster.node.devices
    if kind != "cpu" and not Path(ACCELERATORS[kind]).exists():
        reject("cluster.device.kind", kind, "this machine has no such device; plan for what `calibrate` writes")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if run.recipe.compile and kind == "cpu" and shutil.which(compiler) is None:
        remedy = f"needs the C++ compiler {compiler}; install it, name another in CXX, or set it to false"
        reject("recipe.compile", True, remedy)
    if ranks > node:
        reject(
            "layout", f"{ranks} ranks", f"a node of {run.cluster.name} holds {node}; start torchrun on each node"
        )
    if run.recipe.precision == "fp64":
        return  # for proofs on small models; clusters have no rates for it
    prediction = predicted(run)
    if not prediction.fits:
        missing = bytes_text(prediction.short_by_bytes)
        reject(
            "layout",
            f"{ranks} ranks",
            f"each is short by {missing} of memory; largest cause: "
            f"{prediction.largest_bytes_cause}; see trainwright predict",
        )


def require_own_directory(run: "Run", out: Path) -> None:
    """Refuse a directory that holds another run, unless commits lie there from which this one can go on."""
    from trainwright.cli import files
    from trainwright.spec.errors import InvalidSpec, reject
    from trainwright.spec.run import Run
    from trainwright.train.checkpoint.directory import FOLDER, saves_in

    kept = out / "run.toml"
    if not kept.exists():
        return
    try:
        other = files.read_noun(kept, Run)
    except InvalidSpec:
        reject("--out", str(out), "holds another run (unreadable); name a new directory, or remove it")
    if other.hash == run.hash:
        return
    directory = out / FOLDER if run.checkpoint is None else Path(run.checkpoint.directory or out / FOLDER)
    if any(save.is_committed for save in saves_in(directory)):
        from trainwright.train.checkpoint.identity import require_same_run

        require_same_run(other.plain(), run, str(out))
        return
    reject("--out", str(out), f"holds another run ({other.hash}); name a new directory, or remove it")


def keep_run(run: "Run", out: Path) -> None:
    """Write the run beside what it leaves."""
    from trainwright.cli import files
    from trainwright.spec import toml

    files.make_directory(out)
    files.write_text(out / "run.toml", toml.write(run))


def shards_of(run: "Run", on_progress: OnProgress = lambda what, done: None) -> Path:
    """The directory of the run's token shards; those that can be made here are, unless the cache has them."""
    if run.data.source == "shards":
        return Path(run.data.path)
    from trainwright.cli.files import cache_directory
    from trainwright.train.corpus import build_corpus

    return build_corpus(cache_directory(), run.data.vocab_size, on_progress)


def _work(
    run: "Run",
    steps: int,
    out: Path,
    stream: bool,
    recorded: dict[str, str],
    watched: Path | None,
    plants: Path | None,
) -> NoReturn:
    """What each rank does."""
    from trainwright.present.training import causes_text, utilization_text
    from trainwright.spec.errors import InvalidSpec
    from trainwright.train.checkpoint.keeper import directory_of
    from trainwright.train.faults.attendant import watched_rank
    from trainwright.train.faults.reasons import RunEnded
    from trainwright.train.loop import emulates_its_matmuls
    from trainwright.train.loop import train as carry_out
    from trainwright.train.mesh import Worker, leave

    is_kept = stream

    def on_step(record: "StepRecord", seconds: "StepSeconds | None") -> None:
        nonlocal is_kept
        if stream:
            tell(record.plain() | ({} if seconds is None else {"causes": seconds.plain()}))
            return
        if not is_kept:
            keep_run(run, out)  # a run that was refused leaves nothing
            is_kept = True
            if record.mfu:
                typer.echo(utilization_text(run, record))
        causes = "" if seconds is None else f"; {causes_text(seconds, record.step)}"
        used = f", MFU {record.mfu:.1%}" if record.mfu else ""
        speed = f"{record.tokens_per_s:,.0f} tokens/s{used}"
        typer.echo(f"step {record.step} of {steps}, loss {record.loss:.4f}, {speed}{causes}")

    def on_note(text: str) -> None:
        typer.echo(f"{NOTE}{text}", err=True)

    rank = Worker.from_environment().rank
    first = rank == 0
    if first and not stream:
        require_own_directory(run, out)
    if first and emulates_its_matmuls(run):
        said = f"recipe.precision={run.recipe.precision!r}: this CPU has no such matmuls"
        typer.echo(f"{NOTE}{said}; --set recipe.precision=fp32 is many times faster", err=True)
    if first and run.supervision is not None and watched is None:
        said = "your launcher supervises these processes; of the table, digest_every_steps alone is used here"
        typer.echo(f"{NOTE}supervision: {said}", err=True)
    windows = windows_of(recorded, run, steps)
    if first and run.recipe.is_low_precision:
        from trainwright.spec.modules import precision_text

        for line in precision_text(run.model, run.recipe):
            on_note(line)
    try:
        carry_out(
            run,
            shards=shards_of(run),
            out_dir=out,
            steps=steps,
            profiled=windows.get(PROFILE),
            snapshot=windows.get(SNAPSHOT),
            recomputed_flops_per_token=_recomputed_flops_per_token(run) if first else 0.0,
            on_step=on_step,
            on_note=on_note,
            watched=None
            if watched is None
            else watched_rank(watched, rank, plants, directory_of(run.checkpoint, out)),
        )
    except RunEnded as ended:
        # All ranks end alike: the first says it.
        time.sleep(0.0 if first else AFTER_THE_FIRST_S)
        typer.echo(f"trainwright: {ended}", err=True)
        leave(1)
    except InvalidSpec:
        # All ranks find the same wrong: the first says it, and torchrun ends the others meanwhile.
        time.sleep(0.0 if first else AFTER_THE_FIRST_S)
        raise
    if first and not stream:
        typer.echo(f"wrote {out}; {NEXT.format(out=out)}")
    leave(0)


def _recomputed_flops_per_token(run: "Run") -> float:
    """What HFU counts beside MFU, as the planner counts it; 0 where there is no peak that either is a part of."""
    if run.recipe.recompute == "none" or run.cluster.peak(run.recipe.product_format(run.cluster)) is None:
        return 0.0
    from trainwright.cli.planner import predicted

    prediction = predicted(run)
    counted = prediction.model_flops_per_device * run.layout.world / run.recipe.tokens_per_step
    return counted * (prediction.hfu / prediction.mfu - 1)
