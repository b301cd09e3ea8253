"""Damage: bits, blocks and files of the newest of two commits are changed, one after the other, and the directory
is read as a resume does. The same bits, blocks and lengths of a checkpoint of PyTorch Distributed Checkpoint
(DCP), of the same tensors, beside it.

What comes of each is one of three. Silent: it loads, and values are others. Rejected: it is said, and the commit
before is taken where there is one. Harmless: it loads, and all values are right. DCP's is loaded in a forked
process of limited memory, as a broken pickle may ask for any; a process that dies has rejected.
"""

import os
import random
import resource
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_crashes import good, manifest_of
from forks import forked
from torch.distributed.checkpoint.planner import SavePlan

from trainwright.train.checkpoint.directory import Save, save_of, saves_in
from trainwright.train.checkpoint.manifest import MANIFEST, Damaged
from trainwright.train.checkpoint.reading import Reader
from trainwright.train.checkpoint.saving import Writing, commit, write_part
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.checkpoint.state import Held
from trainwright.train.checkpoint.writers import WritePlan, _agreed, _files, _item

FLIPS, ZEROED, CUT = 10_000, 1_000, 1_000
RANKS, ROWS, WIDTH = 2, 96, 64
BLOCK_BYTES = 4096
BATCH = 250
"""Changes of a DCP checkpoint that one forked process tries."""
MEMORY_BYTES = 8 << 30
PATIENCE_S = 60
SILENT, REJECTED, HARMLESS, UNNAMED = "silent", "rejected", "harmless", "rejected, and not named"

Change = tuple[str, str, int, int]
"""Kind, file, place, and which bit or how many bytes."""


def values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"layers.{number}.matrix": torch.randn(ROWS, WIDTH, generator=generator) for number in range(4)}


def held_of(rank: int, step: int) -> list[Held]:
    """Rows of each matrix, and of its moment."""
    rows = ROWS // RANKS
    held = []
    for name, each in values(step).items():
        own = each[rank * rows : (rank + 1) * rows]
        for title, kind in ((name, own), (f"{name}:first", -own)):
            held.append(Held(title, (ROWS, WIDTH), (rank * rows, 0), kind.contiguous()))
    return held


def saved(root: Path, step: int, generation: int = 1) -> Save:
    """A commit by two ranks, one after the other, in this process."""
    save = save_of(root, step, generation)
    held = [held_of(rank, step) for rank in range(RANKS)]
    agreed, tensors = _agreed([SavePlan([_item(each) for each in own]) for own in held])
    plans = [WritePlan(tuple(_files(each.items, rank)), tensors) for rank, each in enumerate(agreed)]
    for rank in reversed(range(RANKS)):
        snapshot = Snapshot(plans[rank].files, torch.device("cpu"))
        snapshot.take(held[rank])
        write_part(save, plans[rank], snapshot, rank, 0.0)
    made = partial(manifest_of, save, plans[0])
    commit(save, RANKS, made, 9, frozenset(), Writing(lambda writing: None), 1.0)
    return save


def complaint(save: Save) -> str:
    """What is wrong with a commit; empty where nothing is."""
    try:
        manifest = save.look_over()
        with Reader(save, manifest.parts) as reader:
            for part in manifest.parts:
                reader.verify(part)
    except Damaged as error:
        return str(error)
    return ""


def drawn(chosen: random.Random, folder: Path, share: float) -> list[Change]:
    """Flips in proportion to the bytes of files; blocks and lengths likewise."""
    files = sorted(each for each in folder.iterdir() if each.is_file())
    sizes = [each.stat().st_size for each in files]
    plan: list[Change] = []
    for kind, number in (("flip", FLIPS), ("zero", ZEROED), ("cut", CUT)):
        for file in chosen.choices(files, sizes, k=round(number * share)):
            size = file.stat().st_size
            plan.append((kind, file.name, chosen.randrange(size), chosen.randrange(8)))
    return plan


def changed(folder: Path, change: Change) -> bytes:
    """Do it; the plain content to be put back."""
    kind, name, place, bit = change
    path = folder / name
    plain = path.read_bytes()
    data = bytearray(plain)
    if kind == "flip":
        data[place] ^= 1 << bit
    elif kind == "zero":
        start = place // BLOCK_BYTES * BLOCK_BYTES
        block = len(data[start : start + BLOCK_BYTES])
        data[start : start + block] = bytes(block)
    else:
        del data[place:]
    path.write_bytes(data)
    return plain


def of_ours(root: Path, plan: Sequence[Change]) -> Iterator[tuple[str, str]]:
    newest, before = saves_in(root)
    for change in plan:
        plain = changed(newest.path, change)
        said = complaint(newest)
        if not said:
            outcome = HARMLESS if (newest.path / change[1]).read_bytes() == plain else SILENT
        else:
            is_named = change[1] in said and not complaint(before)
            outcome = REJECTED if is_named else UNNAMED
        (newest.path / change[1]).write_bytes(plain)
        yield change[0], outcome
    assert good(root) == [newest.step, before.step]


