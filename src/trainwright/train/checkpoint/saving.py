"""Files of a commit from a snapshot, in a thread beside the steps. It calls no collective: ranks meet in the
directory.

Each rank writes its files, waits for the disk, reads them back from it and verifies them, and then puts a part
file that names them. The first rank waits for the parts of all and puts the manifest, which makes the save a
commit; then it removes what is older than the commits to keep. No earlier commit is touched before that.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainwright.train.checkpoint.directory import Save, retain
from trainwright.train.checkpoint.files import (
    blocks_of,
    digest_of,
    forget_cached,
    put_file,
    sync_directory,
    write_file,
)
from trainwright.train.checkpoint.manifest import MANIFEST, Damaged, Manifest, Part, Piece, part_of, text_of
from trainwright.train.checkpoint.reading import Reader
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.checkpoint.writers import WritePlan

POLL_S = 0.005
"""How often the first rank looks for parts of the others."""


OTHER_FAILED = "another rank has failed"
"""Why the first rank gave up: no failure of its own."""


class Late(Exception):
    """A rank did not write its part in time."""


class Writing(threading.Thread):
    """One save of this rank, from the moment it is begun; `error` says why it failed."""

    def __init__(self, work: Callable[["Writing"], None]) -> None:
        super().__init__(daemon=True, name="checkpoint")
        self._work = work
        self.is_given_up = threading.Event()
        """Set by others when another rank has failed: nobody need wait for its part."""
        self.error: str | None = None
        self.whole_s = 0.0
        """From its beginning to the end."""

    def run(self) -> None:
        begun_s = time.perf_counter()
        try:
            self._work(self)
        except OSError as error:
            self.error = f"{error.filename or 'a file'}: {error.strerror or error}"
        except Exception as error:  # whatever it is, training goes on and says it
            self.error = str(error) or type(error).__name__
        self.whole_s = time.perf_counter() - begun_s


def part_file(save: Save, rank: int) -> Path:
    return save.path / f"part-{rank:05d}.json"


def write_part(save: Save, plan: WritePlan, snapshot: Snapshot, rank: int, snapshot_s: float) -> Part:
    """Write and verify this rank's files, and say so in a part file."""
    begun_s = time.perf_counter()
    os.makedirs(save.path, exist_ok=True)
    pieces: list[Piece] = []
    for file in plan.files:
        name, data = file.entry.name, snapshot.bytes_of(file.entry.name)
        for slot in file.slots:
            piece = data[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
            pieces.append(
                Piece(
                    tensor=slot.key[0],
                    start=slot.key[1],
                    shape=slot.shape,
                    file=name,
                    offset_bytes=slot.offset_bytes,
                    length_bytes=slot.num_bytes,
                    digests=tuple(digest_of(block) for block in blocks_of(piece)),
                )
            )
        write_file(save.path / name, blocks_of(data))
    sync_directory(save.path)
    part = Part(
        generation=save.generation,
        rank=rank,
        files=tuple(file.entry for file in plan.files),
        pieces=tuple(pieces),
        snapshot_s=snapshot_s,
        write_s=time.perf_counter() - begun_s,
    )
    for file in plan.files:
        forget_cached(save.path / file.entry.name)
    with Reader(save, [part]) as reader:
        reader.verify(part)
    put_file(part_file(save, rank), text_of(part))
    return part


def commit(
    save: Save,
    world: int,
    manifest_of: Callable[[tuple[Part, ...]], Manifest],
    keep: int,
    rejected: frozenset[str],
    writing: Writing,
    deadline_s: float,
) -> None:
    """What the first rank does when its part is written."""
    parts = tuple(_awaited(save, rank, writing, deadline_s) for rank in range(world))
    put_file(save.path / MANIFEST, text_of(manifest_of(parts)))
    sync_directory(save.path.parent)
    for rank in range(world):
        part_file(save, rank).unlink()
    retain(save, keep, rejected)


def _awaited(save: Save, rank: int, writing: Writing, deadline_s: float) -> Part:
    until_s = time.monotonic() + deadline_s
    path = part_file(save, rank)
    while True:
        try:
            return part_of(path.read_bytes(), f"{save.name}/{path.name}")
        except FileNotFoundError:
            pass
        except Damaged as error:
            raise Late(str(error)) from None
        if writing.is_given_up.is_set():
            raise Late(OTHER_FAILED)
        if time.monotonic() > until_s:
            raise Late(f"rank {rank} has not written its part within {deadline_s:g} s")
        time.sleep(POLL_S)
