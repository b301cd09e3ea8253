"""`trainwright checkpoints`: what a run has saved, and whether it is still what was written."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson

if TYPE_CHECKING:
    from trainwright.spec.checkpointing import SavedStep
    from trainwright.train.checkpoint.directory import Save

EXAMPLE = "Example: trainwright checkpoints out/run --verify"


def checkpoints(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's output, or the directory of its checkpoints.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and hold it against the manifest's digests.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints, the newest first, and what is wrong with any; writes nothing. Exit status is 1
    where one is damaged."""
    from trainwright.cli import output
    from trainwright.spec.errors import reject
    from trainwright.train.checkpoint.directory import FOLDER, saves_in

    if not directory.is_dir():
        what = "is a file" if directory.exists() else "is not there"
        reject("DIR", str(directory), f"{what}; name the directory that train was given with --out")
    root = directory / FOLDER if (directory / FOLDER).is_dir() else directory
    saves = saves_in(root)
    if not saves:
        why = "holds no checkpoints; train with --set checkpoint.every_steps=100, say"
        reject("DIR", str(directory), why)
    seen = [_looked_at(save, verify) for save in saves]
    if as_json:
        output.show_json({"directory": str(root), "verified": verify, "saves": [each.plain() for each in seen]})
    else:
        from trainwright.present.checkpoints import checkpoints_view

        output.show(checkpoints_view(str(root), seen, verified=verify))
    if any(each.state == "damaged" for each in seen):
        raise typer.Exit(1)


def _looked_at(save: "Save", verify: bool) -> "SavedStep":
    from trainwright.spec.checkpointing import SavedStep
    from trainwright.spec.errors import InvalidSpec
    from trainwright.train.checkpoint.manifest import Damaged
    from trainwright.train.checkpoint.reading import Reader

    name = {"name": save.name, "step": save.step, "generation": save.generation}
    try:
        manifest = save.look_over()
        if verify:
            with Reader(save, manifest.parts) as reader:
                for part in manifest.parts:
                    reader.verify(part)
    except (Damaged, InvalidSpec) as error:
        state = "damaged" if save.is_committed else "unfinished"
        return SavedStep.parse({**name, "state": state, "complaint": str(error)})
    degrees = manifest.run.get("layout", {})
    layout = ", ".join(f"{axis} {size}" for axis, size in degrees.items() if isinstance(size, int) and size > 1)
    return SavedStep.parse(
        {
            **name,
            "state": "whole",
            "num_bytes": manifest.num_bytes,
            "ranks": len(manifest.parts),
            "layout": layout,
            "written_at_s": manifest.written_at_s,
            "blocked_s": max((part.snapshot_s for part in manifest.parts), default=0.0),
            "write_s": max((part.write_s for part in manifest.parts), default=0.0),
        }
    )
