"""`trainwright clusters`: the machines of the catalogue, one's own, and where each of their numbers comes from."""

import re
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, complete_cluster

app = typer.Typer(help="Clusters that are known by name: device, node and fabric together.", no_args_is_help=True)


@app.command("list", epilog="Example: trainwright clusters list")
def list_clusters(as_json: AsJson = False) -> None:
    """List the clusters of the catalogue and one's own."""
    from trainwright.cli import catalogue
    from trainwright.cli.output import show, show_json

    own = _own_directory()
    names = catalogue.cluster_names(user_dir=own)
    clusters = {name: catalogue.load_cluster(name, user_dir=own) for name in names}
    if as_json:
        show_json({"clusters": {name: cluster.plain() for name, cluster in clusters.items()}})
        return
    from trainwright.present.clusters import clusters_view

    show(clusters_view(clusters))


@app.command("show", epilog="Example: trainwright clusters show h100-sxm")
def show_cluster(
    cluster: Annotated[
        str, typer.Argument(help="A name of `clusters list`, or a cluster.toml.", autocompletion=complete_cluster)
    ],
    as_json: AsJson = False,
) -> None:
    """Show one cluster, each number with its source."""
    from trainwright.cli import catalogue
    from trainwright.cli.output import show, show_json

    loaded = catalogue.load_cluster(cluster, user_dir=_own_directory())
    if as_json:
        show_json({"cluster": loaded.plain()})
        return
    from trainwright.present.clusters import cluster_view

    show(cluster_view(loaded))


@app.command(
    "new", epilog="Example: trainwright clusters new mine --from h100-sxm --set fabric.nic_bytes_per_s=25e9"
)
def new_cluster(
    name: Annotated[str, typer.Argument(help="What the new cluster is called from now on.")],
    base: Annotated[
        str,
        typer.Option(
            "--from", metavar="CLUSTER", help="The cluster that it is like.", autocompletion=complete_cluster
        ),
    ],
    assignments: Assignments = None,
    out: Annotated[
        Path | None, typer.Option(help="Write this file, instead of one that makes it known by its name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a cluster of one's own from another one, with some fields set otherwise."""
    from trainwright.cli import catalogue, files
    from trainwright.cli.output import show, show_json
    from trainwright.spec import toml
    from trainwright.spec.errors import reject

    own = _own_directory()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        reject("NAME", name, "must be of letters, digits, '.', '-' and '_', and begin with a letter or digit")
    target = out or own / f"{name}.toml"
    if out is None and name in catalogue.cluster_names(user_dir=own):
        taken = f"delete {target}, or " if target.exists() else ""
        reject("NAME", name, f"is taken; {taken}choose another name")
    cluster = catalogue.new_cluster(catalogue.load_cluster(base, user_dir=own), name, assignments or [])
    if out is None:
        files.make_directory(own)
    files.write_text(target, toml.write(cluster))
    if as_json:
        show_json({"path": str(target), "cluster": cluster.plain()})
        return
    show(f"wrote {target}")
    if out is None:
        show(f"use it by its name: --cluster {name}")


def _own_directory() -> Path:
    from trainwright.cli.files import config_directory

    return config_directory() / "clusters"
