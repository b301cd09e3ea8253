"""Looks at all ranks of a node ten times a second, beside the elastic agent that waits for their end: names who
hangs or is slow, and ends who hangs, so that the agent sees a failure and ends the rest.

Time in which this thread itself did not run (a machine that slept) counts for nobody.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainwright.spec.supervision import FaultRecord, Supervision
from trainwright.train.faults.hangs import Hang, learned_s, named, stands_still, stopped
from trainwright.train.faults.sights import SeenRank, Sight
from trainwright.train.faults.slowness import Slowness

LOOK_S = 0.1
START_S = 300.0
"""For what is outside of steps, and the first ones: as long as the ranks' own collectives wait for one another."""
ANSWER_S = 0.5
"""For ranks to say where they stand."""
SILENCE_S = 0.5
"""A thread that has not beaten for so long when all stand still does not run."""
ASLEEP_S = 1.0
"""Between two looks: the watchdog was not running itself."""
ENDING_S = 1.0
"""For workers to end after one was ended, before those that can't are too."""


class Watchdog(threading.Thread):
    """Of one attempt. `hang` is what it ended the attempt for; `seen` the last sights."""

    def __init__(
        self,
        directory: Path,
        stages: Sequence[Sequence[int]],
        attempt: int,
        policy: Supervision,
        tell: Callable[[FaultRecord], None],
        failed: tuple[int, float] | None = None,
        save_s: float = 0.0,
        known_s: float = 0.0,
    ) -> None:
        """failed: in which step the attempt before ended, and when that was known, by the monotonic clock; save_s:
        for which a step may wait for a save; known_s: the longest act of earlier attempts in this layout."""
        super().__init__(daemon=True, name="watchdog")
        self._attempt, self._policy, self._tell = attempt, policy, tell
        self._world = sum(map(len, stages))
        self.ranks = [SeenRank(directory, rank) for rank in range(self._world)]
        self._slowness = Slowness(stages, policy.slow_factor)
        self._failed, self._known_s = failed, known_s
        self._patience_s = max(START_S, save_s + policy.hang_s)
        self.last_step = 0
        self._stopped_since_s: dict[int, float] = {}
        self._looked_at_s = time.monotonic()
        self._awake_since_s = self._looked_at_s
        self._asked_at_s: float | None = None
        self._is_over = threading.Event()
        self.grow_at_step: int | None = None
        """Where it ends the attempt when a commit of this step or a later one is there."""
        self.has_grown = False
        self.hang: FaultRecord | None = None
        self.seen: dict[int, Sight] = {}

    @property
    def reached(self) -> int:
        """The furthest step that a rank has been in, from 1."""
        return max((each.step for each in self.seen.values()), default=0)

    @property
    def learned_s(self) -> float:
        """The longest act of this attempt and earlier ones in its layout; 0: none is known."""
        own_s = learned_s(list(self.seen.values())) if len(self.seen) == self._world else 0.0
        return max(self._known_s, own_s)

    def stop(self) -> None:
        """All ranks have ended. What they wrote last is still there: a step may be shorter than the time since the
        last look. After a hang, what others waited is no measure of an act."""
        self._is_over.set()
        self.join()
        if self.hang is None:
            self._see()

    def run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            hang = self._look()
            if hang is not None:
                self._end(hang)
                return
            if self.grow_at_step is not None and self.ranks[0].saved_step >= self.grow_at_step:
                self.has_grown = True
                self._kill(tuple(self.seen))
                return

    def _look(self) -> Hang | None:
        now_s = time.monotonic()
        if now_s - self._looked_at_s > ASLEEP_S:
            self._awake_since_s = now_s
            self._asked_at_s = None
            self._stopped_since_s.clear()
        self._looked_at_s = now_s
        self._see()
        sights = list(self.seen.values())
        if len(sights) < self._world or any(each.state in ("", "Z") for each in sights):
            return None  # some are still starting; one has ended, of which the agent will know
        for each in sights:
            if each.is_stopped:
                self._stopped_since_s.setdefault(each.rank, now_s)
            else:
                self._stopped_since_s.pop(each.rank, None)
        hang = stopped(sights, {rank: now_s - since_s for rank, since_s in self._stopped_since_s.items()})
        if hang is not None:
            return hang
        awake_s = now_s - self._awake_since_s
        still = stands_still(sights, self._policy.hang_s, self._patience_s, self._known_s)
        if not still or awake_s < self._policy.hang_s:
            self._asked_at_s = None
            return None
        if self._asked_at_s is None:
            self._asked_at_s = now_s
            for each in self.ranks:
                each.ask()
            return None
        answers = {each.rank: answer for each in self.ranks if (answer := each.answer()) is not None}
        if len(answers) < self._world and now_s - self._asked_at_s < ANSWER_S:
            return None
        return named(sights, answers, SILENCE_S)

    def _see(self) -> None:
        """What all ranks have written, and what can be told of that alone."""
        self.seen = {each.rank: sight for each in self.ranks if (sight := each.look()) is not None}
        self._look_for_slow()
        first = self.seen.get(0)
        if self._failed is not None and first is not None and first.step:
            self._tell_resumed(first.step, *self._failed)
            self._failed = None

    def _tell_resumed(self, step: int, reached: int, since_s: float) -> None:
        """That the run is in its first step again; the step may have gone on since it was looked at."""
        after_s, again = time.monotonic() - since_s, max(0, reached - step + 1)
        text = f"the run goes on in step {step}, {after_s:.1f} s after the failure; {again} steps are done again"
        record = FaultRecord(
            kind="resumed",
            attempt=self._attempt,
            step=step,
            text=text,
            at_s=time.time(),
            found_after_s=after_s,
            done_again=again,
        )
        self._tell(record)

    def _look_for_slow(self) -> None:
        own_s = [each.own_s(self.last_step) for each in self.ranks]
        for step in sorted(set.intersection(*map(set, own_s))):
            found = self._slowness.step({rank: seconds[step] for rank, seconds in enumerate(own_s)})
            self.last_step = step
            for rank, ratio in found.items():
                text = f"rank {rank} is slow: its own work takes {ratio:.2f} times as long as that of its peers"
                self._record("slow", rank, step, text, 0.0)

    def _end(self, hang: Hang) -> None:
        rank = hang.ranks[0] if len(hang.ranks) == 1 else None
        self.hang = self._record("hung", rank, self.reached, hang.text, hang.still_s)
        self._kill(hang.ranks or tuple(self.seen))
        # The agent ends the others, which it can't where they are stopped.
        time.sleep(ENDING_S)
        self._kill(tuple(self.seen))

    def _record(self, kind: str, rank: int | None, step: int, text: str, found_after_s: float) -> FaultRecord:
        record = FaultRecord.parse(
            {
                "kind": kind,
                "attempt": self._attempt,
                "rank": rank,
                "step": step,
                "text": text,
                "at_s": time.time(),
                "found_after_s": found_after_s,
            }
        )
        self._tell(record)
        return record

    def _kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.seen[rank].pid, signal.SIGKILL)
