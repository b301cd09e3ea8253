"""`trainwright chaos`: a run on this machine that is killed, stopped, slowed and corrupted by a seeded plan, held
against the same run left in peace."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

if TYPE_CHECKING:
    from trainwright.spec.run import Run

EXAMPLE = "Example: trainwright chaos run.toml --steps 60 --faults 8 --seed 1"


def chaos(
    run_file: RunFile,
    steps: Annotated[int, typer.Option(min=1, help="Of either run.")] = 60,
    faults: Annotated[int, typer.Option(min=1, help="How many, one after the other.")] = 8,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...", help="Which: kill, later, crash, stop, busy, store, rot, full, flip, lose."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the plan.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets both runs; must be new.")] = Path("out/chaos"),
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Train a run twice, in peace and under faults, and say what was lost: losses and the final state are compared
    to the bit. Exit status is 1 where anything differs, or a fault is not seen as what it is.

    A run without tables `checkpoint` and `supervision` gets them: a commit every fifth step, digests of replicas,
    and state in the memory of two hosts.
    """
    from trainwright.cli import files, output
    from trainwright.cli.progress import Progress
    from trainwright.cli.train import trained
    from trainwright.spec.errors import reject
    from trainwright.train.faults.campaign import drawn, kinds_of, toll

    if out.exists():
        reject("--out", str(out), "is there already; name a new directory, or remove it")
    run = _prepared(files.read_run(run_file, assignments))
    chosen = kinds_of(run, [each.strip() for each in kinds.split(",")] if kinds is not None else [])
    plan = drawn(run, steps, faults, chosen, seed)
    plants, seconds = out / "plan.json", []
    with Progress(output.console(errors=True)) as progress:
        for name in ("plain", "hurt"):
            begun_s = time.perf_counter()
            if name == "hurt":
                files.write_text(plants, json.dumps([each.plain() for each in plan]))
            trained(run, steps, out / name, progress.show, plants=plants if name == "hurt" else None)
            seconds.append(time.perf_counter() - begun_s)
    found = toll(run, seed, plan, out / "plain", out / "hurt", (seconds[0], seconds[1]))
    if as_json:
        output.show_json({**found.plain(), "is_survived": found.is_survived})
    else:
        from trainwright.present.chaos import toll_view

        output.show(toll_view(found))
    if not found.is_survived:
        raise typer.Exit(1)


def _prepared(run: "Run") -> "Run":
    """With the tables that it needs, where it has none."""
    from trainwright.spec.checkpointing import Checkpointing
    from trainwright.spec.errors import reject
    from trainwright.spec.supervision import Supervision

    if run.guard is not None:
        why = "lets faults change the losses, which could not be compared then; leave the table out"
        reject("guard.action", run.guard.action, why)
    supervision = run.supervision or Supervision(digest_every_steps=5)
    # Faults are drawn at any place: none is to be left out for them.
    run = run.changed(supervision=supervision.changed(lemon_after=1_000_000))
    if run.checkpoint is None:
        run = run.changed(checkpoint=Checkpointing(every_steps=5, memory_every_steps=1))
    assert run.checkpoint is not None
    # Both runs keep their commits in their own output.
    return run.changed(checkpoint=run.checkpoint.changed(directory="")).check()
