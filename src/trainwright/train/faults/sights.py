"""What the supervisor sees of a rank at one moment: the words that it writes, the state of its process, and its
answers. Nothing here loads PyTorch."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.train.faults.beats import (
    ASKED,
    BEAT_NS,
    CHANGED_NS,
    FIRST_OF_RING,
    LONGEST_NS,
    OUTSIDE,
    PHASE,
    PHASES,
    PID,
    RING,
    SAVED_STEP,
    STEP,
    STEPS_DONE,
    answer_file,
    beat_file,
    reason_file,
    words_of,
)


@dataclass(frozen=True)
class Sight:
    """A rank at one moment."""

    rank: int
    pid: int
    state: str
    """Of the process, as Linux has it: R, S, D, T (stopped), Z, or nothing where it is gone."""
    silent_s: float
    """Since its thread last beat."""
    still_s: float
    """Since the program last went over to another cause."""
    longest_s: float
    """That it was in one cause of a step, so far."""
    step: int
    steps_done: int
    phase: str

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def is_in_step(self) -> bool:
        return self.phase not in OUTSIDE

    @property
    def place(self) -> str:
        return f"in {self.phase} of step {self.step}" if self.is_in_step else f"while {self.phase}"


@dataclass(frozen=True)
class Collective:
    """The last one of a group that a rank entered."""

    group: str
    """Its own name."""
    axis: str
    name: str
    number: int


@dataclass(frozen=True)
class Answer:
    """Of a rank that was asked where it stands."""

    where: str
    """Its innermost call of ours."""
    waits: bool
    """Inside of a collective, a send, or a store."""
    collectives: tuple[Collective, ...] = ()


class SeenRank:
    """One rank, seen from outside. Its file appears when its process starts."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self._words: np.ndarray | None = None
        self._number = 0

    def look(self) -> Sight | None:
        """None before it has started."""
        if self._words is None:
            try:
                words = words_of(beat_file(self.directory, self.rank))
            except (FileNotFoundError, ValueError):
                return None
            if not words[PID]:
                return None
            self._words = words
        words, now_ns = self._words, time.monotonic_ns()
        pid = int(words[PID])
        return Sight(
            rank=self.rank,
            pid=pid,
            state=state_of(pid),
            silent_s=(now_ns - int(words[BEAT_NS])) / 1e9,
            still_s=(now_ns - int(words[CHANGED_NS])) / 1e9,
            longest_s=int(words[LONGEST_NS]) / 1e9,
            step=int(words[STEP]),
            steps_done=int(words[STEPS_DONE]),
            phase=PHASES[int(words[PHASE])],
        )

    @property
    def saved_step(self) -> int:
        return 0 if self._words is None else int(self._words[SAVED_STEP])

    def own_s(self, after: int) -> dict[int, float]:
        """Seconds of the rank's own work in steps after `after`, as far as they are still known."""
        if self._words is None:
            return {}
        ring = self._words[FIRST_OF_RING : FIRST_OF_RING + 2 * RING].reshape(RING, 2)
        return {int(step): int(own_ns) / 1e9 for step, own_ns in ring if step > after}

    def ask(self) -> None:
        """Ask where it stands."""
        if self._words is not None:
            self._number += 1
            self._words[ASKED] = self._number

    def answer(self) -> Answer | None:
        """To the last question; None until it is there."""
        said = _json_of(answer_file(self.directory, self.rank))
        if said is None or said.get("number") != self._number:
            return None
        entered = tuple(Collective(**each) for each in said["collectives"])
        return Answer(said["where"], said["waits"], entered)

    def reason(self) -> dict[str, Any] | None:
        """For which it has ended, if it knew."""
        return _json_of(reason_file(self.directory, self.rank))


def state_of(pid: int) -> str:
    """Of a process, one letter; empty where it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "" if os.path.isdir("/proc/self") else "R"


def _json_of(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return None
