"""`trainwright explain`: where the MFU of a finished run went, from what it left: its directory, a trace, or a
log."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson, Assignments

if TYPE_CHECKING:
    from trainwright.spec.cluster import ClusterSpec
    from trainwright.spec.explanation import Explanation, LogFit
    from trainwright.spec.run import Run

EXAMPLE = (
    "Example: trainwright explain out/run; trainwright explain trace.json.gz --run run.toml; "
    "trainwright explain megatron.log --run run.toml"
)

Seen = Annotated[
    Path,
    typer.Argument(
        metavar="DIR|TRACE|LOG",
        help="What `train --out` wrote; a trace of torch.profiler, also gzipped; or a log with step times of "
        "Megatron-LM, TorchTitan, NeMo or DeepSpeed.",
    ),
]
OfRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN.TOML",
        help="The run that a trace or log is of; a directory, or a trace in it, has it.",
    ),
]
LARGEST_BYTES = 2_000_000_000
"""Of a trace or log, unpacked: it is held in memory."""
WORTH = 0.01
"""Of the step: for smaller causes nothing is tried."""


def explain(seen: Seen, run_file: OfRun = None, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Say where a run's MFU went: by cause, predicted and seen, the largest gap first, and what to try. From a
    log of step times, fit the constants that it identifies and plan again with them."""
    from trainwright.cli.output import show, show_json
    from trainwright.present.explanation import explanation_view, log_fit_view
    from trainwright.spec.explanation import LogFit

    found = explained(seen, run_file, assignments)
    if as_json:
        show_json(found.report())
    else:
        show(log_fit_view(found) if isinstance(found, LogFit) else explanation_view(found))


def explained(seen: Path, run_file: Path | None, assignments: list[str] | None) -> "Explanation | LogFit":
    """The explanation of what `seen` holds."""
    from trainwright.cli import files
    from trainwright.spec.errors import InvalidSpec, reject

    if seen.is_dir():
        if run_file is not None:
            reject("--run", str(run_file), f"is for traces and logs; {seen} has its own run.toml")
        if not (seen / "run.toml").exists():
            raise InvalidSpec(f"{seen}: has no run.toml; name a directory that `train --out` wrote")
        return _of_directory(seen, files.read_run(seen / "run.toml", assignments))
    text = _read(seen)
    beside = [each / "run.toml" for each in (seen.parent, seen.parent.parent)] if run_file is None else [run_file]
    there = next((each for each in beside if each.exists() or each is run_file), None)
    if there is None:
        raise InvalidSpec(
            f"{seen}: says nothing of model and cluster; name the run that it is of with --run run.toml"
        )
    run = files.read_run(there, assignments)
    if _is_json(seen, text):
        return _of_trace(seen, text, run)
    return _of_log(seen, text, run)


def _of_directory(directory: Path, run: "Run") -> "Explanation":
    from trainwright.cli import files
    from trainwright.measure.explain import run_hash_of, seen_by_telemetry
    from trainwright.spec.errors import InvalidSpec, reject
    from trainwright.spec.explanation import RUN_CAUSES

    folder, ledger = directory / "causes", directory / "ledger.jsonl"
    if not folder.is_dir():
        raise InvalidSpec(f"{folder}: no such directory; a run writes it step by step: train this one")
    marked = run_hash_of(files.read_text(ledger)) if ledger.exists() else None
    if marked is not None and marked != run.hash:
        reject("run_hash", marked, f"{ledger} is of another run than run.toml ({run.hash}); train again")
    texts = {rank: folder / f"rank-{rank}.jsonl" for rank in range(run.layout.world)}
    there = {rank: files.read_text(path) for rank, path in texts.items() if path.exists()}
    found = _beside_prediction(run, seen_by_telemetry(run, there, str(folder)), RUN_CAUSES, by_us=True)
    traces = sorted((directory / "profile").glob("*.json.gz"))
    if not traces:
        return found
    note = f"by kind of kernel: trainwright explain {traces[0]}"
    return found.changed(seen=found.seen.changed(notes=(*found.seen.notes, note)))


