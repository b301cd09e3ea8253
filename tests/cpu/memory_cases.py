"""The memory tier on two ranks with shards: `test_memory_tier.py` starts this.

    memory_cases.py DIRECTORY OUTPUT.json

Three steps are kept; then copies are damaged in one way after another, and a fresh trainer recovers what is left.
What it recovered, and whether its state is that of the step to the bit, and its next loss, is written down.
"""

import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_cases import trainer_of
from example import example_run
from ranked import begun, ended

from trainwright.spec.supervision import GuardState
from trainwright.train.checkpoint.files import digest_of
from trainwright.train.checkpoint.memory import HEADER_BYTES, MemoryTier
from trainwright.train.checkpoint.state import held_blocks
from trainwright.train.faults.replicas import bytes_of
from trainwright.train.loop import batch_of
from trainwright.train.mesh import leave
from trainwright.train.parallelize import Trainer
from trainwright.train.verify.subject import random_tokens

RUN = example_run(dp=2, recipe={"zero": 1, "precision": "fp8-delayed", "emulate_precision": True})
"""With scales of past steps, which are state."""
OTHER = example_run(tp=2)
STEPS = 3
GUARD = GuardState(losses=(5.5, 5.25), cooling=1)


def digests(trainer: Trainer) -> list[str]:
    blocks = sorted(held_blocks(trainer), key=lambda each: each.key)
    return [digest_of(bytes_of(each)) for each in blocks]


def spoiled(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def newest(directory: Path, host: int, rank: int) -> Path:
    """Three saves went to slots 0, 1 and 0."""
    return directory / f"host-{host}" / f"rank-{rank}-0"


def each_newest_of_rank_0(directory: Path) -> None:
    for host in (0, 1):
        spoiled(newest(directory, host, 0), HEADER_BYTES)


def all_of_rank_0(directory: Path) -> None:
    for path in directory.glob("host-*/rank-0-*"):
        path.unlink()


def cut_short(directory: Path) -> None:
    with newest(directory, 0, 0).open("r+b") as file:
        file.truncate(HEADER_BYTES + 10)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "none": lambda directory: None,
    "own state": lambda directory: spoiled(newest(directory, 0, 0), HEADER_BYTES + 1000),
    "own header": lambda directory: spoiled(newest(directory, 1, 1), 20),
    "a host": lambda directory: shutil.rmtree(directory / "host-1"),
    "a file cut short": cut_short,
    "both copies of a step": each_newest_of_rank_0,
    "both copies of both": all_of_rank_0,
}


def next_loss(trainer: Trainer, step: int) -> float:
    """Of the step after so many."""
    batch = batch_of(RUN, random_tokens(RUN, STEPS + 1), step, trainer.mesh.coordinate.dp)
    return trainer.step(batch, 0.01).loss


def kept(directory: Path, rank: int) -> dict[int, tuple[list[str], float]]:
    """Take the steps and keep each; by step, digests of the state and the next one's loss."""
    trainer = trainer_of(RUN, rank)
    tier, states = MemoryTier(trainer, directory, 2, 100), {}
    losses = [next_loss(trainer, 0)]
    for step in range(1, STEPS + 1):
        tier.save(step, 8 * step, GUARD)
        states[step] = digests(trainer)
        losses.append(next_loss(trainer, step))
    tier.wait()
    dist.barrier()
    return {step: (states[step], losses[step]) for step in states}


def recovered(
    directory: Path, rank: int, seen: dict[int, tuple[list[str], float]], least_step: int = 0
) -> dict[str, Any] | None:
    trainer = trainer_of(RUN, rank)
    found = MemoryTier(trainer, directory, 2, 100).recover(least_step)
    if found is None:
        return None
    steps = {float(each["step"]) for each in trainer.optimizer.state.values()}
    state, loss = seen[found.step]
    return {
        "step": found.step,
        "samples": found.samples,
        "from_peers": found.from_peers,
        "guard": found.guard == GUARD,
        "same": digests(trainer) == state,
        "optimizer_step": steps == {float(found.step)},
        "same_next_loss": next_loss(trainer, found.step) == loss,
    }


def main(directory: Path, output: Path) -> None:
    rank = begun()
    results: dict[str, Any] = {}
    try:
        for name, damage in DAMAGE.items():
            own = directory / name.replace(" ", "-")
            seen = kept(own, rank)
            if rank == 0:
                damage(own)
            dist.barrier()
            results[name] = recovered(own, rank, seen)
        seen = kept(directory / "late", rank)
        results["older than storage"] = recovered(directory / "late", rank, seen, STEPS + 1)
        other = MemoryTier(trainer_of(OTHER, rank), directory / "late", 2, 100)
        results["another layout"] = other.recover(0)
        results["text"] = other.text
    except BaseException:
        traceback.print_exc()
        leave(1)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, results)
    ended(output, everyone)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
