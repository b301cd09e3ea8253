"""Options that several verbs share, each written once."""

from pathlib import Path
from typing import Annotated

import typer


def complete_model(incomplete: str) -> list[str]:
    """Names of the catalogue's models, for the shell."""
    from trainwright.cli.catalogue import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    """Names of the catalogue's clusters and the user's own, for the shell."""
    from trainwright.cli.catalogue import cluster_names
    from trainwright.cli.files import config_directory

    names = cluster_names(config_directory() / "clusters")
    return [name for name in names if name.startswith(incomplete)]


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
