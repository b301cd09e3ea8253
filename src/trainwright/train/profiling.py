"""Steps that are recorded: a window of them as traces of torch.profiler, or as snapshots of a GPU's memory.

One rank of each pipeline stage records. A trace names the run by its hash and the steps by their numbers, and has
the causes that the clock charges as annotations, so that `explain` can read it on a CPU too; a snapshot is what
pytorch.org/memory_viz opens. Files appear when they are whole.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainwright.spec.trace import CAUSE, METADATA, STEP
from trainwright.spec.window import StepWindow
from trainwright.train.clock import Clock
from trainwright.train.journal import refuse
from trainwright.train.mesh import Mesh

PROFILES, SNAPSHOTS = "profile", "memory"
MOST_ALLOCATIONS = 1_000_000
"""Events that a snapshot keeps, the newest: a step of a large model makes some ten thousand."""


class Recorders:
    """What records this rank's steps, told of each before and after it."""

    def __init__(
        self,
        mesh: Mesh,
        clock: Clock,
        out_dir: Path,
        run_hash: str,
        profiled: StepWindow | None,
        snapshot: StepWindow | None,
    ) -> None:
        at = mesh.coordinate
        records = at.tp == at.cp == at.dp == 0
        self._profiled, self._snapshot = (each if records else None for each in (profiled, snapshot))
        self._on_all = profiled
        self._mesh, self._clock, self._out, self._run_hash = mesh, clock, out_dir, run_hash
        self._profiler: profile | None = None

    def slows(self, step: int) -> bool:
        """Whether any rank profiles this step, or has just written what it profiled, which all then wait for."""
        return self._on_all is not None and self._on_all.first <= step <= self._on_all.last + 1

    def around(self, step: int) -> AbstractContextManager[object]:
        """Around the body of a step; begins what begins with it."""
        if self._snapshot is not None and step == self._snapshot.first:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        if self._profiled is None or step not in self._profiled:
            return nullcontext()
        if step == self._profiled.first:
            kinds = [ProfilerActivity.CPU]
            kinds += [ProfilerActivity.CUDA] if self._mesh.device.type == "cuda" else []
            self._profiler = profile(activities=kinds)
            self._profiler.start()
            self._profiler.add_metadata(METADATA, self._run_hash)
            self._clock.named = lambda cause: record_function(f"{CAUSE}{cause}")
        return record_function(f"{STEP}{step}")

    def after(self, step: int) -> None:
        """Write what ends with a step."""
        name = f"rank-{self._mesh.rank}"
        if self._profiler is not None and self._profiled is not None and step == self._profiled.last:
            self._clock.named = None
            if self._mesh.device.type == "cuda":
                torch.cuda.synchronize()  # what the last step asked for is recorded too
            self._profiler.stop()
            profiler, self._profiler = self._profiler, None
            steps = f"steps-{self._profiled.first}-{self._profiled.last}"
            self._write(self._out / PROFILES / f"{steps}_{name}.json.gz", profiler.export_chrome_trace)
        if self._snapshot is not None and step == self._snapshot.last:
            steps = f"steps-{self._snapshot.first}-{self._snapshot.last}"
            self._write(self._out / SNAPSHOTS / f"{steps}_{name}.pickle", torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, path: Path, write: Callable[[str], object]) -> None:
        beside = path.with_name(f"writing-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(beside))
            os.replace(beside, path)
        except (OSError, RuntimeError) as error:
            beside.unlink(missing_ok=True)
            refuse(path, error if isinstance(error, OSError) else OSError(0, str(error).splitlines()[0]))
