"""The memory tier: each rank's state in its own host's memory and in those of its peers (GEMINI, Wang et al., SOSP
2023), from which a run goes on after a death without a read of storage.

A copy is a file in shared memory, in a folder of its host, so that it outlives the worker that wrote it; the
supervisor gives the memory back. There are two of each, written in turn, so that one is always whole: a header
names step and digest, is taken away first and written last. After a step its rank waits for the copy of its blocks
alone; the digest, and the exchange with its peers over a group of its own, go on in a thread beside the next
steps.

Hosts stand in groups (`spec.replicas`), whose members hold one another's state. Who comes back takes the newest
step of which every rank's state is held by some host. A place of this node counts as a host.
"""

import contextlib
import json
import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.spec.replicas import recovery_probability, replica_groups
from trainwright.spec.supervision import GuardState
from trainwright.spec.units import MIB
from trainwright.train.checkpoint.files import digest_of
from trainwright.train.checkpoint.state import Held, held_blocks, make_moments
from trainwright.train.faults.shared import host_folder
from trainwright.train.parallelize import Trainer

HEADER_BYTES = MIB // 2
"""Enough for what a guard knows of the longest window, 10,000 steps: two numbers of 20 letters for each."""
SLOTS = 2
ALIGNED_BYTES = 64
EXCHANGE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Copy:
    """A header: whose state, of which step, and what else a resume needs."""

    rank: int
    step: int
    samples: int
    schedule_steps: int
    guard: dict[str, Any]
    fingerprint: str
    """Of the blocks' names, places and kinds: of another layout it is another."""
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Recovered:
    """A state that is there again."""

    step: int
    samples: int
    schedule_steps: int
    guard: GuardState
    seconds: float
    """On this rank."""
    from_peers: int
    """Ranks whose own copy was gone."""


