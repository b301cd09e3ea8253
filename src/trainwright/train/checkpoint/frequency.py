"""How often to save: at a fixed interval, or as often as a bound on what it costs allows (CheckFreq, Mohan et al.,
FAST 2021, s4.2).

With t_i the step, t_f the whole of a save and o the part that the step waits for, saves are far enough apart that
one has ended before the next, k >= (t_f - o) / t_i, and that waiting is below the bound, k >= o / (bound * t_i).
What can't be said beforehand, that steps are slower while files are written, is measured: while the time between
two saves is above what its steps take alone by more than the bound, the interval grows by 2.
"""

import statistics

from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.frequency import GROWTH, steps_to_bound, steps_to_write

FIRST_STEPS = 5
"""Before the first save of an adaptive frequency, of which the first `WARM_UP` are not representative."""
WARM_UP = 2


class Frequency:
    """The interval between saves. Ranks see different times, so the first rank's count: all set `interval` to
    its."""

    def __init__(self, policy: Checkpointing) -> None:
        self._policy = policy
        self.interval = policy.every_steps or FIRST_STEPS
        self._since = 0
        self._seen = 0
        self._alone_s: list[float] = []
        self._between_s: list[float] = []
        self._blocked_s = 0.0
        self._grown = 0

    @property
    def is_fixed(self) -> bool:
        return self._policy.every_steps is not None

    def is_due(self, step: int) -> bool:
        """Whether to save now that `step` steps are done; called once after each."""
        self._since += 1
        if self._policy.every_steps is not None:
            return step % self._policy.every_steps == 0
        return self._since >= self.interval

    def stepped(self, step_s: float, *, is_writing: bool) -> None:
        """A step took so long, beside a save's files being written or not."""
        self._seen += 1
        if self._seen > WARM_UP:
            self._between_s.append(step_s)
            if not is_writing:
                self._alone_s.append(step_s)

    def saved(self, blocked_s: float) -> None:
        """A save has begun, for which the step waited."""
        self._since = 0
        self._between_s.clear()
        self._blocked_s = blocked_s

    def next_interval(self, whole_s: float) -> int:
        """Steps until the save after the next, when the last one took `whole_s` in all and is ended."""
        if self.is_fixed or not self._alone_s:
            return self.interval
        step_s = statistics.median(self._alone_s)
        bound = self._policy.overhead_bound
        wanted = max(
            steps_to_write(whole_s, self._blocked_s, step_s), steps_to_bound(self._blocked_s, step_s, bound)
        )
        steps = len(self._between_s)
        if steps:
            alone_s = steps * step_s
            if (sum(self._between_s) + self._blocked_s - alone_s) / alone_s > bound:
                self._grown += GROWTH
        return wanted + self._grown
