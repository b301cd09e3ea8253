"""Bytes of a commit, verified as they are read: a block is digested while it is still in the processor's cache,
and handed on only if the digest is the manifest's. Nothing here loads PyTorch.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from trainwright.train.checkpoint.directory import Save
from trainwright.train.checkpoint.files import BLOCK_BYTES, digest_of
from trainwright.train.checkpoint.manifest import Damaged, FileEntry, Part, Piece


class Reader:
    """Reads the files of a commit; a block that is wanted whole is read to where it is wanted. A file is checked
    for its length and header when it is opened first. Raises `Damaged` where something is not what was written."""

    def __init__(self, save: Save, parts: Iterable[Part]) -> None:
        self.save = save
        parts = tuple(parts)
        self._entries = {file.name: file for part in parts for file in part.files}
        self._descriptors: dict[str, int] = {}
        longest = max((piece.length_bytes for part in parts for piece in part.pieces), default=0)
        self._block = bytearray(min(BLOCK_BYTES, longest))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, piece: Piece, start: int, stop: int, out: memoryview) -> None:
        """Bytes `start` to `stop` of a piece into `out`, verified in whole blocks."""
        descriptor = self._opened(piece.file)
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first = number * BLOCK_BYTES
            length = min(BLOCK_BYTES, piece.length_bytes - first)
            low, high = max(start, first), min(stop, first + length)
            is_wanted_whole = high - low == length
            block = out[low - start : high - start] if is_wanted_whole else memoryview(self._block)[:length]
            with _complaints(f"{self.save.name}/{piece.file}"):
                self._fill(descriptor, block, piece.offset_bytes + first, piece.file)
            if digest_of(block) != piece.digests[number]:
                where = f"bytes {piece.offset_bytes + first} to {piece.offset_bytes + first + length}"
                what = f"{where}, of {piece.tensor}, do not have the digest of the manifest"
                raise Damaged(f"{self.save.name}/{piece.file}: {what}")
            if not is_wanted_whole:
                out[low - start : high - start] = block[low - first : high - first]

    def verify(self, part: Part) -> None:
        """Read everything that one rank wrote."""
        for file in part.files:
            self._opened(file.name)
        scratch = memoryview(bytearray(len(self._block)))
        for piece in part.pieces:
            for start in range(0, piece.length_bytes, BLOCK_BYTES):
                stop = min(piece.length_bytes, start + BLOCK_BYTES)
                self.read(piece, start, stop, scratch)

    def _opened(self, name: str) -> int:
        if name not in self._descriptors:
            where = f"{self.save.name}/{name}"
            if name not in self._entries:
                raise Damaged(f"{where}: is not in the manifest")
            with _complaints(where):
                descriptor = os.open(self.save.path / name, os.O_RDONLY)
                self._descriptors[name] = descriptor
                self._check(descriptor, self._entries[name], where)
        return self._descriptors[name]

    def _check(self, descriptor: int, entry: FileEntry, where: str) -> None:
        held = os.fstat(descriptor).st_size
        if held != entry.length_bytes:
            raise Damaged(f"{where}: has {held} bytes, not {entry.length_bytes}")
        header = memoryview(bytearray(entry.header_bytes))
        self._fill(descriptor, header, 0, entry.name)
        if digest_of(header) != entry.header_digest:
            raise Damaged(f"{where}: its header does not have the digest of the manifest")

    def _fill(self, descriptor: int, out: memoryview, offset: int, name: str) -> None:
        while out:
            got = os.preadv(descriptor, [out], offset)
            if not got:
                raise Damaged(f"{self.save.name}/{name}: ends at byte {offset}")
            out, offset = out[got:], offset + got


@contextmanager
def _complaints(where: str) -> Iterator[None]:
    """A file that can't be read is damage as any other."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{where}: is missing") from None
    except OSError as error:
        raise Damaged(f"{where}: can't be read ({error.strerror})") from None
