"""Where a rank's time goes: a stack of causes, of which the innermost runs.

`with clock.of("dp"): ...` charges the time inside to dp and not to the cause around it, so the causes sum to the
whole. Causes are those of `spec.ledger.SEEN_SECONDS`; what no other claims is `host`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainwright.spec.ledger import SEEN_SECONDS


class Clock:
    """Seconds by cause since the last `restart`. `synchronize` is called before each reading of the time, where
    the device runs behind the program."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._stack = ["host"]
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(SEEN_SECONDS, 0.0)
        self._since_s = self._now_s()

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
        self._charge()
        return dict(self.seconds)

    def _charge(self) -> None:
        now_s = self._now_s()
        self.seconds[self._stack[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _now_s(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()
