"""Faults that are put into a run on purpose, each in one rank at one step: what `trainwright chaos` and the tests
do to a worker from within. Killing, stopping and slowing from outside need nothing here.

Each happens once, however often the step is done again: a file beside the beats says that it did.
"""

import errno
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from trainwright.spec.chaos import Planted, PlantKind
from trainwright.train.checkpoint.directory import saves_in
from trainwright.train.checkpoint.state import held_blocks
from trainwright.train.data import Batch
from trainwright.train.faults.shared import MEMORY, host_folder
from trainwright.train.parallelize import Trainer

AFTER: tuple[PlantKind, ...] = ("flip",)
SLOW_FACTOR = 1.5
SPIKE = 30.0
"""By which the head's input is multiplied: predictions are as wrong as before, and sure of it."""


def read_plants(path: Path) -> list[Planted]:
    """Of a JSON list."""
    return [Planted.parse(each) for each in json.loads(path.read_text())]


class Plants:
    """Those of this rank. `before` and `after` are called around each step, which is `step` from 1 on."""

    def __init__(self, trainer: Trainer, planted: Sequence[Planted], shared: Path, commits: Path) -> None:
        """shared: the supervisor's directory; commits: that of checkpoints."""
        self._trainer, self._shared, self._commits = trainer, shared, commits
        self._mine = [(number, each) for number, each in enumerate(planted) if each.rank == trainer.mesh.rank]
        self._began_s, self._has_begun = 0.0, False
        self._step_s = math.inf
        """Of the fastest step so far, with what came after it: one that waits for a disk tells nothing."""
        self._undo: list[Callable[[], None]] = []
        self._until: dict[int, Callable[[], None]] = {}
        """What ends with the beginning of a step."""

    def before(self, step: int) -> None:
        now_s = time.perf_counter()
        if self._has_begun:
            self._step_s = min(self._step_s, now_s - self._began_s)
        self._began_s, self._has_begun = now_s, True
        self._take_back()  # of a step that was not finished
        self._until.pop(step, lambda: None)()
        for each in self._due(step, [kind for kind in get_args(PlantKind) if kind not in AFTER]):
            self._act(each)

    def after(self, step: int) -> None:
        self._take_back()
        for each in self._due(step, AFTER):
            flip(self._trainer, each.place)

    def _take_back(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _due(self, step: int, kinds: Sequence[PlantKind]) -> Iterator[Planted]:
        for number, each in self._mine:
            mark = self._shared / f"planted-{number}"
            if each.step == step and each.kind in kinds and not mark.exists():
                mark.touch()
                yield each

    def _act(self, planted: Planted) -> None:
        if planted.kind in ("lose", "lose_all"):
            memory = self._shared / MEMORY
            own = memory / host_folder(self._trainer.mesh.rank)
            shutil.rmtree(own if planted.kind == "lose" else memory, ignore_errors=True)
        if planted.kind == "rot":
            rot(self._commits, planted.place)
        if planted.kind in ("kill", "lose", "lose_all", "rot"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif planted.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif planted.kind == "crash":
            raise RuntimeError("planted: this rank crashes")
        elif planted.kind == "later":
            # In the first step of a process nothing is known of how long one takes: at once.
            delay_s = 2 * self._step_s * planted.place / 1000 if math.isfinite(self._step_s) else 0.0
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        elif planted.kind == "full":
            self._fill(planted.step)
        elif planted.kind == "slow":
            self._slow()
        elif planted.kind == "spike":
            self._spike()
        else:
            self._in_forward(planted.kind)

    def _in_forward(self, kind: PlantKind) -> None:
        """Let it happen where the first layer of this rank computes."""
        layer = next(iter(self._trainer.pieces[0].layers.values()))

        def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if kind == "busy":
                while True:
                    pass
            if kind == "store":
                dist.distributed_c10d._get_default_store().get("a key that nobody sets")
            x, *others = arguments
            return (x * float("nan"), *others)

        handle = layer.register_forward_pre_hook(hook)
        self._undo.append(handle.remove)

    def _spike(self) -> None:
        norm = self._trainer.pieces[-1].norm
        if norm is not None:

            def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
                return output * SPIKE

            handle = norm.register_forward_hook(hook)
            self._undo.append(handle.remove)

    def _fill(self, step: int) -> None:
        plain = os.write

        def write(descriptor: int, data: Any) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(self._commits.resolve())):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return plain(descriptor, data)

        os.write = write
        self._until[step + 2] = lambda: setattr(os, "write", plain)

    def _slow(self) -> None:
        """From now on computing takes longer, in this process."""
        clock, plain = self._trainer.clock, self._trainer.pipeline.run

        def slowly(batch: Batch) -> Any:
            before_s = clock.seconds["compute"]
            loss = plain(batch)
            until_s = time.perf_counter() + (clock.seconds["compute"] - before_s) * (SLOW_FACTOR - 1)
            with clock.of("compute"):
                while time.perf_counter() < until_s:
                    pass
            return loss

        self._trainer.pipeline.run = slowly


def rot(commits: Path, place: int) -> None:
    """Change one byte of the newest commit."""
    newest = next((save for save in saves_in(commits) if save.is_committed), None)
    if newest is None:
        return
    files = sorted(newest.path.glob("*.safetensors"))
    with files[place % len(files)].open("r+b") as file:
        file.seek(-1 - place % 64, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << place % 8]))


@torch.no_grad()
def flip(trainer: Trainer, place: int) -> str:
    """Flip one bit of the state, in memory; the tensor that has it."""
    held = [each for each in held_blocks(trainer) if each.values.numel()]
    block = held[place % len(held)]
    values = block.values.view(-1).view(torch.uint8)
    at = place * 7919 % values.numel()
    values[at] ^= 1 << (place % 8)
    return block.name
