"""What every rank writes of every step: its seconds by cause, as a line of `causes/rank-N.jsonl`.

The clock counts them anyway; a line costs one write to a file that is open (`benchmarks/telemetry.py` shows the
whole of it). A device that runs behind the program is a step late with its seconds, and nobody waits for them
before the run's end.
"""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from trainwright.spec.record import StepSeconds
from trainwright.train.device_clock import DeviceClock
from trainwright.train.journal import AppendOnly, bytes_of_steps

FOLDER = "causes"


class Telemetry:
    """Open for the length of a run on one rank; lines of the first `steps_done` steps are kept."""

    def __init__(self, directory: Path, rank: int, device: DeviceClock | None, steps_done: int = 0) -> None:
        path = directory / FOLDER / f"rank-{rank}.jsonl"
        self._rank, self._device = rank, device
        self._file = AppendOnly(path, bytes_of_steps(path, steps_done))
        self._begun: deque[int] = deque()
        """Steps that the program has ended and the device perhaps not."""
        self._known: deque[StepSeconds] = deque()
        self._checkpoint_s: dict[int, float] = {}
        self.latest: StepSeconds | None = None
        """The last step whose seconds are known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._device is not None:
            self._take(self._device.finished(wait=True))
            self._write()
        self._file.close()

    def ended(self, step: int, seconds: Mapping[str, float]) -> None:
        """The program has ended a step that took it these seconds by cause."""
        self._begun.append(step)
        self._take([seconds] if self._device is None else self._device.finished())

    def saved(self, step: int, checkpoint_s: float) -> None:
        """What is saved after a step held the program up for so long; 0 where nothing is."""
        self._checkpoint_s[step] = checkpoint_s
        self._write()

    def _take(self, found: list[Mapping[str, float]] | list[dict[str, float]]) -> None:
        for seconds in found:
            self.latest = StepSeconds(step=self._begun.popleft(), rank=self._rank, seconds=dict(seconds))
            self._known.append(self.latest)

    def _write(self) -> None:
        lines = []
        while self._known and self._known[0].step in self._checkpoint_s:
            record = self._known.popleft()
            checkpoint_s = self._checkpoint_s.pop(record.step)
            lines.append(record.model_copy(update={"checkpoint_s": checkpoint_s}).model_dump_json() + "\n")
        if lines:
            self._file.append("".join(lines).encode())
