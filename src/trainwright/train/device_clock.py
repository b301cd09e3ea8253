"""Seconds by cause of a device that runs behind the program, without waiting for it.

At every change of cause an event is recorded in the stream that computes. Between two events the device did what
the program asked for between them: it computed, or it waited for a stream that communicates (`Work.wait` makes the
computing stream wait, not the program). When the last event of a step has come, which a later step asks, the times
between them are read. Events are used again.
"""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from trainwright.spec.ledger import STEP_SECONDS

MS = 1e-3
"""`Event.elapsed_time` counts milliseconds."""


class Marked(NamedTuple):
    """From this event on, a cause is charged."""

    cause: str
    event: Any


class DeviceClock:
    """The marks of a `Clock`. `new_event` makes what has `record()`, `query()`, `synchronize()` and
    `elapsed_time(later)`, as a `torch.cuda.Event` with timing does."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._free: list[Any] = []
        self._open: list[Marked] = []
        self._steps: deque[list[Marked]] = deque()

    def begin(self, cause: str) -> None:
        self._free += [mark.event for mark in self._open]  # of a step that nobody read
        self._open = []
        self.change(cause)

    def change(self, cause: str) -> None:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._open.append(Marked(cause, event))

    def end(self) -> None:
        self.change("host")
        self._steps.append(self._open)
        self._open = []

    def finished(self, *, wait: bool = False) -> list[dict[str, float]]:
        """Seconds by cause of the steps that the device has finished and that weren't told yet, the oldest first;
        with `wait`, of all that were ended."""
        found = []
        while self._steps:
            last = self._steps[0][-1].event
            if wait:
                last.synchronize()
            elif not last.query():
                break
            found.append(self._read(self._steps.popleft()))
        return found

    def _read(self, marks: list[Marked]) -> dict[str, float]:
        seconds = dict.fromkeys(STEP_SECONDS, 0.0)
        for mark, later in pairwise(marks):
            seconds[mark.cause] += mark.event.elapsed_time(later.event) * MS
        self._free += [mark.event for mark in marks]
        return seconds
