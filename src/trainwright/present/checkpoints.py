"""A run's checkpoints for people: a row each, and what is wrong with those that are damaged."""

from collections.abc import Sequence

from rich.console import Group, RenderableType

from trainwright.present.parts import headline, section, table
from trainwright.spec.checkpointing import SavedStep, ShownCommit
from trainwright.spec.units import bytes_text, seconds_text


def checkpoints_view(directory: str, saves: Sequence[SavedStep], *, verified: bool) -> RenderableType:
    """The newest first. `verified`: every byte was read."""
    columns = [("step", ">"), ("generation", ">"), ("", "<"), ("size", ">"), ("ranks", ">"), ("layout", "<")]
    columns += [("step waited", ">"), ("written in", ">")]
    rows = [
        [
            f"{each.step}",
            f"{each.generation}",
            each.state,
            *(
                [
                    bytes_text(each.num_bytes),
                    f"{each.ranks}",
                    each.layout or "one rank",
                    seconds_text(each.blocked_s),
                    seconds_text(each.write_s),
                ]
                if each.state == "whole"
                else ["-"] * 5
            ),
        ]
        for each in saves
    ]
    how = "every byte read" if verified else "names and lengths looked at; checkpoint verify reads every byte"
    parts = [headline(f"{len(saves)} in {directory}", how), "", table(columns, rows)]
    wrong = [[f"{each.step}", each.complaint] for each in saves if each.complaint]
    if wrong:
        parts.append(section("Not whole", table([("step", ">"), ("", "<")], wrong)))
    return Group(*parts)


def commit_view(commit: ShownCommit) -> RenderableType:
    """What a commit holds."""
    degrees = ", ".join(f"{axis} {size}" for axis, size in commit.layout.items() if size > 1) or "one rank"
    what = f"{bytes_text(commit.num_bytes)} by {degrees}; next sample {commit.samples}"
    files = [[name, bytes_text(num_bytes)] for name, num_bytes in commit.files.items()]
    tensors = [[name, f"{kind}", " x ".join(map(str, shape))] for name, (kind, *shape) in commit.tensors.items()]
    return Group(
        headline(f"step {commit.step}: {commit.name}", what),
        section("Files", table([("", "<"), ("size", ">")], files)),
        section("Tensors", table([("", "<"), ("kind", "<"), ("shape", "<")], tensors)),
    )
