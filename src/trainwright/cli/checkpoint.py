"""`trainwright checkpoint`: what a run has saved, and one commit of it: looked into, cut anew for another number
of ranks, or written as whole tensors for other programs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson

if TYPE_CHECKING:
    from trainwright.train.checkpoint.directory import Save

app = typer.Typer(no_args_is_help=True, help="List, verify, look into, cut anew or export what a run has saved.")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run's output, the directory of its checkpoints, or one of these.")
]
Step = Annotated[int | None, typer.Option(min=0, help="Of the commit; without it the newest that is whole.")]


@app.command("ls", epilog="Example: trainwright checkpoint ls out/run")
def ls(directory: Directory, as_json: AsJson = False) -> None:
    """List a run's checkpoints, the newest first, and what is wrong with any, by names and lengths of files;
    writes nothing. Exit status is 1 where one is damaged."""
    from trainwright.cli.checkpoints import listed

    if not listed(directory, verify=False, as_json=as_json):
        raise typer.Exit(1)


@app.command("verify", epilog="Example: trainwright checkpoint verify out/run")
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """The same, and every byte is read and held against the manifest's digests."""
    from trainwright.cli.checkpoints import listed

    if not listed(directory, verify=True, as_json=as_json):
        raise typer.Exit(1)


@app.command("show", epilog="Example: trainwright checkpoint show out/run --step 40")
def show(directory: Directory, step: Step = None, as_json: AsJson = False) -> None:
    """Say what a commit holds: tensors with their kinds and shapes, and which rank's files they lie in."""
    from trainwright.cli import output
    from trainwright.spec.checkpointing import ShownCommit

    save = _commit(directory, step)
    manifest = save.look_over()
    shown = ShownCommit.parse(
        {
            "name": save.name,
            "step": manifest.step,
            "samples": manifest.samples,
            "schedule_steps": manifest.schedule_steps,
            "num_bytes": manifest.num_bytes,
            "layout": {axis: size for axis, size in manifest.run["layout"].items() if isinstance(size, int)},
            "files": {file.name: file.length_bytes for part in manifest.parts for file in part.files},
            "tensors": {name: [entry.dtype, *entry.shape] for name, entry in sorted(manifest.tensors.items())},
        }
    )
    if as_json:
        output.show_json(shown.plain())
    else:
        from trainwright.present.checkpoints import commit_view

        output.show(commit_view(shown))


@app.command(
    "reshard", epilog="Example: trainwright checkpoint reshard out/run --ranks 8 --out out/eight/checkpoints"
)
def reshard(
    directory: Directory,
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="That are to read it.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets the commit, beside those that it has.")],
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Write a commit anew, cut for another number of ranks. A resume reads any commit under any layout; this saves
    it reading parts of many files."""
    from trainwright.cli import files, output
    from trainwright.train.checkpoint.rewriting import reshard as cut

    save = _commit(directory, step)
    files.make_directory(out)
    with _damage_told():
        new = cut(save, out, ranks)
    if as_json:
        output.show_json({"path": str(new.path), "step": new.step, "ranks": ranks})
    else:
        output.show(f"wrote {new.path}, cut for {ranks} ranks")


@app.command("export", epilog="Example: trainwright checkpoint export out/run --out out/weights")
def export(
    directory: Directory,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Gets safetensors, their index and the run; must be new.")
    ],
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Write a commit's weights as safetensors with whole tensors, in the precision that they were trained in, by
    this program's names."""
    from trainwright.cli import files, output
    from trainwright.spec.units import bytes_text
    from trainwright.train.checkpoint.rewriting import export as written

    save = _commit(directory, step)
    files.make_directory(out.parent)
    with _damage_told():
        num_bytes = written(save, out)
    if as_json:
        output.show_json({"path": str(out), "step": save.step, "num_bytes": num_bytes})
    else:
        output.show(f"wrote {out}: weights of step {save.step}, {bytes_text(num_bytes)}")


@contextmanager
def _damage_told() -> Iterator[None]:
    """A commit that turns out to be damaged while it is read is refused in one line; nothing of the result is
    left."""
    from trainwright.spec.errors import InvalidSpec
    from trainwright.train.checkpoint.manifest import Damaged

    try:
        yield
    except Damaged as damage:
        raise InvalidSpec(f"{damage}; choose another commit with --step (trainwright checkpoint verify)") from None


def _commit(directory: Path, step: int | None) -> "Save":
    """The commit that is asked for; refuses what is none, or is not whole by its files' names and lengths."""
    from trainwright.cli.checkpoints import saves_of
    from trainwright.spec.errors import reject
    from trainwright.train.checkpoint.manifest import Damaged

    saves = [save for save in saves_of(directory)[1] if save.is_committed]
    if not saves:
        reject("DIR", str(directory), "holds no commit, as no save has ended; see trainwright checkpoint ls")
    if step is not None and all(save.step != step for save in saves):
        reject("--step", step, f"has no commit; there are {', '.join(str(save.step) for save in saves)}")
    complaints = []
    for save in saves:
        if step is None or save.step == step:
            try:
                save.look_over()
            except Damaged as damage:
                complaints.append(str(damage))
            else:
                return save
    reject("DIR", str(directory), f"has no whole commit ({complaints[0]}); see trainwright checkpoint ls")
