"""Real runs whose ranks are forked from one process that has PyTorch loaded already: the program of `train`, with
its process groups, checkpoints and journal, starts in tenths of a second, so that a thousand deaths take minutes.

A rank says in memory that all share which phase it is in and how far commits have come. One of them may have an
aim: at the nth time that it enters a phase, a timer of the kernel is set, which sends SIGKILL to it after a drawn
share of the seconds that the phase takes, wherever it is then. The others are killed soon after, as an elastic
agent would.
"""

import ctypes
import gc
import json
import mmap
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo  # what each rank would load when it makes its first tensor

from trainwright.cli.catalogue import load_cluster
from trainwright.spec.run import Run
from trainwright.train.checkpoint import keeper, saving
from trainwright.train.checkpoint.manifest import MANIFEST
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.faults.attendant import Attendant, watched_rank
from trainwright.train.loop import train
from trainwright.train.shards import write_shards

PHASES = ("rejoin", "load", "step", "snapshot", "write", "manifest", "rename", "retention")
MOST_RANKS = 8
COMMITTED = len(PHASES)
"""The row after those of phases: the newest step whose manifest is in place."""
INSIDE, ENTERED, TOTAL_NS = range(3)
PATIENCE_S = 120.0
"""For an attempt, which takes seconds."""
SAMPLES = 4000


def small_run(shards: Path, tables: dict[str, Any], steps: int, **layout: Any) -> Run:
    """A model of two layers in float64 over random tokens; `tables` are merged into the run's."""
    layer = {
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": 8},
        "mlp": {"kind": "dense", "d_ff": 48},
    }
    recipe: dict[str, Any] = {"seq_len": 16, "global_batch": 12, "precision": "fp64", "zero": 0}
    recipe["micro_batch"] = recipe["global_batch"] // layout.get("dp", 1)
    recipe |= {"optimizer": {"lr": 0.01, "warmup_steps": 0, "schedule": "constant"}} | tables.get("recipe", {})
    values = {
        "layout": layout,
        "recipe": recipe,
        "model": {
            "name": "survival",
            "d_model": 32,
            "vocab_size": 260,
            "rope": {"theta": 10000.0},
            "layer_groups": [{"repeat": 2, "pattern": [layer]}],
        },
        "data": {"source": "shards", "path": str(shards), "vocab_size": 258},
        "cluster": load_cluster("local-cpu").plain(),
        "budget": {"tokens": steps * 16 * recipe["global_batch"]},
    }
    return Run.parse(values | {name: each for name, each in tables.items() if name != "recipe"}).check()


def losses_in(out: Path) -> list[tuple[int, float]]:
    """Steps and losses of a run's output."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines)]


def shards_in(directory: Path) -> Path:
    shards = directory / "shards"
    if not shards.is_dir():
        shards.mkdir(parents=True)
        tokens = np.random.default_rng(0).integers(97, size=SAMPLES * 16 + 1, dtype=np.uint32)
        write_shards(shards, [tokens], 258, "survival")
    return shards


@dataclass(frozen=True)
class Aim:
    """Where a rank is to die: at the `nth` time in a phase, `share` of its typical seconds after it began."""

    rank: int
    phase: str
    nth: int
    share: float
    typical_s: float


@dataclass(frozen=True)
class Attempt:
    """What became of one start of all ranks."""

    statuses: tuple[int, ...]
    """Exit statuses by rank; below 0 the signal."""
    died_in: tuple[str, ...]
    """Phases that the rank with the aim was in when it died; empty where it did not."""
    committed: int
    """The newest step whose manifest was put in place, by this attempt."""
    typical_s: dict[str, float]
    """Mean seconds of each phase."""
    seconds: float
    said: tuple[str, ...]
    """By rank, the error that ended it."""

    @property
    def is_done(self) -> bool:
        return not any(self.statuses)


class Board:
    """What ranks say of themselves, in memory that they share with their parent."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 8 * MOST_RANKS * (len(PHASES) + 1) * 3)
        shape = (MOST_RANKS, len(PHASES) + 1, 3)
        self.words: np.ndarray = np.frombuffer(self._map, dtype=np.int64).reshape(shape)

    def committed(self) -> int:
        return int(self.words[:, COMMITTED, 0].max())


class Phases:
    """Of one rank, in its process."""

    def __init__(self, board: Board, rank: int, aim: Aim | None) -> None:
        self._words, self._aim = board.words[rank], aim if aim is not None and aim.rank == rank else None
        self._begun_ns: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        words = self._words[PHASES.index(phase)]
        words[INSIDE] += 1
        words[ENTERED] += 1
        self._begun_ns[phase] = time.monotonic_ns()
        aim = self._aim
        if aim is not None and aim.phase == phase and aim.nth == words[ENTERED]:
            die_after(aim.share * aim.typical_s)

    def leave(self, phase: str) -> None:
        words = self._words[PHASES.index(phase)]
        if words[INSIDE]:
            words[INSIDE] -= 1
            words[TOTAL_NS] += time.monotonic_ns() - self._begun_ns[phase]

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def around(self, owner: Any, name: str, phase: str) -> None:
        """From now on a function is a phase."""
        plain = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with self.of(phase):
                return plain(*arguments, **named)

        setattr(owner, name, call)

    def watch(self) -> None:
        """Tell phases apart from here on, in this process."""
        self.around(Attendant, "step", "step")
        self.around(Snapshot, "take", "snapshot")
        self.around(keeper, "write_part", "write")
        self.around(saving, "retain", "retention")
        plain_resume, plain_put, plain_replace = keeper.Keeper.resume, saving.put_file, os.replace

        def resume(own: keeper.Keeper, **named: Any) -> keeper.Position:
            self.leave("rejoin")
            with self.of("load"):
                return plain_resume(own, **named)

        def put(path: Path, data: bytes) -> None:
            if path.name != MANIFEST:
                plain_put(path, data)
                return
            with self.of("manifest"):
                plain_put(path, data)
            self.leave("rename")

        def replace(source: Path, target: Path) -> None:
            if target.name != MANIFEST:
                plain_replace(source, target)
                return
            self.leave("manifest")
            self.enter("rename")
            plain_replace(source, target)
            self._words[COMMITTED, 0] = int(target.parent.name.split("-")[1])

        keeper.Keeper.resume, saving.put_file, os.replace = resume, put, replace  # type: ignore[method-assign,assignment]


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_int * 12),
    )


