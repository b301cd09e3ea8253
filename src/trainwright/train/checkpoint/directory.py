"""The commits of a directory: found, removed, and kept from two writers. Nothing here loads PyTorch.

step-00000040-g0002/   a save: of step 40, by the second start of the run's processes
    manifest.json      written last; with it the save is a commit
    weights-00000.safetensors, optimizer-00000.safetensors   of each rank that wrote something
lock                   held while a run writes here
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from trainwright.spec.errors import reject
from trainwright.train.checkpoint.files import sync_directory
from trainwright.train.checkpoint.manifest import MANIFEST, Damaged, Manifest, manifest_of

NAME = re.compile(r"step-(\d{8,})-g(\d{4,})")
LOCK = "lock"
LOCK_PATIENCE_S = 10.0
"""For the workers of a run that was killed to be gone."""
FOLDER = "checkpoints"
"""In a run's output."""


@dataclass(frozen=True, order=True)
class Save:
    """A directory of a save, which is a commit where it has a manifest; a later one is larger."""

    step: int
    generation: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_committed(self) -> bool:
        return (self.path / MANIFEST).is_file()

    def manifest(self) -> Manifest:
        """Raises `Damaged`, or `InvalidSpec` for a newer format."""
        path = self.path / MANIFEST
        where = f"{self.name}/{MANIFEST}"
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise Damaged(f"{where}: is missing, so the save has not ended") from None
        except OSError as error:
            raise Damaged(f"{where}: {error.strerror}") from None
        manifest = manifest_of(text, where)
        if (manifest.step, manifest.generation) != (self.step, self.generation):
            raise Damaged(f"{where}: is of step {manifest.step}, generation {manifest.generation}")
        return manifest

    def look_over(self) -> Manifest:
        """The manifest, if all its files are there with their lengths; raises as `manifest` does."""
        manifest = self.manifest()
        for part in manifest.parts:
            for file in part.files:
                try:
                    held = (self.path / file.name).stat().st_size
                except OSError:
                    raise Damaged(f"{self.name}/{file.name}: is missing") from None
                if held != file.length_bytes:
                    what = f"has {held} bytes, not {file.length_bytes}"
                    raise Damaged(f"{self.name}/{file.name}: {what}")
        return manifest


def save_of(root: Path, step: int, generation: int) -> Save:
    return Save(step, generation, root / f"step-{step:08d}-g{generation:04d}")


def saves_in(root: Path) -> list[Save]:
    """All saves, the newest first; none where there is no such directory."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in root.iterdir():
            match = NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Save(int(match[1]), int(match[2]), path))
    return sorted(found, reverse=True)


def remove(save: Save) -> None:
    """Remove a save: its manifest first, so that what is left of it at any moment is no commit."""
    manifest = save.path / MANIFEST
    if manifest.exists():
        manifest.unlink()
        sync_directory(save.path)
    shutil.rmtree(save.path)


def retain(newest: Save, keep: int, rejected: Set[str] = frozenset()) -> None:
    """Keep the `keep` newest commits, `newest` among them, and remove what is older. Those count that are whole by
    their files' lengths and not among `rejected`, names of saves that a resume found damaged. Saves that never
    ended are removed where they are older than `newest`."""
    whole = 0
    for save in saves_in(newest.path.parent):
        if save > newest:
            continue
        if whole >= keep or not save.is_committed:
            remove(save)
            continue
        with contextlib.suppress(Damaged):
            save.look_over()
            whole += save.name not in rejected


@contextlib.contextmanager
def locked(root: Path, patience_s: float = LOCK_PATIENCE_S) -> Iterator[None]:
    """Make the directory and hold it alone; `InvalidSpec` where another run does, or it can't be made."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        why = f"can't be written ({error.strerror}); change its permissions or choose another directory"
        reject("checkpoint.directory", str(root), why)
    try:
        _lock(descriptor, root, patience_s)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, root: Path, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until_s:
                why = "is being written by another run; wait for its end or choose another directory"
                reject("checkpoint.directory", str(root), why)
            time.sleep(0.1)
