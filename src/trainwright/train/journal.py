"""What rank 0 writes while a run goes on: metrics.jsonl, TensorBoard scalars, of low-precision layers
precision.jsonl, and at the end ledger.jsonl.
(What every rank writes is in `train/telemetry.py`.)

A line (or a TensorBoard record) is written whole or not at all: if the disk fills up in the middle, what was torn
is cut off again, and the run ends with one line that names the file. `train/loop.py` says what the values are.
"""

import io
import json
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from tensorboard.compat.proto.event_pb2 import (  # made by protobuf
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from trainwright.spec.errors import reject
from trainwright.spec.record import PrecisionRecord, RankRecord, StepRecord, StepSeconds

METRICS, LEDGER, BOARD = "metrics.jsonl", "ledger.jsonl", "tensorboard"
PRECISION = "precision.jsonl"


class AppendOnly:
    """A file that grows by whole pieces, from its first `kept_bytes` on; raises `InvalidSpec` where it can't."""

    def __init__(self, path: Path, kept_bytes: int = 0) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.ftruncate(self._descriptor, kept_bytes)
        except OSError as error:
            refuse(path, error)

    def append(self, data: bytes) -> None:
        status = os.fstat(self._descriptor)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if stat.S_ISREG(status.st_mode):
                os.ftruncate(self._descriptor, status.st_size)
            refuse(self._path, error)

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """Open for the length of a run. Where `steps_done` is above 0 the run goes on, and lines of those steps are
    kept; else its files replace those of an earlier run in the same directory."""

    def __init__(self, directory: Path, steps_done: int = 0) -> None:
        self._directory = directory
        self._metrics = AppendOnly(directory / METRICS, bytes_of_steps(directory / METRICS, steps_done))
        self._board = AppendOnly(directory / BOARD / f"events.out.tfevents.{int(time.time())}.trainwright")
        self._precision: AppendOnly | None = None
        self._append_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if steps_done:
            # TensorBoard drops what an earlier file says of later steps.
            started = SessionLog(status=SessionLog.START)
            self._append_event(Event(wall_time=time.time(), step=steps_done + 1, session_log=started))
        for name in (LEDGER,) if steps_done else (LEDGER, PRECISION):
            try:
                (directory / name).unlink(missing_ok=True)
            except OSError as error:
                refuse(directory / name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        if self._precision is not None:
            self._precision.close()
        self._board.close()

    def step(self, record: StepRecord) -> None:
        """Append one line of metrics, and scalars of the same names."""
        self._metrics.append((record.model_dump_json() + "\n").encode())
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in record.plain().items() if name != "step"
        ]
        self._append_event(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)))

    def seconds(self, record: StepSeconds) -> None:
        """Scalars of a step's causes."""
        values = [
            Summary.Value(tag=f"seconds/{cause}", simple_value=value) for cause, value in record.seconds.items()
        ]
        self._append_event(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)))

    def precision(self, record: PrecisionRecord) -> None:
        """Append a line of precision.jsonl, and scalars of each tensor."""
        if self._precision is None:
            path = self._directory / PRECISION
            self._precision = AppendOnly(path, bytes_of_steps(path, record.step - 1))
        self._precision.append((record.model_dump_json() + "\n").encode())
        values = [
            Summary.Value(tag=f"precision/{layer}/{role}/{name}", simple_value=value)
            for layer, roles in record.layers.items()
            for role, health in roles.items()
            for name, value in health.plain().items()
        ]
        self._append_event(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)))

    def ledger(self, records: Sequence[RankRecord]) -> None:
        """Write ledger.jsonl, one line per rank: beside its place first, then renamed into it."""
        path = self._directory / LEDGER
        beside = path.with_suffix(".writing")
        try:
            with beside.open("w") as file:
                file.writelines(record.model_dump_json() + "\n" for record in records)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            refuse(path, error)

    def _append_event(self, event: Event) -> None:
        # TensorBoard's own writer does this on a thread of its own, which tells of a full disk by a traceback.
        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        self._board.append(framed.getvalue())


def bytes_of_steps(path: Path, steps_done: int) -> int:
    """Of the whole lines at the file's beginning that are of steps up to `steps_done`."""
    kept = 0
    if steps_done and path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n") or step > steps_done:
                break
            kept += len(line)
    return kept


def refuse(path: Path, error: OSError) -> NoReturn:
    """Say that an output can't be written."""
    reject("out", str(path), f"can't be written ({error.strerror or error}); free space or choose another --out")
