"""`trainwright predict`: what a run file will cost, without a search."""

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

EXAMPLE = "Example: trainwright predict run.toml --set recipe.micro_batch=2 --set recipe.recompute=full"


def predict(run_file: RunFile, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Predict memory and time of a run by cause, and what takes from the peak until its MFU is left.

    Exit status 1 where it doesn't fit.
    """
    from trainwright.cli import files
    from trainwright.cli.planner import predicted

    run = files.read_run(run_file, assignments)
    prediction = predicted(run)
    if as_json:
        from trainwright.cli.output import show_json
        from trainwright.spec.waterfall import waterfall_of

        show_json(prediction.report() | {"waterfall": waterfall_of(prediction).report()})
    else:
        from trainwright.cli.output import show
        from trainwright.present.plans import prediction_view

        show(prediction_view(run, prediction))
    if not prediction.fits:
        raise typer.Exit(1)
