"""`trainwright train`: carry out a run file on this node's processes, or as one worker of one's own torchrun."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile
from trainwright.cli.worker import Stream, run_workers, started_by_torchrun, tell

if TYPE_CHECKING:
    from trainwright.spec.record import StepRecord
    from trainwright.spec.run import Run

EXAMPLE = (
    "Example: trainwright train run.toml --steps 100 --out out/run; "
    "or, under your own launcher: torchrun --nproc-per-node 4 -m trainwright train run.toml"
)

OnProgress = Callable[[str, float], None]
"""Told what is being done, and which fraction of it is done."""


def train(
    run_file: RunFile,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after so many; without it the run's token budget says how many."),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Gets run.toml, metrics.jsonl and ledger.jsonl.")
    ] = Path("out/run"),
    assignments: Assignments = None,
    as_json: AsJson = False,
    stream: Stream = False,
) -> None:
    """Train a run: one process per rank of its layout, started on this node, as planned to the letter."""
    from trainwright.cli import files, output

    run = files.read_run(run_file, assignments)
    planned = steps_of(run, steps)
    if started_by_torchrun():
        _work(run, planned, out, stream)
    from trainwright.cli.progress import Progress

    with Progress(output.console(errors=True)) as progress:
        records = trained(run, planned, out, progress.show)
    if as_json:
        last = records[-1].plain() if records else {}
        output.show_json({"path": str(out), "run_hash": run.hash, "steps": len(records), "last": last})
        return
    from trainwright.present.training import training_view

    output.show(training_view(run, records), f"\nwrote {out}; compare with: trainwright compare {out}")


def steps_of(run: "Run", steps: int | None) -> int:
    """How many steps to train: what the user said, else what the budget buys."""
    from trainwright.spec.errors import reject

    chosen = steps or run.steps
    if chosen is None:
        reject("budget", "none", "the run has no token budget; say how far with --steps")
    return chosen


def trained(run: "Run", steps: int, out: Path, on_progress: OnProgress) -> "list[StepRecord]":
    """Train a run on this node and return its steps; the directory gets the run's files."""
    from trainwright.cli import files
    from trainwright.spec import toml
    from trainwright.spec.record import StepRecord
    from trainwright.train.door import require_trainable

    require_trainable(run)
    files.make_directory(out)
    files.write_text(out / "run.toml", toml.write(run))
    shards_of(run, on_progress)
    records: list[StepRecord] = []

    def on_message(message: dict[str, Any]) -> None:
        record = StepRecord.parse(message)
        records.append(record)
        on_progress(f"step {record.step} of {steps}, loss {record.loss:.3f}", record.step / steps)

    on_progress("starting processes", 0.0)
    arguments = ["train", str(out / "run.toml"), "--steps", str(steps), "--out", str(out)]
    run_workers(arguments, run.layout.world, on_message)
    return records


def shards_of(run: "Run", on_progress: OnProgress = lambda what, done: None) -> Path:
    """The directory of the run's token shards; those that can be made here are, unless the cache has them."""
    if run.data.source == "shards":
        return Path(run.data.path)
    from trainwright.cli.files import cache_directory
    from trainwright.train.corpus import build_corpus

    return build_corpus(cache_directory(), run.data.vocab_size, on_progress)


def _work(run: "Run", steps: int, out: Path, stream: bool) -> NoReturn:
    """What each rank does."""
    from trainwright.train.loop import train as carry_out
    from trainwright.train.mesh import leave

    def on_step(record: "StepRecord") -> None:
        if stream:
            tell(record.plain())
        else:
            typer.echo(
                f"step {record.step} of {steps}, loss {record.loss:.4f}, {record.tokens_per_s:,.0f} tokens/s"
            )

    carry_out(run, shards=shards_of(run), out_dir=out, steps=steps, on_step=on_step)
    leave(0)
