"""Storage that fails beside the steps: `test_checkpoint_faults.py` starts this on two ranks.

    checkpoint_faults.py DIRECTORY OUTPUT.json

The second rank's disk is full, or hangs, while it writes a save; steps go on. Notes, commits and losses are
written down. What fails is a call of the system, replaced here.
"""

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_cases import trainer_of
from example import example_run
from ranked import begun, ended

from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.errors import InvalidSpec
from trainwright.train.checkpoint.directory import saves_in
from trainwright.train.checkpoint.identity import mark_of
from trainwright.train.checkpoint.keeper import Keeper, Position
from trainwright.train.faults.attendant import Attendant
from trainwright.train.loop import batch_of
from trainwright.train.mesh import leave
from trainwright.train.verify.subject import random_tokens

RUN = example_run(dp=2, recipe={"zero": 1})
STEPS = 7
BAD_STEP = 3
"""Whose save fails."""


@contextmanager
def replaced(name: str, instead: Callable[..., Any]) -> Iterator[None]:
    plain = getattr(os, name)
    setattr(os, name, instead)
    try:
        yield
    finally:
        setattr(os, name, plain)


def failing(number: int) -> Callable[..., int]:
    """A call that fails with an error of the system."""

    def call(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    return call


def steps(root: Path, rank: int, around: Callable[[int, Keeper], None]) -> dict[str, Any]:
    """Take the steps, each followed by what `around` does with its number."""
    trainer = trainer_of(RUN, rank)
    data = random_tokens(RUN, STEPS)
    notes: list[str] = []
    policy = Checkpointing(every_steps=1, deadline_s=0.5)
    keeper = Keeper(
        trainer, root, policy, mark_of(data.shards), STEPS, notes.append, Attendant(trainer, None, notes.append)
    )
    assert keeper.resume() == Position(0, 0)
    seen: dict[str, Any] = {"losses": [], "notes": notes, "waited_s": [], "commits": []}
    for step in range(STEPS):
        batch = batch_of(RUN, data, step, trainer.mesh.coordinate.dp)
        seen["losses"].append(trainer.step(batch, 0.01).loss)
        begun_s = time.perf_counter()
        try:
            keeper.after_step(Position(step + 1, (step + 1) * 8), 0.01, is_last=step + 1 == STEPS)
        except InvalidSpec as error:
            seen["refused"] = str(error)
        seen["waited_s"].append(time.perf_counter() - begun_s)
        around(step + 1, keeper)
        dist.barrier()
        seen["commits"].append([save.step for save in saves_in(root) if save.is_committed])
    return seen


def joined(keeper: Keeper) -> None:
    assert keeper._writing is not None
    keeper._writing.join()


def undisturbed(root: Path, rank: int) -> dict[str, Any]:
    return steps(root, rank, lambda step, keeper: joined(keeper) if keeper._writing else None)


def bad_disk(root: Path, rank: int, number: int, bad_step: int = BAD_STEP) -> dict[str, Any]:
    """The second rank can't write during one save, by an error of the system."""
    plain = os.write

    def around(step: int, keeper: Keeper) -> None:
        if step == bad_step - 1:
            joined(keeper)
            dist.barrier()
            if rank == 1:
                os.write = failing(number)
        elif step == bad_step:
            if rank == 1 and keeper._writing is not None:
                joined(keeper)
            os.write = plain
        elif keeper._writing is not None:
            joined(keeper)

    return steps(root, rank, around)


def hung(root: Path, rank: int) -> dict[str, Any]:
    """The second rank's fsync doesn't come back for a while."""
    plain, released = os.fsync, threading.Event()

    def waiting(descriptor: int) -> None:
        released.wait()
        plain(descriptor)

    def around(step: int, keeper: Keeper) -> None:
        if step == BAD_STEP - 1:
            joined(keeper)
            dist.barrier()
            if rank == 1:
                os.fsync = waiting
        elif step == BAD_STEP + 1:
            time.sleep(0.8)  # beyond the deadline
        elif step == BAD_STEP + 2:
            os.fsync = plain
            released.set()
            if keeper._writing is not None:
                joined(keeper)
        elif step != BAD_STEP and keeper._writing is not None:
            joined(keeper)

    return steps(root, rank, around)


def main(directory: Path, output: Path) -> None:
    rank = begun()
    results: dict[str, Any] = {}
    try:
        results["undisturbed"] = undisturbed(directory / "undisturbed", rank)
        results["full disk"] = bad_disk(directory / "full", rank, errno.ENOSPC)
        results["input/output error"] = bad_disk(directory / "error", rank, errno.EIO)
        results["full disk at the end"] = bad_disk(directory / "end", rank, errno.ENOSPC, STEPS)
        results["hung"] = hung(directory / "hung", rank)
    except BaseException:
        traceback.print_exc()
        leave(1)
    ended(output, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
