"""`trainwright checkpoint`: one commit of a run, looked into, cut anew for another number of ranks, or written as
whole tensors for other programs. (`checkpoints` lists all of a run.)"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson

if TYPE_CHECKING:
    from trainwright.train.checkpoint.directory import Save

app = typer.Typer(no_args_is_help=True, help="Look into a commit, cut it for other ranks, or export its weights.")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run's output, the directory of its checkpoints, or one of these.")
]
Step = Annotated[int | None, typer.Option(min=0, help="Of the commit; without it the newest that is whole.")]


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
    from trainwright.cli import output
    from trainwright.train.checkpoint.rewriting import reshard as cut

    new = cut(_commit(directory, step), out, ranks)
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
    from trainwright.cli import output
    from trainwright.spec.units import bytes_text
    from trainwright.train.checkpoint.rewriting import export as written

    save = _commit(directory, step)
    num_bytes = written(save, out)
    if as_json:
        output.show_json({"path": str(out), "step": save.step, "num_bytes": num_bytes})
    else:
        output.show(f"wrote {out}: weights of step {save.step}, {bytes_text(num_bytes)}")


def _commit(directory: Path, step: int | None) -> "Save":
    """The commit that is asked for; refuses what is none, or is not whole by its files' names and lengths."""
    from trainwright.spec.errors import reject
    from trainwright.train.checkpoint.directory import FOLDER, NAME, saves_in
    from trainwright.train.checkpoint.manifest import Damaged

    root = directory / FOLDER if (directory / FOLDER).is_dir() else directory
    saves = [save for save in saves_in(root) if save.is_committed]
    if NAME.fullmatch(directory.name):
        saves = [save for save in saves_in(directory.parent) if save.path == directory and save.is_committed]
    if not saves:
        reject("DIR", str(directory), "holds no commit; name the directory that train was given with --out")
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
    reject("DIR", str(directory), f"has no whole commit ({complaints[0]}); see trainwright checkpoints")
