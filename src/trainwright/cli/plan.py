"""`trainwright plan`: search for the fastest layout and recipe, show it and say why, write it as a run file."""

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, complete_cluster, complete_model

EXAMPLE = (
    "Example: trainwright plan llama-3.1-405b --cluster h100-sxm --gpus 16384 --seq-len 8192 "
    "--global-batch 2048 --tokens 15.6T --out run.toml"
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A catalogue name (`trainwright models list`) or a Hugging Face config.json.",
            autocompletion=complete_model,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="A catalogue name (`trainwright clusters list`) or a cluster.toml.",
            autocompletion=complete_cluster,
        ),
    ],
    gpus: Annotated[int, typer.Option(min=1, help="Devices in all; on a CPU, processes.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences of one step, over all devices.")],
    tokens: Annotated[
        str | None, typer.Option(help="Token budget, such as 15.6T, 100B or 15.6e12: gives hours and cost.")
    ] = None,
    precision: Annotated[str, typer.Option(metavar="bf16|fp8|fp32", help="Of the matmuls.")] = "bf16",
    top: Annotated[int, typer.Option(min=1, help="How many plans to show, fastest first.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the fastest plan as a run file.")] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to train MODEL on a cluster, with its memory, time and cost by cause, and why.

    A field that the search chooses is fixed by --set: --set layout.tp=8 --set recipe.recompute=full.
    """
    from trainwright.cli import catalogue, files
    from trainwright.cli.draft import draft
    from trainwright.cli.planner import searched
    from trainwright.spec import toml
    from trainwright.spec.units import parse_count

    drafted = draft(
        catalogue.load_model(model),
        catalogue.load_cluster(cluster, user_dir=files.config_directory() / "clusters"),
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        tokens=None if tokens is None else parse_count(tokens, "--tokens"),
        assignments=assignments or [],
    )
    question, answer, search_s = searched(drafted.question(gpus, top))

    if out and answer.plans:
        files.write_text(out, toml.write(drafted.run(answer.plans[0])))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(answer.report(search_s))
    else:
        from trainwright.cli.output import show
        from trainwright.present.plans import answer_view

        show(answer_view(question, answer, search_s))
        if out and answer.plans:
            show(f"wrote {out}")
    if not answer.plans:
        raise typer.Exit(1)
