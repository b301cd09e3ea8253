"""What saving and loading cost: a step's wait for the copy, files written and read back, digests, and the same of
PyTorch Distributed Checkpoint (DCP), in turn in the same run.

    python benchmarks/checkpoint.py [--mib 192] [--saves 100] [--rounds 5] [--directory DIR]

State of one rank: tensors of 4 MiB. Then steps of a small Llama, without saves and with one every 4 steps, in
turn. Prints medians and their ratios.
"""

import argparse
import gc
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from trainwright.cli.files import read_run
from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.units import MIB
from trainwright.train.checkpoint.directory import Save, save_of, saves_in
from trainwright.train.checkpoint.files import BLOCK_BYTES, blocks_of, digest_of, forget_cached
from trainwright.train.checkpoint.identity import mark_of
from trainwright.train.checkpoint.keeper import Keeper, Position
from trainwright.train.checkpoint.manifest import Part
from trainwright.train.checkpoint.reading import Reader
from trainwright.train.checkpoint.saving import write_part
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.checkpoint.state import Held
from trainwright.train.checkpoint.writers import planned
from trainwright.train.clock import Clock
from trainwright.train.faults.attendant import Attendant
from trainwright.train.loop import batch_of
from trainwright.train.mesh import joined
from trainwright.train.parallelize import Trainer, parallelize
from trainwright.train.verify.subject import random_tokens

RUN = Path(__file__).parents[1] / "runs" / "llama-local-6m_cpu4.toml"
ONE_RANK = [("layout.dp", 1), ("layout.tp", 1), ("layout.pp", 1), ("recipe.zero", 0)]


