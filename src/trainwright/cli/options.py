"""Options that several verbs share, each written once."""

from pathlib import Path
from typing import Annotated

import typer

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set any field, such as recipe.seq_len=8192; may be given again.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document with stable keys, no tables.")]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="A run file, as `plan --out` writes it.")]