def with_whole_files(root: Path) -> Iterator[tuple[str, str]]:
    """Files that are exchanged, gone, empty, or of another commit, one after the other."""
    newest, before = saves_in(root)
    names = sorted(each.name for each in newest.path.iterdir())
    plain = {name: (newest.path / name).read_bytes() for name in names}

    def tried(kind: str, changes: dict[str, bytes | None]) -> tuple[str, str]:
        for name, data in changes.items():
            if data is None:
                (newest.path / name).unlink()
            else:
                (newest.path / name).write_bytes(data)
        said = complaint(newest)
        outcome = (SILENT if not said else UNNAMED) if not any(name in said for name in changes) else REJECTED
        for name in changes:
            (newest.path / name).write_bytes(plain[name])
        return kind, outcome

    for name in names:
        yield tried("missing", {name: None})
        yield tried("empty", {name: b""})
        yield tried("of another commit", {name: (before.path / name).read_bytes()})
        for other in names:
            if name < other and plain[name] != plain[other]:
                yield tried("swapped", {name: plain[other], other: plain[name]})
    assert good(root) == [newest.step, before.step]


def mixed(root: Path) -> Iterator[tuple[str, str]]:
    """Two saves of one step by two starts of the processes: each subset of the files of one, with the manifest of
    the other."""
    older, newer = saved(root, 3, 1), saved(root, 3, 2)
    files = sorted(each.name for each in newer.path.glob("*.safetensors"))
    # The state is another one in each start, as it would be where they differ in anything.
    for each in files:
        data = bytearray((older.path / each).read_bytes())
        data[-1] ^= 1
        (older.path / each).write_bytes(data)
    for subset in range(1, 2 ** len(files)):
        taken = [each for number, each in enumerate(files) if subset >> number & 1]
        plain = {each: (newer.path / each).read_bytes() for each in taken}
        for each in taken:
            shutil.copy(older.path / each, newer.path / each)
        yield "mixed generations", REJECTED if complaint(newer) else SILENT
        for each, data in plain.items():
            (newer.path / each).write_bytes(data)
    shutil.copy(newer.path / MANIFEST, older.path / MANIFEST)
    yield "mixed generations", REJECTED if complaint(older) else SILENT


def of_dcp(folder: Path, expected: dict[str, torch.Tensor], plan: Sequence[Change]) -> Iterator[tuple[str, str]]:
    """Changes of a checkpoint of DCP, a batch in each forked process; one that dies goes on behind what killed
    it."""
    at = 0
    report = folder.with_suffix(".seen")
    while at < len(plan):
        batch = plan[at : at + BATCH]
        report.write_bytes(b"")
        kept = folder.with_suffix(".kept")
        shutil.copytree(folder, kept)
        child = forked(partial(_tried_on_dcp, folder, expected, batch, report))
        os.waitpid(child, 0)
        shutil.rmtree(folder)
        kept.rename(folder)
        seen = [{83: SILENT, 82: REJECTED, 72: HARMLESS}[each] for each in report.read_bytes()]
        if len(seen) < len(batch):
            seen.append(REJECTED)  # it took the process with it
        for change, outcome in zip(batch, seen, strict=False):
            yield change[0], outcome
        at += len(seen)


def _tried_on_dcp(folder: Path, expected: dict[str, torch.Tensor], plan: Sequence[Change], report: Path) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with report.open("ab", buffering=0) as file, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        for change in plan:
            signal.alarm(PATIENCE_S)
            plain = changed(folder, change)
            into = {name: torch.full_like(each, torch.nan) for name, each in expected.items()}
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                outcome = _loaded(folder, into, expected)
            file.write(outcome)
            (folder / change[1]).write_bytes(plain)
    signal.alarm(0)


def _loaded(folder: Path, into: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bytes:
    try:
        dcp.load(into, checkpoint_id=str(folder))
        is_right = all(torch.equal(into[name], each) for name, each in expected.items())
    except BaseException:  # CheckpointException is no Exception
        return b"R"
    return b"H" if is_right else b"S"


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    """How many of each kind ended how, of either."""
    chosen = random.Random(seed)
    home = Path(tempfile.mkdtemp(prefix="trainwright-damage-", dir=memory_home()))
    try:
        for step in (1, 2):
            saved(home / "ours", step)
        expected = values(2)
        expected |= {f"{name}:first": -each for name, each in expected.items()}
        theirs = home / "dcp"
        dcp.save(dict(expected), checkpoint_id=str(theirs))
        newest = saves_in(home / "ours")[0].path
        yield from _counted("ours", of_ours(home / "ours", drawn(chosen, newest, share)))
        yield from _counted("ours", with_whole_files(home / "ours"))
        yield from _counted("ours", mixed(home / "ours"))
        yield from _counted("DCP", of_dcp(theirs, expected, drawn(chosen, theirs, share)))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _counted(whose: str, outcomes: Iterator[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for (kind, outcome), number in Counter(outcomes).items():
        yield {"kind": kind, "whose": whose, "outcome": outcome, "number": number}


def memory_home() -> Path | None:
    """A file system in memory, where what is written is read back a million times."""
    home = Path("/dev/shm")
    return home if os.access(home, os.W_OK) else None