@dataclass
class MemoryTier:
    """Of this rank. All ranks call `save` and `recover` alike."""

    trainer: Trainer
    directory: Path
    replicas: int
    schedule_steps: int
    _group: Any = None
    _peers: tuple[int, ...] = ()
    _sizes: list[int] = field(default_factory=list)
    """Bytes of each rank's state; empty until it is known."""
    _files: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By rank and slot, of this host: header and state, mapped."""
    _saves: int = 0
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        world, rank = self.trainer.mesh.layout.world, self.trainer.mesh.rank
        self.replicas = min(self.replicas, world)
        groups = replica_groups(range(world), self.replicas)
        members = next(group for group in groups if rank in group)
        self._peers = tuple(each for each in members if each != rank)
        self._host(rank).mkdir(parents=True, exist_ok=True)
        if world > 1:
            # All ranks in one, as who lacks its own copy may get it from any host.
            self._group = dist.new_group(backend="gloo", timeout=EXCHANGE_TIMEOUT)

    @property
    def text(self) -> str:
        """How likely a state is still there, for people."""
        world, most = self.trainer.mesh.layout.world, range(1, min(self.trainer.mesh.layout.world, 4))
        chances = [f"{float(recovery_probability(world, self.replicas, lost)):.4g} if {lost}" for lost in most]
        held = f"each rank's state is in the memory of {self.replicas} of {world} hosts"
        return held + (f"; none is lost with probability {', '.join(chances)} are lost at once" if chances else "")

    # Saving

    def save(self, step: int, samples: int, guard: GuardState) -> None:
        """Copy the state; the rest goes on beside the next steps."""
        self.wait()
        blocks = _sorted_blocks(self.trainer)
        size = _places(blocks)[1]
        if not self._sizes:
            self._sizes = self._of_all(size)
        slot, rank = self._saves % SLOTS, self.trainer.mesh.rank
        self._saves += 1
        file = self._file(rank, slot, self._sizes[rank])
        file[:HEADER_BYTES] = 0
        _copy(blocks, file[HEADER_BYTES:], to_memory=True)
        if self.trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.mesh.device)
        plain = guard.model_dump(mode="json")
        made = Copy(rank, step, samples, self.schedule_steps, plain, _fingerprint(blocks), size, "")
        self._thread = threading.Thread(target=self._finish, args=(made, slot), daemon=True, name="memory tier")
        self._thread.start()

    def wait(self) -> None:
        """For the last save to be with all its hosts."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _finish(self, copy: Copy, slot: int) -> None:
        file = self._file(copy.rank, slot, copy.num_bytes)
        state = file[HEADER_BYTES:]
        whole = Copy(**{**vars(copy), "digest": digest_of(state.numpy().data)})
        header = _header(whole)
        file[:HEADER_BYTES] = header
        held = {peer: self._file(peer, slot, self._sizes[peer]) for peer in self._peers}
        for each in held.values():
            each[:HEADER_BYTES] = 0
        headers = {peer: torch.empty_like(header) for peer in self._peers}
        # A peer that is gone ends the run soon, and is for others to tell.
        with contextlib.suppress(RuntimeError):
            works = [dist.irecv(each[HEADER_BYTES:], peer, self._group, tag=0) for peer, each in held.items()]
            works += [dist.irecv(each, peer, self._group, tag=1) for peer, each in headers.items()]
            works += [dist.isend(state, peer, self._group, tag=0) for peer in self._peers]
            works += [dist.isend(header, peer, self._group, tag=1) for peer in self._peers]
            for work in works:
                assert work is not None
                work.wait()
            for peer, each in held.items():
                each[:HEADER_BYTES] = headers[peer]

    def forget(self) -> None:
        """What is there is not to be gone on from."""
        self.wait()
        for path in self._host(self.trainer.mesh.rank).iterdir():
            path.unlink()
        self._files.clear()

    # Recovering

    @torch.no_grad()
    def recover(self, least_step: int) -> Recovered | None:
        """Give the trainer the newest state that hosts hold of all ranks; None where that is of a step before
        `least_step`, or there is none."""
        begun_s = time.perf_counter()
        world, rank = self.trainer.mesh.layout.world, self.trainer.mesh.rank
        everyone = self._of_all(self._copies())
        if not any(everyone):
            return None
        make_moments(self.trainer, 0)  # so that there are blocks to look for and to fill
        prints = self._of_all(_fingerprint(_sorted_blocks(self.trainer)))
        damaged: set[tuple[int, int, int]] = set()
        while True:
            # By step: for each rank the hosts that hold its state.
            hosts: dict[int, dict[int, list[int]]] = {}
            for host, copies in enumerate(everyone):
                for copy in copies:
                    is_good = (host, copy.rank, copy.step) not in damaged
                    if copy.rank < world and copy.fingerprint == prints[copy.rank] and is_good:
                        hosts.setdefault(copy.step, {}).setdefault(copy.rank, []).append(host)
            step = max((step for step, held in hosts.items() if len(held) == world), default=-1)
            if step < max(least_step, 0):
                return None
            givers = {each: each if each in held else held[0] for each, held in sorted(hosts[step].items())}
            state = self._fetched(step, givers, everyone)
            copy = next(each for each in everyone[givers[rank]] if (each.rank, each.step) == (rank, step))
            is_whole = digest_of(state.numpy().data) == copy.digest
            bad = self._of_all(None if is_whole else (givers[rank], rank, step))
            if not any(bad):
                break
            damaged.update(each for each in bad if each is not None)
        guard = GuardState.parse(copy.guard)
        make_moments(self.trainer, step - guard.skipped)
        _copy(_sorted_blocks(self.trainer), state, to_memory=False)
        self.trainer.data_parallel.after_update()
        if self.trainer.low_precision is not None:
            self.trainer.low_precision.restored()
        others = sum(giver != each for each, giver in givers.items())
        return Recovered(step, copy.samples, copy.schedule_steps, guard, time.perf_counter() - begun_s, others)

    def _fetched(self, step: int, givers: Mapping[int, int], everyone: Sequence[Sequence[Copy]]) -> torch.Tensor:
        """This rank's state as its giver has it; gives others theirs."""
        rank = self.trainer.mesh.rank
        own: torch.Tensor | None = None
        for receiver, giver in givers.items():
            if rank not in (receiver, giver):
                continue
            copy = next(each for each in everyone[giver] if (each.rank, each.step) == (receiver, step))
            if giver == rank:
                state = self._opened(receiver, step)[HEADER_BYTES:]
                if receiver == rank:
                    own = state
                else:
                    dist.send(state, receiver, self._group)
            else:
                own = torch.empty(copy.num_bytes, dtype=torch.uint8)
                dist.recv(own, giver, self._group)
        assert own is not None
        return own

    def _copies(self) -> list[Copy]:
        """Those that this host holds and whose header is whole."""
        found = []
        for path in sorted(self._host(self.trainer.mesh.rank).glob("rank-*")):
            with path.open("rb") as file:
                copy = _copy_of(file.read(HEADER_BYTES))
            if copy is not None and path.stat().st_size == HEADER_BYTES + copy.num_bytes:
                found.append(copy)
        return found

    def _opened(self, rank: int, step: int) -> torch.Tensor:
        for slot in range(SLOTS):
            path = self._path(rank, slot)
            if path.exists():
                file = _mapped(path, path.stat().st_size)
                copy = _copy_of(bytes(file[:HEADER_BYTES].numpy().data))
                if copy is not None and copy.step == step:
                    return file
        raise AssertionError(f"the copy of rank {rank}, step {step}, is gone")

    # Files

    def _host(self, place: int) -> Path:
        return self.directory / host_folder(place)

    def _path(self, rank: int, slot: int) -> Path:
        return self._host(self.trainer.mesh.rank) / f"rank-{rank}-{slot}"

    def _file(self, rank: int, slot: int, num_bytes: int) -> torch.Tensor:
        if (rank, slot) not in self._files:
            self._files[rank, slot] = _mapped(self._path(rank, slot), HEADER_BYTES + num_bytes)
        return self._files[rank, slot]

    def _of_all(self, value: Any) -> list[Any]:
        world = self.trainer.mesh.layout.world
        if world == 1:
            return [value]
        values: list[Any] = [None] * world
        dist.all_gather_object(values, value, group=self._group)
        return values


