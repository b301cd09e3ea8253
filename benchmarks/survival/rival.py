"""DCP as it is used most: two ranks save into one directory again and again, and one is killed at a drawn moment
of the second save, in the time that the first one took. What is there then is loaded: the state before, the new
one, rows of both, or an error."""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from damage import HARMLESS, REJECTED, SILENT, memory_home
from forks import as_rank, die_after, forked, free_port
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

KILLS = 60
ROWS, WIDTH = 4096, 512


def _rank(folder: Path, port: int, victim: int, share: float, rank: int) -> None:
    as_rank(rank, 2, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    save_s = 0.0
    mesh = init_device_mesh("cpu", (2,))
    for step in range(3):
        state = {"matrix": distribute_tensor(torch.full((ROWS, WIDTH), float(step)), mesh, [Shard(0)])}
        if step == 2:
            dist.barrier()
            if rank == victim:
                die_after(share * save_s)
        begun_s = time.perf_counter()
        dcp.save(
            state, checkpoint_id=str(folder if step else folder.with_name("first"))
        )  # the first one loads code
        save_s = time.perf_counter() - begun_s


def _look(folder: Path, report: Path) -> None:
    torch.set_num_threads(1)
    into = {"matrix": torch.full((ROWS, WIDTH), torch.nan)}
    try:
        dcp.load(into, checkpoint_id=str(folder))
    except BaseException:  # CheckpointException is no Exception
        report.write_text(REJECTED)
        return
    values = set(into["matrix"].unique().tolist())
    report.write_text(HARMLESS if values in ({1.0}, {2.0}) else SILENT)


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    home = Path(tempfile.mkdtemp(prefix="trainwright-rival-", dir=memory_home()))
    try:
        for number in range(max(4, round(KILLS * share))):
            folder, port = home / str(number), free_port()
            victim, at = chosen.randrange(2), chosen.random()
            children = [forked(partial(_rank, folder, port, victim, at, rank)) for rank in range(2)]
            statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            report = home / "report"
            report.write_text(REJECTED)
            os.waitpid(forked(partial(_look, folder, report)), 0)
            yield {"has_died": statuses[victim] < 0, "outcome": report.read_text()}
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
