"""`trainwright demo`: the whole story on one small machine in under 90 seconds.

It plans a frontier run, measures this machine, plans a small one for it, trains that on the text that every
machine has, and holds what it took against what was predicted.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainwright.cli.planner import Searched
    from trainwright.spec.cluster import ClusterSpec
    from trainwright.spec.run import Run

EXAMPLE = "Example: trainwright demo --out out/demo"

RANKS = 4
MEASURING_S = 12.0
SMALL_MODEL = "llama-local-6m"
SMALL_SEQ_LEN = 256
SMALL_GLOBAL_BATCH = 8
SMALL_CHOICES = ["layout.tp=2", "layout.cp=1", "layout.vpp=1", "recipe.optimizer.lr=2e-3", "data.vocab_size=4096"]
"""tp is fixed so that two kinds of parallelism are at work; the planner chooses pp=2 or dp=2 beside it."""
TRAINING_S = 28.0
"""What the steps are predicted to take together; a machine with other work on it may take twice as long."""
FEWEST_STEPS, MOST_STEPS = 30, 200


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets everything that is written.")] = Path("out/demo"),
    as_json: AsJson = False,
) -> None:
    """Plan Llama 3.1 405B on 16,384 H100; then measure this machine, plan, train and check a small Llama on it."""
    from trainwright.cli import calibrate, files, output, train
    from trainwright.cli.compare import compared
    from trainwright.present.clusters import measured_view
    from trainwright.present.comparisons import comparison_view
    from trainwright.present.parts import step_heading
    from trainwright.present.plans import answer_view
    from trainwright.present.training import training_view
    from trainwright.spec import toml

    started_s = time.perf_counter()
    files.make_directory(out)
    report: dict[str, Any] = {}

    def show(*views: "RenderableType") -> None:
        if not as_json:
            output.show(*views)

    def begin(number: int, what: str) -> None:
        show(step_heading(f"{number} of 6", what, time.perf_counter() - started_s))

    begin(1, "Plan Llama 3.1 405B on 16,384 H100, as Meta trained it")
    frontier = _plan_frontier()
    show(answer_view(*frontier))
    report["frontier"] = frontier.answer.report(frontier.search_s)

    begin(2, f"Measure this machine with {RANKS} processes")
    with _progress(as_json) as on_progress:
        text, machine = calibrate.measured(RANKS, MEASURING_S, on_progress)
    # A demo goes on where the machine is noisy: what it predicted and saw will say so.
    calibration = calibrate.fitted(text, machine, math.inf)
    files.write_text(out / "samples.jsonl", text)
    files.write_text(out / "cluster.toml", toml.write(calibration.cluster))
    show(measured_view(calibration.cluster), f"  wrote {out / 'cluster.toml'}")
    report["cluster"] = calibration.cluster.plain()

    begin(3, "Plan a small Llama for it")
    small, run = _plan_small(calibration.cluster)
    files.write_text(out / "run.toml", toml.write(run))
    show(answer_view(*small), f"\n  wrote {out / 'run.toml'}: {run.steps} steps")
    report["plan"] = small.answer.report(small.search_s)

    begin(4, "Make the text to train on: the sources of Python's standard library, and a BPE trained on them")
    with _progress(as_json) as on_progress:
        train.shards_of(run, on_progress)

    begin(5, f"Train it on {RANKS} processes")
    with _progress(as_json) as on_progress:
        records = train.trained(run, train.steps_of(run, None), out, on_progress)
    show(training_view(run, records))
    report["losses"] = [record.loss for record in records]

    begin(6, "Hold what was seen against what was predicted")
    comparison = compared(out)
    show(comparison_view(comparison))
    report["comparison"] = comparison.report()
    report["demo_s"] = time.perf_counter() - started_s
    show(f"\nDone in {report['demo_s']:.0f} s; everything is in {out}")
    if as_json:
        output.show_json(report)


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str, float], None]]:
    """Where progress goes: to standard error with --json, so that standard output holds one document."""
    from trainwright.cli.output import console
    from trainwright.cli.progress import Progress

    with Progress(console(errors=as_json)) as progress:
        yield progress.show


def _plan_frontier() -> "Searched":
    """The published run: sequences of 8,192, 16.8 M tokens a step, 15.6 T in all (arXiv:2407.21783 table 4)."""
    from trainwright.cli import catalogue
    from trainwright.cli.draft import draft
    from trainwright.cli.planner import searched

    drafted = draft(
        catalogue.load_model("llama-3.1-405b"),
        catalogue.load_cluster("h100-sxm"),
        seq_len=8192,
        global_batch=2048,
        precision="bf16",
        tokens=15_600_000_000_000,
        assignments=[],
    )
    return searched(drafted.question(16384, top=3))


def _plan_small(cluster: "ClusterSpec") -> "tuple[Searched, Run]":
    """The faster of fp32 and bf16; a budget of as many steps as the demo has time for."""
    from trainwright.cli import catalogue
    from trainwright.cli.draft import draft
    from trainwright.cli.planner import searched
    from trainwright.spec.errors import InvalidSpec
    from trainwright.spec.run import Budget

    found = []
    for precision in ("fp32", "bf16"):
        drafted = draft(
            catalogue.load_model(SMALL_MODEL),
            cluster,
            seq_len=SMALL_SEQ_LEN,
            global_batch=SMALL_GLOBAL_BATCH,
            precision=precision,
            tokens=None,
            assignments=SMALL_CHOICES,
        )
        small = searched(drafted.question(RANKS, top=3))
        if small.answer.plans:
            found.append((drafted, small))
    if not found:
        raise InvalidSpec(f"{SMALL_MODEL}: no plan fits this machine's memory; close other programs and try again")
    drafted, small = min(found, key=lambda each: each[1].answer.plans[0].step_s)
    plan = small.answer.plans[0]
    steps = min(max(round(TRAINING_S / plan.step_s), FEWEST_STEPS), MOST_STEPS)
    budget = Budget(tokens=steps * plan.recipe.tokens_per_step)
    return small, drafted.changed(budget=budget).run(plan)
