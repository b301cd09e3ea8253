"""What each rank says of itself while it runs, in words of shared memory: the supervisor reads them at any time,
and reads them still when the process is stopped or gone.

A thread writes the time ten times a second, which shows that the process runs; the clock writes each change of
cause, which shows that the program gets on. Asked for it, the thread answers in a file beside where the program
stands and which collective of each group it entered last. Nothing here loads PyTorch.
"""

import contextlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from trainwright.spec.ledger import STEP_SECONDS
from trainwright.train.checkpoint.files import put_file

BEAT_S = 0.1
WORDS, RING = 256, 64
PID, BEAT_NS, CHANGES, CHANGED_NS, STEP, PHASE, LONGEST_NS, ASKED, SAVED_STEP, STEPS_DONE = range(10)
FIRST_OF_RING = 128
"""From here on, for each of the last `RING` steps: its number, and nanoseconds of this rank's own work."""

OUTSIDE = ("starting", "loading", "saving", "failing")
"""Phases that are no part of a step: how long they take depends on other things than the rank."""
PHASES = (*OUTSIDE, *STEP_SECONDS)
OWN_WORK = ("compute", "data", "optimizer", "host")
"""Causes that no other rank can make longer."""
SHARED = ("tp", "cp", "ep", "pp", "bubble", "dp")
"""Causes in which a rank waits for others."""


def words_of(path: Path, *, create: bool = False) -> np.ndarray:
    """The words of a rank, (WORDS,) of int64, shared with whoever maps the same file."""
    with path.open("w+b" if create else "r+b") as file:
        if create:
            file.truncate(WORDS * 8)
        return np.frombuffer(mmap.mmap(file.fileno(), WORDS * 8), dtype=np.int64)


def beat_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.beat"


def answer_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.answer"


def reason_file(directory: Path, rank: int) -> Path:
    """Where a rank says why it ends, if it knows: `{"kind": ..., "rank": ..., "text": ...}`."""
    return directory / f"rank-{rank}.reason"


class Pulse:
    """This rank's words. `change` is called by the clock at every change of cause."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self._rank = directory, rank
        # Read and written many times a step: as a buffer that is three times as fast as as an array.
        self._words = words_of(beat_file(directory, rank), create=True).data
        self._words[PID] = os.getpid()
        self._words[CHANGED_NS] = self._words[BEAT_NS] = time.monotonic_ns()
        self._numbers = {name: number for number, name in enumerate(PHASES)}
        self._main = threading.get_ident()
        self.collectives: Callable[[], list[dict[str, Any]]] = list
        """Gives the last collective of each group that this rank entered."""
        self._thread = threading.Thread(target=self._beat, daemon=True, name="pulse")
        self._thread.start()

    def change(self, phase: str) -> None:
        """The program goes over to a cause, or a phase outside of steps."""
        words, now_ns = self._words, time.monotonic_ns()
        if words[PHASE] >= len(OUTSIDE) and phase != "failing":  # an act that failed is no measure of others
            words[LONGEST_NS] = max(words[LONGEST_NS], now_ns - words[CHANGED_NS])
        words[PHASE] = self._numbers[phase]
        words[CHANGED_NS] = now_ns
        words[CHANGES] += 1

    def begin_step(self, step: int) -> None:
        """Step `step`, from 1, begins."""
        self._words[STEP] = step
        self.change("host")

    def end_step(self, step: int, seconds: dict[str, float]) -> None:
        """It has ended, and took this rank so long by cause."""
        own_ns = int(1e9 * sum(seconds[cause] for cause in OWN_WORK))
        at = FIRST_OF_RING + 2 * (step % RING)
        self._words[at + 1] = own_ns
        self._words[at] = step
        self._words[STEPS_DONE] += 1

    def saved(self, step: int) -> None:
        """A commit of `step` is there."""
        self._words[SAVED_STEP] = step

    def say_why(self, kind: str, text: str, rank: int | None) -> None:
        """Leave the reason for which this rank ends."""
        put_file(
            reason_file(self.directory, self._rank),
            json.dumps({"kind": kind, "text": text, "rank": rank}).encode(),
        )

    def _beat(self) -> None:
        answered = 0
        while True:
            time.sleep(BEAT_S)
            self._words[BEAT_NS] = time.monotonic_ns()
            if self._words[ASKED] > answered:
                answered = int(self._words[ASKED])
                with contextlib.suppress(OSError):
                    put_file(answer_file(self.directory, self._rank), json.dumps(self._answer(answered)).encode())

    def _answer(self, number: int) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main)
        collectives: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):  # A question must not end a run.
            collectives = self.collectives()
        return {
            "number": number,
            "where": place_text(frame),
            "waits": is_in_communication(frame) or PHASES[int(self._words[PHASE])] in SHARED,
            "collectives": collectives,
        }


def is_in_communication(frame: FrameType | None) -> bool:
    """Whether the innermost calls are PyTorch's of a collective, a send or a store."""
    for _ in range(3):
        if frame is None:
            return False
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def place_text(frame: FrameType | None) -> str:
    """The innermost call that is ours: `loop.py:120 in _train_on`."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "trainwright" in path.parts:
            return f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
