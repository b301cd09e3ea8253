"""Data exactly once: one epoch by 2, 4, 3 and 1 ranks in turn, killed 25 times on each. Every rank writes down
which windows of the stream each step takes; of a step that was done again the last time counts, as its update is
the one that is in the state. In the end every window of the epoch must have been taken once."""

import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forks import attempt, drawn_aim, small_run

from trainwright.train import loop
from trainwright.train.data import PackedDataset, permuted
from trainwright.train.shards import write_shards

KILLS, WORLDS = 100, (2, 4, 3, 1)
STEPS_EACH, GLOBAL_BATCH = 36, 12
AIMS = ("rejoin", "load", "step", "snapshot", "write", "manifest", "rename", "retention")


def _logging(folder: Path, number: int, rank: int) -> None:
    """In a rank: write down the windows of each batch."""
    plain = loop.batch_of
    file = os.open(folder / f"{number:05d}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def batch_of(run: Any, dataset: PackedDataset, step: int, dp_rank: int, origin: int = 0) -> Any:
        batch = plain(run, dataset, step, dp_rank, origin)
        count = sum(len(each) for each in batch.inputs_BS)
        taken = []
        for sample in range(batch.first_sample, batch.first_sample + count):
            epoch, position = divmod(sample, dataset.num_windows)
            window = permuted(position, dataset.num_windows, f"{dataset.seed}/{epoch}")
            tokens = dataset.shards.window(window * dataset.seq_len, dataset.seq_len)
            row = batch.inputs_BS[0].new_tensor(np.asarray(tokens).astype(np.int64))
            at = sample - batch.first_sample
            given = batch.inputs_BS[at // len(batch.inputs_BS[0])][at % len(batch.inputs_BS[0])]
            assert (row == given).all(), "the batch is not of that window"
            taken.append(epoch * dataset.num_windows + window)
        os.write(file, (json.dumps([step, taken]) + "\n").encode())
        return batch

    loop.batch_of = batch_of


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    steps_each = max(4, round(STEPS_EACH * share))
    total = len(WORLDS) * steps_each
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        shards = home / "shards"
        shards.mkdir()
        num_tokens = total * GLOBAL_BATCH * 16 + 1
        tokens = np.random.default_rng(seed).integers(97, size=num_tokens, dtype=np.uint32)
        write_shards(shards, [tokens], 258, "survival")
        log = home / "log"
        log.mkdir()
        number = kills = 0
        typical_s = dict.fromkeys(AIMS, 0.01) | {"rejoin": 0.1, "rename": 0.0005, "snapshot": 0.001}
        for place, world in enumerate(WORLDS):
            run = small_run(shards, {"checkpoint": {"every_steps": 1}}, total, dp=world)
            until, wanted = (place + 1) * steps_each, round(KILLS * share * (place + 1) / len(WORLDS))
            while True:
                number += 1
                aim = drawn_aim(chosen, chosen.choice(AIMS), world, typical_s, 1) if kills < wanted else None
                seen = attempt(run, home / "out", until, aim, before=partial(_logging, log, number))
                assert aim is not None or seen.is_done, seen.said
                if seen.is_done:
                    break
                kills += 1
        yield {"kills": kills, "changes": len(WORLDS) - 1, "windows": total * GLOBAL_BATCH, **_taken(log)}


def _taken(log: Path) -> dict[str, int]:
    """By the last attempt that did each step."""
    last: dict[int, tuple[str, list[int]]] = {}
    for file in sorted(log.iterdir()):
        attempted = file.name.split("-")[0]
        for line in file.read_text().splitlines():
            step, windows = json.loads(line)
            if step not in last or last[step][0] != attempted:
                last[step] = attempted, []
            last[step][1].extend(windows)
    counts = Counter(window for _, windows in last.values() for window in windows)
    return {
        "once": sum(count == 1 for count in counts.values()),
        "more": sum(each > 1 for each in counts.values()),
    }
