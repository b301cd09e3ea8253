"""Where a rank's time goes: a stack of causes, of which the innermost runs.

`with clock.of("dp"): ...` charges the time inside to dp and not to the cause around it, so the causes sum to the
whole. Causes are those of `spec.ledger.STEP_SECONDS`; what no other claims is `host`.

A device that runs behind the program is charged by itself: `train/device_clock.py` leaves an event in its stream
at every change of cause, and nobody waits for it.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from trainwright.spec.ledger import STEP_SECONDS


class DeviceMarks(Protocol):
    """Told of every change of cause, as the program that feeds a device comes by it."""

    def begin(self, cause: str) -> None:
        """A step begins."""
        ...

    def change(self, cause: str) -> None:
        """From here on `cause` is charged."""
        ...

    def end(self) -> None:
        """The step ends."""
        ...


class Clock:
    """Seconds by cause since the last `restart`, of the program. While the clock is `precise`, `synchronize` waits
    for a device that runs behind the program, at restart, read and every change of cause; otherwise nobody waits,
    the causes of such a device are what `marks` make of them, and only the sum here is to be trusted."""

    def __init__(self, synchronize: Callable[[], None] | None = None, marks: DeviceMarks | None = None) -> None:
        self._synchronize = synchronize
        self._marks = marks
        self._stack = ["host"]
        self.precise = False
        self.named: Callable[[str], AbstractContextManager[object]] | None = None
        """While a profiler records: how it is told of a cause."""
        self.on_change: Callable[[str], None] = lambda cause: None
        """Told of every change of cause as the program comes by it."""
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(STEP_SECONDS, 0.0)
        if self._marks is not None:
            self._marks.begin(self.cause)
        self._since_s = self._now_s()

    @property
    def cause(self) -> str:
        """The cause that is being charged."""
        return self._stack[-1]

    def of(self, cause: str) -> AbstractContextManager[None]:
        """`cause` is charged inside."""
        return _Of(self, cause)

    def _begin(self, cause: str) -> None:
        self._charge()
        self._stack.append(cause)
        self._tell()

    def _end(self) -> None:
        self._charge()
        self._stack.pop()
        self._tell()

    def _tell(self) -> None:
        cause = self._stack[-1]
        self.on_change(cause)
        if self._marks is not None:
            self._marks.change(cause)

    def read(self) -> dict[str, float]:
        """Seconds by cause so far; they sum to the time since `restart`."""
        self._charge()
        if self._marks is not None:
            self._marks.end()
        return dict(self.seconds)

    def _charge(self) -> None:
        now_s = self._now_s()
        self.seconds[self._stack[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _now_s(self) -> float:
        if self.precise and self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


class _Of:
    """Where a cause is charged. It is entered many times a step, and a generator would cost twice as much."""

    __slots__ = ("_cause", "_clock", "_named")

    def __init__(self, clock: Clock, cause: str) -> None:
        self._clock, self._cause = clock, cause
        self._named = None if clock.named is None else clock.named(cause)

    def __enter__(self) -> None:
        if self._named is not None:
            self._named.__enter__()
        self._clock._begin(self._cause)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock._end()
        if self._named is not None:
            self._named.__exit__(kind, error, trace)
