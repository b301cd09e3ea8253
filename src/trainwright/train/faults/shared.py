"""A directory in the memory of this node that lives as long as its supervisor: workers that die leave what they
wrote in it.

It is locked for as long as its supervisor lives. One that was killed leaves its directory behind, unlocked, and
the next supervisor of the same user removes it: memory would be lost otherwise until the machine starts again.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY = "memory"
"""In such a directory, the folder of states (`train/checkpoint/memory.py`)."""
HOME = Path("/dev/shm")
"""Linux's file system in memory; elsewhere the system's directory of temporary files serves."""
LOCK = "lock"


def host_folder(place: int) -> str:
    """In `MEMORY`, what is in the memory of a host."""
    return f"host-{place}"


def _home() -> Path:
    return HOME if os.access(HOME, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def shared_directory(home: Path | None = None) -> Iterator[Path]:
    """A new directory, which is removed at the end; those of supervisors that are gone are removed before."""
    home = _home() if home is None else home
    prefix = f"trainwright-{os.getuid()}-"
    for left in home.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _held(left / LOCK):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
    try:
        with _held(made / LOCK, create=True):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _held(path: Path, *, create: bool = False) -> Iterator[None]:
    """Hold a lock; `OSError` where somebody else does, or, without `create`, where it isn't there."""
    # Not inherited by workers, which would hold it on after their supervisor.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
