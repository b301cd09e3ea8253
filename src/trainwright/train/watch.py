"""What is measured of a run's steps on one rank, and which steps it is measured in.

Steps are of three kinds. The first `WARM_UP` are slower than the rest and don't count for time; in them the
peak of live bytes is taken (the first brings the optimizer's state into being, so the second is higher). Where
layers are compiled, which on a CPU they are when nobody looks at their bytes, one more is theirs. Then come
`INSTRUMENTED` steps that are looked at closely for where their time goes. All others are timed plainly: their
median is the run's step time, to which the instrumented seconds by cause are scaled. A run too short for all of
that is measured with what it has.
"""

import statistics
from collections.abc import Callable
from typing import TypeVar

from trainwright.spec.ledger import STEP_SECONDS, seen_seconds
from trainwright.spec.record import RankRecord
from trainwright.train.door import WARM_UP
from trainwright.train.instrument import looked_at_closely, peak_bytes_of
from trainwright.train.parallel.local import bytes_of
from trainwright.train.parallelize import Trainer

INSTRUMENTED = 3
Result = TypeVar("Result")
"""What a step's body gives, which is handed through."""


class Watch:
    """Measures the steps of a run of `steps` steps."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self._trainer = trainer
        first = self._warm_up = WARM_UP + trainer.run.recipe.compile
        self._instrumented = range(first, first + INSTRUMENTED) if steps > first + INSTRUMENTED else range(0)
        self._seconds: list[dict[str, float]] = []
        self._plain_s: list[float] = []
        self._all_s: list[float] = []
        self.last_seconds: dict[str, float] = {}
        """Of the last step by cause, as the program saw it."""
        self.peak_bytes = 0
        """The most bytes of live tensors so far."""

    @property
    def last_step_s(self) -> float:
        return self._all_s[-1]

    @property
    def step_s(self) -> float:
        """Median of the plainly timed steps."""
        return statistics.median(self._plain_s or self._all_s)

    def around(self, step: int, body: Callable[[], Result], *, is_recorded: bool = False) -> Result:
        """Run the body of step `step` (from 0) and measure it as its kind asks. One that a profiler records is
        slower, and counts for no time."""
        clock, mesh = self._trainer.clock, self._trainer.mesh
        results: list[Result] = []
        clock.restart()
        if step < WARM_UP:
            self.peak_bytes = max(self.peak_bytes, peak_bytes_of(lambda: results.append(body()), mesh.device))
        elif step in self._instrumented:
            with looked_at_closely(clock):
                results.append(body())
        else:
            results.append(body())
        seconds = clock.read()
        self._all_s.append(sum(seconds.values()))
        self.last_seconds = seconds
        if is_recorded:
            return results[0]
        if step in self._instrumented:
            self._seconds.append(seconds)
        elif step >= self._warm_up:
            self._plain_s.append(self.last_step_s)
        return results[0]

    def record(self) -> RankRecord:
        """This rank's line of the ledger."""
        trainer, run = self._trainer, self._trainer.run
        moments = [each for state in trainer.optimizer.state.values() for each in state.values() if each.ndim]
        seconds: dict[str, float] = {}
        if self._seconds:
            medians = {cause: statistics.median(each[cause] for each in self._seconds) for cause in STEP_SECONDS}
            scale = self.step_s / sum(medians.values())
            seconds = seen_seconds({cause: median * scale for cause, median in medians.items()})
        return RankRecord(
            run_hash=run.hash,
            rank=trainer.mesh.rank,
            pp_rank=trainer.mesh.coordinate.pp,
            steps_timed=len(self._plain_s),
            step_s=self.step_s,
            tokens_per_s=run.recipe.tokens_per_step / self.step_s,
            seconds=seconds,
            bytes={**trainer.held_bytes(), "optimizer": float(sum(map(bytes_of, moments)))},
            peak_bytes=float(self.peak_bytes),
        )
