"""Standard output: one JSON document, or a view for people that is plain and wide where it is no terminal."""

from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console, RenderableType

from trainwright.cli.files import json_text

PLAIN_WIDTH = 120
"""Columns of a view that goes into a file or pipe: wide enough for every table."""


def console(*, errors: bool = False) -> Console:
    """The terminal, or a plain text of fixed width; of standard error where `errors`, as progress goes there."""
    terminal = Console(highlight=False, stderr=errors)
    return terminal if terminal.is_terminal else Console(highlight=False, stderr=errors, width=PLAIN_WIDTH)


def show(*views: RenderableType) -> None:
    """Print views one below the other."""
    screen = console()
    for view in views:
        screen.print(view)


def show_json(report: Mapping[str, Any]) -> None:
    """Print one JSON document."""
    typer.echo(json_text(report))
