"""`trainwright models`: the architectures of the catalogue, and what follows from one of them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import AsJson, complete_model

if TYPE_CHECKING:
    from trainwright.spec.model import ModelSpec

app = typer.Typer(help="Models that are known by name, and the counts of any model.", no_args_is_help=True)


@app.command("list", epilog="Example: trainwright models list")
def list_models(as_json: AsJson = False) -> None:
    """List the models of the catalogue with their sizes."""
    from trainwright.cli import catalogue
    from trainwright.cli.output import show, show_json

    models = {name: catalogue.load_model(name) for name in catalogue.model_names()}
    if as_json:
        show_json({"models": {name: _counts(model) for name, model in models.items()}})
        return
    from trainwright.present.models import models_view

    show(models_view(models))


@app.command("show", epilog="Example: trainwright models show llama-3.1-405b --seq-len 8192")
def show_model(
    model: Annotated[
        str, typer.Argument(help="A catalogue name or a Hugging Face config.json.", autocompletion=complete_model)
    ],
    seq_len: Annotated[
        int, typer.Option(min=1, help="Sequence length that attention FLOPs are counted at.")
    ] = 8192,
    as_json: AsJson = False,
) -> None:
    """Show one model: its layers, parameters by part, and FLOPs per token under each convention."""
    from trainwright.cli import catalogue
    from trainwright.cli.output import show, show_json

    loaded = catalogue.load_model(model)
    if as_json:
        from trainwright.spec.model import CONVENTION_TEXT

        flops = {convention: loaded.flops_per_token(seq_len, convention) for convention in CONVENTION_TEXT}
        show_json({"model": loaded.plain(), **_counts(loaded), "seq_len": seq_len, "flops_per_token": flops})
        return
    from trainwright.present.models import model_view

    show(model_view(loaded, seq_len))


def _counts(model: "ModelSpec") -> dict[str, Any]:
    return {
        "params": model.params,
        "active_params": model.active_params,
        "mtp_params": model.mtp_params,
        "params_by_part": model.params_by_part,
        "num_layers": model.num_layers,
    }
