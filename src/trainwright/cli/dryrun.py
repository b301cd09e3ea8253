"""`trainwright dryrun`: a rank's step on fake tensors, at the run's full world, counted by cause and held against
what the planner counts."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

if TYPE_CHECKING:
    from trainwright.spec.counts import Counts
    from trainwright.spec.run import Run

EXAMPLE = (
    "Example: trainwright dryrun run.toml; trainwright dryrun run.toml --rank 0 --rank 1920; "
    "trainwright dryrun run.toml --microbatches 1 --json"
)


def dryrun(
    run_file: RunFile,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A rank to run; may be given again. Otherwise each pipeline stage's first."),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Run N and 2N microbatches of each chunk, and extend the counts to the step."
        ),
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Run a step of chosen ranks without the others and without numbers, and count: FLOPs, collectives, states,
    bytes kept for backward and live bytes. Exit status 1 where the planner counts otherwise.

    The program is the trainer's own, on fake tensors and fake groups of the run's full world. Choices that the
    trainer doesn't have are set aside, and said. Of stages that hold the same, the first is run for all.
    """
    from trainwright.cli import files, output
    from trainwright.cli.planner import resolved
    from trainwright.cli.progress import Progress
    from trainwright.plan.exact.counts import predicted_counts
    from trainwright.spec.counts import unequal
    from trainwright.spec.errors import reject
    from trainwright.train.door import require_trainable
    from trainwright.train.dryrun.set_aside import trainable_form

    run = resolved(files.read_run(run_file, assignments))
    run, changes = trainable_form(run)
    require_trainable(run)
    for each in rank or ():
        if each >= run.layout.world:
            reject(
                "--rank", each, f"is beyond the run's {run.layout.world} ranks; the last is {run.layout.world - 1}"
            )
    from trainwright.train.dryrun.passes import require_even_choices, require_passes
    from trainwright.train.dryrun.ranks import dry_runs, first_ranks

    require_even_choices(run)
    if microbatches is not None:
        require_passes(run, microbatches)
    stands_for = {each: each for each in rank} if rank else first_ranks(run)
    wanted = list(dict.fromkeys(stands_for.values()))
    with Progress(output.console(errors=True)) as progress:
        progress.show(f"{len(wanted)} ranks of {run.layout.world:,}", 0.0)
        done: list[int] = []

        def on_done(each: int) -> None:
            done.append(each)
            progress.show(f"rank {each}", len(done) / len(wanted))

        recorded = dry_runs(run, wanted, microbatches, on_done)
    predicted = {each: predicted_counts(run, each) for each in recorded}
    found = {each: unequal(predicted[each], counts) for each, counts in recorded.items()}
    if as_json:
        output.show_json(_report(run, recorded, found, stands_for, changes))
    else:
        from trainwright.present.counts import counts_view

        output.show(counts_view(run, recorded, found, stands_for, changes, microbatches))
    if any(found.values()):
        raise typer.Exit(1)


def _report(
    run: "Run", recorded: "dict[int, Counts]", found: dict[int, Any], stands_for: dict[int, int], changes: Any
) -> dict[str, Any]:
    """The JSON form: run_hash; set_aside, each {field, before, after}; ranks, each a `Counts` with `stands_for`,
    the ranks of stages that hold the same, and `unequal`, each {cause, predicted, recorded}."""
    ranks = []
    for rank, counts in recorded.items():
        alike = [each for each, first in stands_for.items() if first == rank]
        differ = [each._asdict() for each in found[rank]]
        ranks.append({**counts.plain(), "stands_for": alike, "unequal": differ})
    return {"run_hash": run.hash, "set_aside": [each._asdict() for each in changes], "ranks": ranks}