def seconds(body: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    body()
    return time.perf_counter() - begun_s


def median_line(name: str, values: list[float], num_bytes: int) -> str:
    middle = statistics.median(values)
    worst = sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
    rate = num_bytes / middle / 1e9
    return f"{name:44s} p50 {middle * 1e3:8.1f} ms   p95 {worst * 1e3:8.1f} ms   {rate:6.2f} GB/s"


def state_of(mib: int) -> list[Held]:
    values = [torch.randn(MIB) for _ in range(mib // 4)]
    return [Held(f"layers.{number}.weight", (MIB,), (0,), each) for number, each in enumerate(values)]


def plain_read(save: Save, part: Part, scratch: memoryview) -> None:
    """The same bytes by the same calls, without digests."""
    for file in part.files:
        descriptor = os.open(save.path / file.name, os.O_RDONLY)
        for piece in part.pieces:
            if piece.file == file.name:
                for start in range(0, piece.length_bytes, BLOCK_BYTES):
                    length = min(BLOCK_BYTES, piece.length_bytes - start)
                    os.preadv(descriptor, [scratch[:length]], piece.offset_bytes + start)
        os.close(descriptor)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def of_one_state(root: Path, mib: int, saves: int) -> None:
    """Copy, write, read: ours and DCP's in turn."""
    held = state_of(mib)
    plan = planned(held, 0, 1)
    snapshot = Snapshot(plan.files, torch.device("cpu"))
    num_bytes = mib * MIB
    state = {each.name: each.values for each in held}
    names = ("snapshot", "clone", "dcp blocked", "digest", "write", "dcp save", "verified", "plain", "dcp load")
    seen: dict[str, list[float]] = {name: [] for name in names}
    scratch = memoryview(bytearray(BLOCK_BYTES))
    for turn in range(max(3, saves // 10)):
        save, theirs = save_of(root, turn + 1, 1), root / f"dcp-{turn}"
        seen["snapshot"].append(seconds(lambda: snapshot.take(held)))
        seen["clone"].append(seconds(lambda: [each.values.clone() for each in held]))
        pending: list = []
        seen["dcp blocked"].append(
            seconds(lambda: pending.append(dcp.async_save(state, checkpoint_id=str(theirs) + "-async")))  # noqa: B023
        )
        pending[0].result()
        data = snapshot.bytes_of(plan.files[0].entry.name)
        seen["digest"].append(seconds(lambda: [digest_of(block) for block in blocks_of(data)]))  # noqa: B023
        parts: list[Part] = []
        whole_s = seconds(lambda: parts.append(write_part(save, plan, snapshot, 0, 0.0)))  # noqa: B023
        assert whole_s > parts[0].write_s
        seen["write"].append(parts[0].write_s)
        seen["dcp save"].append(seconds(partial(dcp.save, state, checkpoint_id=str(theirs))))

        def verified() -> None:
            with Reader(save, parts) as reader:  # noqa: B023
                reader.verify(parts[0])  # noqa: B023

        # Warm, so that what is compared is work and not the disk.
        plain_read(save, parts[0], scratch)
        seen["verified"].append(seconds(verified))
        seen["plain"].append(seconds(partial(plain_read, save, parts[0], scratch)))
        into = {name: torch.empty_like(each) for name, each in state.items()}
        dcp.load(into, checkpoint_id=str(theirs))
        seen["dcp load"].append(seconds(partial(dcp.load, into, checkpoint_id=str(theirs))))
        for path in (save.path, theirs, Path(str(theirs) + "-async")):
            shutil.rmtree(path)
    titles = {
        "snapshot": "step waits: copy into re-used buffers",
        "clone": "step waits: clone of every tensor",
        "dcp blocked": "step waits: DCP async_save",
        "digest": "digest of the copy",
        "write": "write and fsync, with the digest",
        "dcp save": "DCP save (no fsync of the directory, no digest)",
        "verified": "read and verify",
        "plain": "read alone",
        "dcp load": "DCP load (verifies nothing)",
    }
    print(f"state of {mib} MiB, {len(seen['write'])} turns, page cache warm for reads")
    for name, values in seen.items():
        print(median_line(titles[name], values, num_bytes))
    middle = {name: statistics.median(values) for name, values in seen.items()}
    print(f"digest / write                {middle['digest'] / middle['write']:.1%}")
    print(f"verified / plain read         {middle['verified'] / middle['plain']:.2f}")
    print(f"DCP blocked / ours            {middle['dcp blocked'] / middle['snapshot']:.2f}")
    print(f"DCP load / ours verified      {middle['dcp load'] / middle['verified']:.2f}")

    snapshot.take(held)
    blocked, before = [], resident_bytes()
    for turn in range(saves):
        blocked.append(seconds(lambda: snapshot.take(held)))
        save = save_of(root, turn + 1, 2)
        write_part(save, plan, snapshot, 0, 0.0)
        forget_cached(save.path)
        shutil.rmtree(save.path)
    gc.collect()
    growth = resident_bytes() / before - 1
    print(f"{saves} saves: {median_line('step waits', blocked, num_bytes)}; memory {growth:+.2%}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def beside_steps(root: Path, rounds: int) -> None:
    """Steps without saves and with them, in turn."""
    run = read_run(RUN).with_values(ONE_RANK)
    with joined(run.layout) as mesh:
        trainer = parallelize(run, mesh, Clock())
        data = random_tokens(run, 64)
        policy = Checkpointing(every_steps=4)
        keeper = Keeper(trainer, root, policy, mark_of(data.shards), 100, print, Attendant(trainer, None, print))
        step_s: dict[bool, list[float]] = {False: [], True: []}
        _step(trainer, data, 0)
        _step(trainer, data, 1)
        done = 2
        for _ in range(rounds):
            for saves in (False, True):
                begun_s = time.perf_counter()
                for _ in range(8):
                    one_s = seconds(partial(_step, trainer, data, done))
                    done += 1
                    if saves:
                        keeper.after_step(Position(done, done), one_s, is_last=False)
                step_s[saves].append((time.perf_counter() - begun_s) / 8)
                keeper._ended(60.0)
        parts = [part for save in saves_in(root) for part in save.manifest().parts]
        alone, with_saves = (statistics.median(step_s[each]) for each in (False, True))
        waited = statistics.median(part.snapshot_s for part in parts)
        size = sum(file.length_bytes for file in parts[0].files) / MIB
        print(f"steps of {run.model.name}, {size:.0f} MiB of state, a save every 4 steps, {rounds} rounds of 8")
        print(
            f"step alone {alone * 1e3:.1f} ms, with saves {with_saves * 1e3:.1f} ms: {with_saves / alone - 1:+.1%}"
        )
        print(f"copy {waited * 1e3:.1f} ms, {waited / alone:.1%} of a step, {waited / alone / 4:.1%} of the time")


def _step(trainer: Trainer, data: object, step: int) -> None:
    trainer.step(batch_of(trainer.run, data, step % 64, 0), 1e-3)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        of_one_state(root / "state", options.mib, options.saves)
        beside_steps(root / "steps", options.rounds)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
