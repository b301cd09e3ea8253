"""`trainwright checkpoint ls` and `verify`: what a run has saved, and whether it is still what was written."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.spec.checkpointing import SavedStep
    from trainwright.train.checkpoint.directory import Save


def listed(directory: Path, *, verify: bool, as_json: bool) -> bool:
    """Show a run's saves, or one of them, the newest first, and what is wrong with any; whether all are whole,
    or were never ended. Writes nothing. `verify`: every byte is read."""
    from trainwright.cli import output

    root, saves = saves_of(directory)
    seen = [_looked_at(save, verify) for save in saves]
    if as_json:
        output.show_json({"directory": str(root), "verified": verify, "saves": [each.plain() for each in seen]})
    else:
        from trainwright.present.checkpoints import checkpoints_view

        output.show(checkpoints_view(str(root), seen, verified=verify))
    return all(each.state in ("whole", "unfinished") for each in seen)


def saves_of(directory: Path) -> "tuple[Path, list[Save]]":
    """Where a run's saves lie, and these, the newest first; of the directory of one, this one alone. Refuses what
    has none."""
    from trainwright.spec.errors import reject
    from trainwright.train.checkpoint.directory import FOLDER, NAME, saves_in

    if not directory.is_dir():
        what = "is a file" if directory.exists() else "is not there"
        reject("DIR", str(directory), f"{what}; name the directory that train was given with --out")
    if NAME.fullmatch(directory.resolve().name):  # also of `.` and `DIR/`
        own = directory.resolve()
        root, saves = own.parent, [each for each in saves_in(own.parent) if each.path == own]
    else:
        root = directory / FOLDER if (directory / FOLDER).is_dir() else directory
        saves = saves_in(root)
    if not saves:
        why = "holds no checkpoints; name the directory that train was given with --out, or train with "
        reject("DIR", str(directory), f"{why}--set checkpoint.every_steps=100, say")
    return root, saves


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
    except Damaged as error:
        state = "damaged" if save.is_committed else "unfinished"
        return SavedStep.parse({**name, "state": state, "complaint": str(error)})
    except InvalidSpec as error:
        return SavedStep.parse({**name, "state": "newer", "complaint": str(error)})
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
