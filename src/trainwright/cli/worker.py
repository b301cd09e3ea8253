"""Processes that a verb starts: `train` and `calibrate` call themselves under torchrun and show what comes back.

The first rank of the workers tells its progress in lines of JSON on standard output (`--stream`), which the
starting process takes from the launcher and shows; notes go to standard error at once, whatever else they say at
the end, a line that several ranks say alike only once. A verb that a user started by torchrun tells its progress
itself.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainwright.spec.run import Run

BAD_INPUT = 2

NOTE = "note: "
"""How a line begins that a person should see while there is time to act on it."""

Stream = Annotated[
    bool,
    typer.Option("--stream", hidden=True, help="Tell progress in lines of JSON, for the process that shows it."),
]


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun's agent started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_workers(
    arguments: list[str],
    num_ranks: int,
    on_message: Callable[[dict[str, Any]], None],
    *,
    on_fault: Callable[[dict[str, Any], list[str]], None] | None = None,
    supervised: "Run | None" = None,
    plants: Path | None = None,
) -> None:
    """Run this program with `--stream` on each rank of the node; leave with their exit status if it isn't 0.

    `supervised`, `plants`: as `launch` has them; `on_fault` gets what the supervisor tells, and what the workers
    had said since it told something last.
    """
    from trainwright.train.launch import launch

    lines: dict[str, None] = {}
    earlier: list[str] = []

    def on_line(line: str) -> None:
        message = _message(line)
        if message is not None and "fault" in message and on_fault is not None:
            on_fault(message["fault"], list(lines))
            earlier[:] = lines or earlier
            lines.clear()
        elif message is not None:
            on_message(message)
        elif line.startswith(NOTE):
            typer.echo(line, err=True)
        else:
            lines[line] = None

    status = launch([*arguments, "--stream"], num_ranks, on_line=on_line, supervised=supervised, plants=plants)
    # Where one rank refuses its input, the others fail for want of it, and what they say is beside the point.
    said = list(lines) or (earlier if status else [])
    complaints = [line for line in said if line.startswith("trainwright: ")]
    for line in complaints[:1] if status == BAD_INPUT and complaints else said:
        typer.echo(line, err=True)
    if status:
        raise typer.Exit(status)


def tell(message: dict[str, Any]) -> None:
    """Tell the starting process something, at once."""
    typer.echo(json.dumps(message))


def _message(line: str) -> dict[str, Any] | None:
    """What a line tells; None for one that is meant for people."""
    if not line.startswith("{"):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None