def _of_trace(path: Path, text: str, run: "Run") -> "Explanation":
    from trainwright.cli import catalogue
    from trainwright.measure.trace import parse_trace
    from trainwright.measure.trace_causes import seen_step
    from trainwright.spec.explanation import trace_causes
    from trainwright.spec.trace import METADATA

    seen = seen_step(parse_trace(text, str(path), run), run, catalogue.kernels())
    causes = trace_causes(run.recipe.recompute != "none")
    return _beside_prediction(run, seen, causes, by_us=METADATA in text)


def _beside_prediction(run: "Run", seen, causes, *, by_us: bool) -> "Explanation":
    """By cause, with what to try: what our trainer can carry out where it trained the run (`by_us`)."""
    from trainwright.cli.planner import predicted
    from trainwright.measure.explain import explained as beside
    from trainwright.plan.advice import tries
    from trainwright.spec.errors import InvalidSpec
    from trainwright.train.door import require_trainable

    def can_be_trained(changed: "Run") -> bool:
        try:
            require_trainable(changed)
        except InvalidSpec:
            return False
        return True

    prediction = predicted(run)
    found = beside(run, prediction, seen, causes)
    allowed = can_be_trained if by_us else lambda changed: True
    return found.changed(
        causes=tuple(
            each.changed(tries=tries(run, each.name, prediction, allowed))
            if max(each.seen_s, each.predicted_s) > WORTH * seen.step_s
            else each
            for each in found.causes
        )
    )


def _of_log(path: Path, text: str, run: "Run") -> "LogFit":
    import numpy as np

    from trainwright.cli.planner import predicted
    from trainwright.measure.log_fit import fitted
    from trainwright.measure.logs import parse_log
    from trainwright.plan.predict import predict
    from trainwright.plan.remedies import remedy
    from trainwright.spec.errors import InvalidSpec
    from trainwright.spec.explanation import LogFit
    from trainwright.spec.question import Question

    log = parse_log(text, str(path), run)

    def of_batch(global_batch: int) -> "Run":
        return run.with_value("recipe.global_batch", global_batch).check()

    steps, notes = [], list(log.notes)
    for each in log.steps:
        try:
            of_batch(each.global_batch)
            steps.append(each)
        except InvalidSpec as error:
            notes.append(f"global batch {each.global_batch} is left out: {error}")

    def step_s(cluster: "ClusterSpec", global_batch: int) -> float:
        return predict(of_batch(global_batch).changed(cluster=cluster)).step_s

    with np.errstate(all="ignore"):
        constants, missing, cluster = fitted(run.cluster, steps, step_s)
        tokens = None if run.budget is None else run.budget.tokens
        question = Question(
            model=run.model, cluster=cluster, devices=run.layout.world, recipe=run.recipe, tokens=tokens
        )
        best = remedy("the constants of the log", question)
    return LogFit(
        run_name=run.name,
        run_hash=run.hash,
        framework=log.framework,
        steps=tuple(steps),
        constants=constants,
        unidentified=missing,
        before=predicted(run),
        after=predicted(run.changed(cluster=cluster)),
        best=best.plan if best is not None and best.plan.fits else None,
        notes=tuple(notes),
    )


def _is_json(path: Path, text: str) -> bool:
    """Whether it is meant for a trace; a log may begin with a bracket too."""
    begins = text[:4096].lstrip()
    return (
        begins.startswith("{")
        or (begins[:1] == "[" and begins[1:].lstrip()[:1] == "{")
        or ".json" in path.suffixes
    )


def _read(path: Path) -> str:
    """The text of a trace or log, unpacked where it is gzipped; `InvalidSpec` where it can't be read."""
    import gzip
    import zlib

    from trainwright.spec.errors import InvalidSpec

    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise InvalidSpec(f"{path}: no such file or directory; name a run's directory, a trace or a log") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InvalidSpec(f"{path}: the gzipped file ends early or is damaged; copy or record it again") from None
    if len(content) > LARGEST_BYTES:
        raise InvalidSpec(f"{path}: is larger than {LARGEST_BYTES} bytes; record fewer steps")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidSpec(f"{path}: not a text in UTF-8 (byte {error.start}); name a trace or a log") from None
