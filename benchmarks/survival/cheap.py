"""What saving costs: the wait of a step for the copy of 192 MiB, digests as a share of writing on a disk, and
memory over 500 saves; DCP's `async_save` in turn. The 500 are written to a file system in memory, where one takes
a fifth of the time: it is the process that is looked at."""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from damage import memory_home

from trainwright.spec.units import MIB
from trainwright.train.checkpoint.directory import save_of
from trainwright.train.checkpoint.files import blocks_of, digest_of
from trainwright.train.checkpoint.saving import write_part
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.checkpoint.state import Held
from trainwright.train.checkpoint.writers import planned

STATE_MIB, SAVES, TURNS = 192, 500, 12
WARM_UP = 20
"""Saves until memory is what it stays."""


def seconds(body: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    body()
    return time.perf_counter() - begun_s


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    held = [Held(f"layers.{each}.weight", (MIB,), (0,), torch.randn(MIB)) for each in range(STATE_MIB // 4)]
    state = {each.name: each.values for each in held}
    plan = planned(held, 0, 1)
    snapshot = Snapshot(plan.files, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        snapshot.take(held)
        for turn in range(max(2, round(TURNS * share))):
            blocked_s = seconds(lambda: snapshot.take(held))
            pending: list[Any] = []
            theirs = Path(scratch) / f"dcp-{turn}"
            begun_s = time.perf_counter()
            pending.append(dcp.async_save(state, checkpoint_id=str(theirs)))
            dcp_s = time.perf_counter() - begun_s
            pending[0].result()
            data = snapshot.bytes_of(plan.files[0].entry.name)
            digest_s = seconds(lambda: [digest_of(block) for block in blocks_of(data)])  # noqa: B023
            save = save_of(Path(scratch), turn + 1, 1)
            part = write_part(save, plan, snapshot, 0, 0.0)
            yield {
                "kind": "turn",
                "blocked_s": blocked_s,
                "dcp_s": dcp_s,
                "digest_s": digest_s,
                "write_s": part.write_s,
            }
            shutil.rmtree(save.path)
            shutil.rmtree(theirs)
    home = Path(tempfile.mkdtemp(prefix="trainwright-cheap-", dir=memory_home()))
    try:
        waits, before = [], 0
        saves = max(WARM_UP + 5, round(SAVES * share))
        for turn in range(saves):
            if turn == WARM_UP:
                before = resident_bytes()
            waits.append(seconds(lambda: snapshot.take(held)))
            save = save_of(home, turn + 1, 2)
            write_part(save, plan, snapshot, 0, 0.0)
            shutil.rmtree(save.path)
        yield {
            "kind": "growth",
            "saves": saves,
            "growth": resident_bytes() / before - 1,
            "blocked_s": sorted(waits),
        }
    finally:
        shutil.rmtree(home, ignore_errors=True)