def _mapped(path: Path, num_bytes: int) -> torch.Tensor:
    """A file's bytes, shared with whoever maps it."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(num_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def _sorted_blocks(trainer: Trainer) -> list[Held]:
    """Each block once, in an order that the layout alone decides."""
    return sorted({each.key: each for each in held_blocks(trainer)}.values(), key=lambda each: each.key)


def _places(blocks: Sequence[Held]) -> tuple[list[int], int]:
    """Where each block begins, and the bytes of all."""
    starts, at = [], 0
    for each in blocks:
        starts.append(at)
        at += -(-each.values.numel() * each.values.element_size() // ALIGNED_BYTES) * ALIGNED_BYTES
    return starts, max(at, ALIGNED_BYTES)


@torch.no_grad()
def _copy(blocks: Sequence[Held], memory: torch.Tensor, *, to_memory: bool) -> None:
    for each, start in zip(blocks, _places(blocks)[0], strict=True):
        num_bytes = each.values.numel() * each.values.element_size()
        place = memory[start : start + num_bytes].view(each.values.dtype).view(each.values.shape)
        if to_memory:
            place.copy_(each.values, non_blocking=True)
        else:
            each.values.copy_(place)


def _fingerprint(blocks: Sequence[Held]) -> str:
    named = [[each.name, each.start, list(each.values.shape), str(each.values.dtype)] for each in blocks]
    return digest_of(json.dumps(named).encode())


def _header(copy: Copy) -> torch.Tensor:
    text = json.dumps({"copy": vars(copy), "digest": digest_of(json.dumps(vars(copy)).encode())}).encode()
    assert len(text) <= HEADER_BYTES, "a guard's window is too long"
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _copy_of(header: bytes) -> Copy | None:
    """What a header says; None of one that is not whole."""
    try:
        outer = json.loads(header)
        if outer["digest"] != digest_of(json.dumps(outer["copy"]).encode()):
            return None
        return Copy(**outer["copy"])
    except (ValueError, KeyError, TypeError):
        return None