def die_after(seconds: float) -> None:
    """Let the kernel send SIGKILL to this process in so many seconds."""
    if seconds < 1e-6:
        os.kill(os.getpid(), signal.SIGKILL)
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = _Event(signal=signal.SIGKILL, notify=0)
    whole_s, rest_ns = divmod(int(seconds * 1e9), 1_000_000_000)
    when = (ctypes.c_long * 4)(0, 0, whole_s, rest_ns)
    failed = libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    failed = failed or libc.timer_settime(timer, 0, ctypes.byref(when), None)
    if failed:
        raise OSError(ctypes.get_errno(), "no timer")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def forked(body: Callable[[], object], said: Path | None = None) -> int:
    """The process that runs `body`; its status is 0 where it returns. What ended it is written to `said`."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else children look through all that is here for tensors
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        body()
        status = 0
    except BaseException as error:
        if said is not None:
            said.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(status)


def as_rank(rank: int, world: int, port: int) -> None:
    """Tell this process its place, as torchrun does."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    # What a rank says of peers that are gone is not wanted, a thousand times.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def on_ranks(world: int, body: Callable[[int], object], folder: Path) -> None:
    """Run `body` on so many forked ranks with process groups to be made; raises where one fails."""
    port = free_port()

    def own(rank: int) -> None:
        as_rank(rank, world, port)
        body(rank)

    files = [folder / f"said-{rank}" for rank in range(world)]
    children = [forked(partial(own, rank), files[rank]) for rank in range(world)]
    statuses = _waited(children, lambda statuses: any(statuses.values()))
    if any(statuses):
        said = [each.read_text() for each in files if each.exists()]
        raise RuntimeError(f"ranks ended with {statuses}:\n" + "\n".join(said))


def attempt(
    run: Run,
    out: Path,
    steps: int,
    aim: Aim | None = None,
    *,
    after_s: float = 0.0,
    killed_at_s: float | None = None,
    victim: int = 0,
    plants: Path | None = None,
    shared: Path | None = None,
    before: Callable[[int], None] = lambda rank: None,
) -> Attempt:
    """Start all ranks of a run and wait for their end. `after_s`: seconds that the others live on after a death.
    `killed_at_s`: a moment of `time.monotonic` at which `victim` is killed, wherever it is. `plants`: faults to
    put into ranks that beat in `shared`. `before` is called in each rank."""
    world, port, board = run.layout.world, free_port(), Board()
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"said-{rank}" for rank in range(world)]
    for each in files:
        each.unlink(missing_ok=True)

    def body(rank: int) -> None:
        phases = Phases(board, rank, aim)
        phases.enter("rejoin")
        phases.watch()
        as_rank(rank, world, port)
        before(rank)
        watched = None
        if shared is not None:
            watched = watched_rank(shared, rank, plants, out / "checkpoints")
        train(run, shards=Path(run.data.path), out_dir=out, steps=steps, watched=watched)

    begun_s = time.monotonic()
    children = [forked(partial(body, rank), files[rank]) for rank in range(world)]

    def is_over(statuses: dict[int, int]) -> bool:
        if killed_at_s is not None and time.monotonic() >= killed_at_s and children[victim] not in statuses:
            os.kill(children[victim], signal.SIGKILL)
            return True
        return any(statuses.values())

    statuses = _waited(children, is_over, after_s)
    died_in: tuple[str, ...] = ()
    if aim is not None and statuses[aim.rank] == -signal.SIGKILL:
        inside = board.words[aim.rank, : len(PHASES), INSIDE]
        died_in = tuple(phase for phase, count in zip(PHASES, inside, strict=True) if count)
    totals, entered = (board.words[:world, : len(PHASES), each].sum(axis=0) for each in (TOTAL_NS, ENTERED))
    return Attempt(
        statuses=tuple(statuses),
        died_in=died_in,
        committed=board.committed(),
        typical_s=dict(zip(PHASES, (totals / np.maximum(entered, 1) / 1e9).tolist(), strict=True)),
        seconds=time.monotonic() - begun_s,
        said=tuple(each.read_text() if each.exists() else "" for each in files),
    )


def _waited(children: Sequence[int], is_over: Callable[[dict[int, int]], bool], after_s: float = 0.0) -> list[int]:
    """Statuses in order; all that are left are killed `after_s` after it is over."""
    statuses: dict[int, int] = {}
    until_s = time.monotonic() + PATIENCE_S
    is_killing = False
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        if not is_killing and (is_over(statuses) or time.monotonic() > until_s):
            is_killing = True
            time.sleep(after_s)
            for child in children:
                if child not in statuses:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return [statuses[child] for child in children]


def drawn_aim(chosen: random.Random, phase: str, world: int, typical_s: dict[str, float], most: int = 2) -> Aim:
    """A random rank that has the phase, a random time of the first `most`, a random share of its seconds."""
    rank = 0 if phase in ("manifest", "rename", "retention") else chosen.randrange(world)
    nth = 1 if phase in ("rejoin", "load") else chosen.randint(1, most)
    return Aim(rank, phase, nth, chosen.random(), typical_s[phase])
