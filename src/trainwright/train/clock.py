"""Where a rank's time goes: a stack of causes, of which the innermost runs.

`with clock.of("dp"): ...` charges the time inside to dp and not to the cause around it, so the causes sum to the
whole. Causes are those of `spec.ledger.SEEN_SECONDS`; what no other claims is `host`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainwright.spec.ledger import SEEN_SECONDS


class Clock:
    """Seconds by cause since the last `restart`. `synchronize` waits for a device that runs behind the program:
    at restart and read, and at every change of cause while the clock is `precise`; otherwise the causes of such a
    device are those of the program that feeds it, and only their sum is to be trusted."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._stack = ["host"]
        self.precise = False
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(SEEN_SECONDS, 0.0)
        self._since_s = self._now_s(synchronized=True)

    @property
    def cause(self) -> str:
        """The cause that is being charged."""
        return self._stack[-1]

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        self._charge()
        self._stack.append(cause)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def read(self) -> dict[str, float]:
        """Seconds by cause so far; they sum to the time since `restart`."""
        self._charge(synchronized=True)
        return dict(self.seconds)

    def _charge(self, *, synchronized: bool = False) -> None:
        now_s = self._now_s(synchronized=synchronized or self.precise)
        self.seconds[self._stack[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _now_s(self, *, synchronized: bool) -> float:
        if synchronized and self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()
