"""Bytes that are on the disk when it says so, and their digests.

A file's content is durable after fsync of the file, its name after fsync of the directory that it stands in; a
rename puts a name in place whole or not at all. Digests are xxh3, which is faster than memory is copied; they tell
accidents apart, not attacks.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from trainwright.spec.units import MIB

BLOCK_BYTES = 16 * MIB
"""Data are written, read and digested in blocks of this many bytes, so that a reader of a part verifies no more
than it reads."""


def digest_of(data: bytes | memoryview) -> str:
    """16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def blocks_of(data: memoryview) -> Iterable[memoryview]:
    """Pieces of `BLOCK_BYTES`, the last one shorter; none of no data."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a new file and wait until its content is on the disk; an `OSError` names it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for block in blocks:
            left = memoryview(block)
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def put_file(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it into it, so that it is there whole or not at all; wait until
    both are on the disk."""
    beside = path.with_name(path.name + ".writing")
    write_file(beside, [data])
    os.replace(beside, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(path: Path) -> None:
    """Let the next read of a file come from the disk, where the system can be told so."""
    with contextlib.suppress(AttributeError, OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
