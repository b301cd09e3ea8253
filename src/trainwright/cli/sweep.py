"""`trainwright sweep`: predictions of a run at many values of its fields, or on more and more devices; with
--train it is trained at each of them too."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson, Assignments, RunFile

if TYPE_CHECKING:
    from trainwright.spec.run import Run
    from trainwright.spec.sweep import Sweep
    from trainwright.spec.trials import Trials

EXAMPLE = (
    "Example: trainwright sweep run.toml --over recipe.micro_batch=1,2,4 --over recipe.recompute=none,full; "
    "trainwright sweep run.toml --train --over recipe.zero=0,1,2,3"
)

Over = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=V1,V2,...",
        help="Values of any field, as --set takes them; given again, all combinations are predicted.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N1,N2,...", help="Numbers of devices: dp grows, all else and the global batch stay as they are."
    ),
]
SvgFile = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Plot step time and MFU into this file, as SVG.")
]
Train = Annotated[
    bool,
    typer.Option(
        "--train", help="Train a few steps with each value, one field at a time, and show what was seen."
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Of each training, with --train; 12 if left out.")
]
TRAINED_STEPS = 12
"""Two to warm up, three to look at closely, and some to time."""


def sweep(
    run_file: RunFile,
    over: Over = None,
    gpus: Gpus = None,
    assignments: Assignments = None,
    svg: SvgFile = None,
    train: Train = False,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Predict a run at each combination of some fields' values. Exit status 1 where nothing fits.

    What is no legal run is listed with the reason: --over layout.tp=1,2,3 --over recipe.micro_batch=1,2.
    """
    from trainwright.cli import files
    from trainwright.spec.errors import reject
    from trainwright.spec.sweep import axes

    if train:
        _train(files.read_run(run_file, assignments), axes(over or [], gpus), steps or TRAINED_STEPS, svg, as_json)
        return
    if steps is not None:
        reject("--steps", steps, "is for --train; predictions have none")
    if svg is not None:
        files.require_place(svg)
    values = axes(over or [], gpus)
    swept = _swept(files.read_run(run_file, assignments), values).require_legal()
    if svg is not None:
        from trainwright.present.sweep import sweep_svg

        files.write_text(svg, sweep_svg(swept))
    if as_json:
        from trainwright.cli.output import show_json

        show_json(swept.report())
    else:
        from trainwright.cli.output import show
        from trainwright.present.sweep import sweep_view

        show(sweep_view(swept))
        if svg is not None:
            show(f"wrote {svg}")
    if not swept.fitting:
        raise typer.Exit(1)


def _swept(run: "Run", values: dict[str, list]) -> "Sweep":
    """All points predicted; on a terminal a bar shows how far it is."""
    from trainwright.cli.output import console
    from trainwright.cli.planner import predicted
    from trainwright.cli.progress import Progress
    from trainwright.spec.errors import InvalidSpec
    from trainwright.spec.sweep import IllegalPoint, Sweep, SweepPoint, combinations, varied

    points, illegal = [], []
    combined = list(combinations(values))
    screen = console(errors=True)
    with Progress(screen) as progress:
        for at, point in enumerate(combined):
            if screen.is_terminal:
                progress.show("predicting", at / len(combined))
            try:
                points.append(SweepPoint(values=point, prediction=predicted(varied(run, point))))
            except InvalidSpec as error:
                illegal.append(IllegalPoint(point, str(error)))
    return Sweep(run_name=run.name, fields=tuple(values), points=tuple(points), illegal=tuple(illegal))


def _train(run: "Run", values: dict[str, list], steps: int, svg: Path | None, as_json: bool) -> None:
    from trainwright.cli.output import show, show_json
    from trainwright.present.trials import trials_view
    from trainwright.spec.errors import reject

    if svg is not None:
        reject("--svg", str(svg), "plots predictions; leave it out with --train")
    trials = _tried(run, values, steps).require_any()
    if as_json:
        show_json(trials.report())
    else:
        show(trials_view(trials))


def _tried(run: "Run", values: dict[str, list], steps: int) -> "Trials":
    """The run trained with each value, one after another."""
    import tempfile

    from trainwright.cli.compare import compared
    from trainwright.cli.output import console
    from trainwright.cli.progress import Progress
    from trainwright.cli.train import trained
    from trainwright.spec.errors import InvalidSpec
    from trainwright.spec.sweep import varied
    from trainwright.spec.trials import Trial, Trials, Untrained, one_at_a_time

    trials, untrained = [], []
    points = list(one_at_a_time(values))
    with Progress(console(errors=True)) as progress, tempfile.TemporaryDirectory() as directory:
        for at, point in enumerate(points):
            said = ", ".join(f"{field}={value}" for field, value in point.items())
            progress.show(said, at / len(points))
            out = Path(directory) / str(at)
            try:
                # Nothing is saved: a trial must not go on from another one's checkpoint.
                trained(varied(run, point).changed(checkpoint=None), steps, out, lambda what, done: None)
                trials.append(Trial(values=point, comparison=compared(out)))
            except InvalidSpec as error:
                untrained.append(Untrained(point, str(error)))
    return Trials(run_name=run.name, steps=steps, trials=tuple(trials), untrained=tuple(untrained))
