"""`trainwright calibrate`: measure this machine and write it as a cluster that `plan` can use."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.options import AsJson
from trainwright.cli.worker import Stream, run_workers, started_by_torchrun, tell

if TYPE_CHECKING:
    from trainwright.measure.calibrate import Machine
    from trainwright.spec.record import Calibration

EXAMPLE = "Example: trainwright calibrate --ranks 4 --out cluster.toml"

CLUSTER_NAME = "this-machine"


def calibrate(
    ranks: Annotated[int, typer.Option(min=1, help="Processes that compute and communicate.")] = 4,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.toml"),
    samples: Annotated[
        Path | None, typer.Option(help="Keep the micro-measurements too, one JSON object per line.")
    ] = None,
    as_json: AsJson = False,
    stream: Stream = False,
) -> None:
    """Measure matmul, attention, memory and collectives of this machine, and fit a cluster to them."""
    if started_by_torchrun():
        _measure(samples or out.with_name("samples.jsonl"), stream)
    from trainwright.cli import files, output
    from trainwright.cli.progress import Progress
    from trainwright.spec import toml

    for path in (out, *([samples] if samples else [])):
        files.require_place(path)
    with Progress(output.console(errors=True)) as progress:
        calibration = calibrated(ranks, samples, progress.show)
    files.write_text(out, toml.write(calibration.cluster))
    if as_json:
        fits = [fit.plain() for fit in calibration.fits]
        output.show_json({"path": str(out), "cluster": calibration.cluster.plain(), "fits": fits})
        return
    from trainwright.present.clusters import calibration_view

    output.show(calibration_view(calibration), f"\nwrote {out}")


def calibrated(ranks: int, samples: Path | None, on_progress: Callable[[str, float], None]) -> "Calibration":
    """Measure this machine with that many processes; the samples are kept where a file is named."""
    import tempfile

    from trainwright.cli import files
    from trainwright.measure.calibrate import calibrate as fit
    from trainwright.measure.records import parse_samples

    with tempfile.TemporaryDirectory() as directory:
        kept = Path(directory) / "samples.jsonl"
        arguments = ["calibrate", "--samples", str(kept)]
        run_workers(arguments, ranks, lambda message: on_progress(message["what"], message["done"]))
        text = files.read_text(kept)
    if samples:
        files.write_text(samples, text)
    return fit(parse_samples(text, "samples.jsonl"), machine())


def machine() -> "Machine":
    """What the operating system says of this node."""
    from trainwright.measure.calibrate import Machine

    return Machine(
        name=CLUSTER_NAME,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _processor() -> str:
    """The processor by the name that its maker gave it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named and named[0] else platform.processor() or platform.machine() or "CPU"


def _measure(samples: Path, stream: bool) -> None:
    """What each rank does; the first one writes the samples. Does not return."""
    from trainwright.cli import files
    from trainwright.spec.layout import Layout
    from trainwright.train.bench import Bench
    from trainwright.train.mesh import Worker, joined, leave

    worker = Worker.from_environment()

    def on_progress(what: str, done: float) -> None:
        if worker.rank == 0 and stream:
            tell({"what": what, "done": done})

    with joined(Layout(dp=worker.world)) as mesh:
        found = Bench(worker.rank, worker.world, mesh.device).samples(on_progress)
    if worker.rank == 0:
        files.write_text(samples, "".join(f"{sample.model_dump_json()}\n" for sample in found))
    leave(0)
