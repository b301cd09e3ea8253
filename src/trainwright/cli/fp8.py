"""`trainwright fp8`: what training in few bits does to a model, tried on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.options import AsJson

app = typer.Typer(help="Low precision, looked at closely.", no_args_is_help=True)

STEPS = 40
WORKERS = 2


@app.command("lab", epilog="Example: trainwright fp8 lab --out out/fp8-lab")
def lab(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Gets lab.json, plots as SVG, and lab.html, which holds all.")
    ] = Path("out/fp8-lab"),
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Of each training.")] = STEPS,
    as_json: AsJson = False,
) -> None:
    """Train small models in bf16 and under each recipe, with planted outliers: losses, errors of rounding and of
    sums, and a verdict. Under 3 minutes on 2 cores."""
    import json

    from trainwright.cli import catalogue, files, output
    from trainwright.cli.progress import Progress
    from trainwright.present.precision_lab import lab_page, lab_svgs, lab_view
    from trainwright.present.precision_verdict import verdict
    from trainwright.train.corpus import build_corpus
    from trainwright.train.precision.lab import VOCAB, explore

    files.make_directory(out)
    with Progress(output.console(errors=True)) as progress:
        shards = build_corpus(files.cache_directory(), VOCAB, progress.show)
        cluster = catalogue.load_cluster("local-cpu")
        found = explore(cluster, shards, steps, workers=WORKERS, on_progress=progress.show)
    pictures = lab_svgs(found)
    # A training that diverged has losses that JSON has no number for: null there, as in metrics.jsonl.
    figures = json.loads(found.model_dump_json())
    files.write_text(out / "lab.json", files.json_text(figures))
    for name, text in pictures.items():
        files.write_text(out / name, text)
    files.write_text(out / "lab.html", lab_page(found, pictures))
    if as_json:
        output.show_json({"path": str(out), "verdict": verdict(found), **figures})
        return
    output.show(lab_view(found), f"\nwrote {out}: lab.html has all of it, lab.json the figures")
