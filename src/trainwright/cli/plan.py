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
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences of one step, over all devices.")],
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices in all; on a CPU, processes. With --min, the most that are tried [65536]."
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token budget, such as 15.6T, 100B or 15.6e12: gives hours and cost.")
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Training software whose measured rates to take, such as nemo-2025 or torchtitan."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the matmuls: fp8-block, ...; without it bf16, or fp16 or fp32 where that is faster.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show, fastest first.")] = 5,
    least: Annotated[
        str | None,
        typer.Option(
            "--min",
            metavar="gpus|cost",
            help="Find the fewest devices, or the lowest cost, that finish in --days.",
        ),
    ] = None,
    days: Annotated[float | None, typer.Option(help="With --min: days that the token budget may take.")] = None,
    explain_infeasible: Annotated[
        bool, typer.Option(help="Where nothing fits: try remedies, and say what each costs.")
    ] = False,
    explain_precision: Annotated[bool, typer.Option(help="List what each module computes in, and why.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the fastest plan as a run file.")] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to train MODEL on a cluster, with its memory, time and cost by cause, and why.

    A field that the search chooses is fixed by --set: --set layout.tp=8 --set recipe.recompute=full. How many
    devices it takes: --tokens 15.6T --min gpus --days 60.
    """
    from trainwright.cli import catalogue, files
    from trainwright.cli.draft import draft, goal_of
    from trainwright.cli.planner import explained, gained, searched, sized
    from trainwright.spec import toml
    from trainwright.spec.modules import modules_of
    from trainwright.spec.units import parse_count

    goal = goal_of(least, days, gpus, explain_infeasible=explain_infeasible)

    drafted = draft(
        catalogue.load_model(model),
        catalogue.load_cluster(cluster, files.config_directory() / "clusters", software),
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        tokens=None if tokens is None else parse_count(tokens, "--tokens"),
        assignments=assignments or [],
    )
    sizing = diagnosis = None
    if goal is not None:
        sizing, (question, answer, search_s) = sized(drafted.question(goal.most_devices, top), goal)
    else:
        question, answer, search_s = searched(drafted.question(gpus or 1, top))
        diagnosis = explained(question) if explain_infeasible else None

    bought = gained(question, answer)
    if out and answer.plans:
        files.write_text(out, toml.write(drafted.run(answer.plans[0])))
    if as_json:
        from trainwright.cli.output import show_json

        more = {
            "sizing": sizing and sizing.report(),
            "infeasible": diagnosis and diagnosis.report(),
            "gain": bought and bought.report(),
            "precision": [row.report() for row in modules_of(question.model, question.recipe)]
            if explain_precision
            else None,
        }
        show_json(answer.report(search_s) | {name: report for name, report in more.items() if report})
    else:
        from trainwright.cli.output import show
        from trainwright.present.plans import plan_view
        from trainwright.present.precision import gain_view, modules_view

        show(plan_view(question, answer, search_s, sizing, diagnosis))
        if bought is not None:
            show(gain_view(bought))
        if explain_precision:
            show(modules_view(question.model, question.recipe))
        if out and answer.plans:
            show(f"wrote {out}")
    if not answer.plans:
        raise typer.Exit(1)
