"""`trainwright calibrate`: measure this machine and write it as a cluster that `plan` can use."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.options import AsJson
from trainwright.cli.worker import Stream, run_workers, started_by_torchrun, tell

if TYPE_CHECKING:
    from trainwright.spec.record import Calibration, Machine
    from trainwright.train.mesh import Worker

EXAMPLE = "Example: trainwright calibrate --ranks 4 --out cluster.toml"

Told = Callable[[str, float], None]


def calibrate(
    ranks: Annotated[int, typer.Option(min=1, help="Processes that compute and communicate.")] = 4,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.toml"),
    samples: Annotated[
        Path | None,
        typer.Option(help="The micro-measurements, one JSON object per line. [default: beside the cluster]"),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=1.0, max=3600.0, help="About how long to measure; starting processes comes on top."),
    ] = 30.0,
    max_noise: Annotated[
        float,
        typer.Option(min=0.0, help="Write nothing where half of the calls scatter by more, as a fraction."),
    ] = 0.3,
    as_json: AsJson = False,
    stream: Stream = False,
) -> None:
    """Measure matmul, attention, memory, launches and collectives of this machine, and fit a cluster to them.

    Under torchrun, on one node or several, its processes are what is measured, and --ranks is not asked.
    """
    from trainwright.cli import files, output

    kept = samples or out.with_suffix(".samples.jsonl")
    if started_by_torchrun():
        _measure(seconds, out, kept, max_noise, stream=stream)
    from trainwright.cli.progress import Progress

    for path in (out, kept):
        files.require_place(path)
    with Progress(output.console(errors=True)) as progress:
        text, found = measured(ranks, seconds, progress.show)
    calibration = _write(text, found, out, kept, max_noise)
    if as_json:
        fits = [fit.plain() for fit in calibration.fits]
        output.show_json(
            {"path": str(out), "samples": str(kept), "cluster": calibration.cluster.plain(), "fits": fits}
        )
        return
    from trainwright.present.clusters import calibration_view

    output.show(calibration_view(calibration), f"\nwrote {out} and {kept}")


def measured(ranks: int, seconds: float, on_progress: Told) -> "tuple[str, Machine]":
    """The text of the samples that so many processes of this machine took, and what the machine is."""
    import tempfile

    from trainwright.cli import files
    from trainwright.spec.record import Machine

    machines: list[Machine] = []

    def on_message(message: dict[str, Any]) -> None:
        if "machine" in message:
            machines.append(Machine.parse(message["machine"]))
        else:
            on_progress(message["what"], message["done"])

    with tempfile.TemporaryDirectory() as directory:
        kept = Path(directory) / "samples.jsonl"
        run_workers(["calibrate", "--samples", str(kept), "--seconds", str(seconds)], ranks, on_message)
        return files.read_text(kept), machines[0]


def fitted(text: str, found: "Machine", max_noise: float) -> "Calibration":
    """The cluster that samples describe; `InvalidSpec` where they scatter too much."""
    from trainwright.measure.calibrate import calibrate as fit
    from trainwright.measure.records import parse_samples

    return fit(parse_samples(text, "samples.jsonl"), found, max_noise)


def _write(text: str, found: "Machine", out: Path, kept: Path, max_noise: float) -> "Calibration":
    """Fit, and only then write."""
    from trainwright.cli import files
    from trainwright.spec import toml

    calibration = fitted(text, found, max_noise)
    files.write_text(kept, text)
    files.write_text(out, toml.write(calibration.cluster))
    return calibration


def _node(worker: "Worker") -> "Machine":
    """What the operating system says of a CPU node that the ranks of this worker's share."""
    from trainwright.spec.record import Machine

    ranks = worker.local_world
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        device=_processor(),
        kind="cpu",
        devices=ranks,
        concurrent_devices=min(cores, ranks),
        nodes=max(worker.world // ranks, 1),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks,
    )


def _processor() -> str:
    """The processor by the name that its maker gave it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named and named[0] else platform.processor() or platform.machine() or "CPU"


def _measure(seconds: float, out: Path, kept: Path, max_noise: float, *, stream: bool) -> None:
    """What each rank does. The first one writes the samples and tells what the machine is, or, where a user's own
    launcher started it, fits and writes the cluster too. Does not return."""
    from trainwright.cli import files
    from trainwright.spec.layout import Layout
    from trainwright.train.bench import Bench, accelerator
    from trainwright.train.mesh import Worker, joined, leave

    worker = Worker.from_environment()

    def on_progress(what: str, done: float) -> None:
        if worker.rank == 0 and stream:
            tell({"what": what, "done": done})

    with joined(Layout(dp=worker.world)) as mesh:
        found = Bench(worker, mesh.device, seconds).samples(on_progress)
    if worker.rank == 0:
        text = "".join(f"{sample.model_dump_json()}\n" for sample in found)
        machine = accelerator(worker) or _node(worker)
        if stream:
            files.write_text(kept, text)
            tell({"machine": machine.plain()})
        else:
            _write(text, machine, out, kept, max_noise)
    leave(0)
