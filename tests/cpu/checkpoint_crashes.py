"""Saves that are killed: `test_checkpoint_crashes.py` starts this and reads what it found.

    checkpoint_crashes.py DIRECTORY RANKS OUTPUT.json

Each rank of a save is a process of its own, forked here, that writes a part of a small state; the first one
commits. Before its Nth call of the system that changes the disk (and, of a write, after half of it), one of them
kills itself by SIGKILL. N goes from the first to the last. After each kill the directory is looked at as a resume
does.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.train.checkpoint.directory import Save, save_of, saves_in
from trainwright.train.checkpoint.manifest import FORMAT, Damaged, DataMark, Manifest
from trainwright.train.checkpoint.reading import Reader
from trainwright.train.checkpoint.saving import Writing, commit, write_part
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.checkpoint.state import Held
from trainwright.train.checkpoint.writers import SavePlan, WritePlan, _agreed, _files, _item

CALLS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir")
"""Of `os`: what saving changes the disk by."""
DEADLINE_S, OF_THE_DEAD_S = 5.0, 0.1
"""For the part of another rank, and where that is known to be dead soon."""
KEEP = 2


def held_of(rank: int, ranks: int, step: int) -> list[Held]:
    """A matrix in rows over the ranks, its moment, and a vector that all have."""
    rows, width = 12 // ranks, 5
    part = torch.arange(rows * width, dtype=torch.float32).view(rows, width) + 100 * rank + 1000 * step
    whole, start = (12, width), (rows * rank, 0)
    vector = torch.full((7,), float(step))
    return [
        Held("layers.0.matrix", whole, start, part),
        Held("layers.0.matrix:first", whole, start, -part),
        Held("norm.weight", (7,), (0,), vector),
    ]


def plans(ranks: int) -> list[WritePlan]:
    agreed, tensors = _agreed(
        [SavePlan([_item(each) for each in held_of(rank, ranks, 0)]) for rank in range(ranks)]
    )
    return [WritePlan(tuple(_files(each.items, rank)), tensors) for rank, each in enumerate(agreed)]


def manifest_of(save: Save, plan: WritePlan, parts: Any) -> Manifest:
    return Manifest(
        format=FORMAT,
        generation=save.generation,
        step=save.step,
        samples=save.step * 8,
        schedule_steps=100,
        written_at_s=0.0,
        data=DataMark(num_tokens=1, digest=""),
        run={},
        tensors=plan.tensors,
        parts=parts,
    )


def save_rank(save: Save, plan: WritePlan, rank: int, ranks: int, deadline_s: float = DEADLINE_S) -> str | None:
    """One rank's work of a save; what failed."""
    snapshot = Snapshot(plan.files, torch.device("cpu"))
    snapshot.take(held_of(rank, ranks, save.step))

    def work(writing: Writing) -> None:
        write_part(save, plan, snapshot, rank, 0.0)
        if rank == 0:
            made = partial(manifest_of, save, plan)
            commit(save, ranks, made, KEEP, frozenset(), writing, deadline_s)

    writing = Writing(work)
    writing.run()
    return writing.error


def killed_at(number: int, *, in_half: bool) -> None:
    """From now on the process dies at its call `number` (from 1 on) of `CALLS`."""
    seen = 0

    def around(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                if in_half and name == "write":
                    plain(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, around(name, getattr(os, name)))


def forked(body: Callable[[], str | None]) -> int:
    """The process that runs it; its status is 0 where nothing failed."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = 1 if body() else 0
    finally:
        os._exit(status)


def save_on_ranks(
    save: Save, made: list[WritePlan], victim: int = -1, number: int = 0, in_half: bool = False
) -> list[int]:
    """A save by forked ranks, one of which dies; their statuses, below 0 the signal."""
    ranks = len(made)

    def body(rank: int) -> str | None:
        if rank == victim:
            killed_at(number, in_half=in_half)
        return save_rank(save, made[rank], rank, ranks, DEADLINE_S if victim < 0 else OF_THE_DEAD_S)

    children = [forked(partial(body, rank)) for rank in range(ranks)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def good(root: Path) -> list[int]:
    """Steps of commits that are whole to the last byte, the newest first, as a resume finds them."""
    steps = []
    for save in saves_in(root):
        try:
            manifest = save.look_over()
            with Reader(save, manifest.parts) as reader:
                for part in manifest.parts:
                    reader.verify(part)
            steps.append(save.step)
        except Damaged:
            pass
    return steps


def main(root: Path, ranks: int, output: Path) -> None:
    torch.set_num_threads(1)
    made = plans(ranks)
    found: list[dict[str, Any]] = []
    step, generation = 0, 1
    for victim in range(ranks):
        for in_half in (False, True):
            number, has_died = 0, True
            while has_died:
                number += 1
                # Two whole commits first, so that the save that is killed would remove one.
                while len(good(root)) < 2:
                    step += 1
                    assert save_on_ranks(save_of(root, step, generation), made) == [0] * ranks
                before = good(root)
                step += 1
                statuses = save_on_ranks(save_of(root, step, generation), made, victim, number, in_half=in_half)
                has_died = statuses[victim] == -signal.SIGKILL
                after = good(root)
                found.append(
                    {
                        "victim": victim,
                        "number": number,
                        "died": has_died,
                        "before": before,
                        "step": step,
                        "after": after,
                    }
                )
                generation += 1
                step += 1
                assert save_on_ranks(save_of(root, step, generation), made) == [0] * ranks
                found[-1]["next"] = good(root)
                found[-1]["left"] = [each.step for each in saves_in(root)]
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
