"""The state from a commit of any layout: every block that this rank holds is put together from parts of the blocks
that were stored, verified as they are read.

Which parts those are PyTorch Distributed Checkpoint's planner says. What is stored is copied bit for bit. The one
exception are moments in int8 under another layout: their scales are of blocks of 256 of a rank's part, so that a
part with other bounds is unpacked and packed again, and rounded once more.
"""

import math
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainwright.train.checkpoint.manifest import Damaged, Manifest, Piece
from trainwright.train.checkpoint.reading import Reader
from trainwright.train.checkpoint.state import (
    FALLEN,
    HISTORY,
    Held,
    blocks_of_moment,
    held_weights,
    kept_moments,
    make_moments,
    name_of_scale,
    place_of,
)
from trainwright.train.checkpoint.writers import DTYPES
from trainwright.train.moments import MOMENT_FORMATS
from trainwright.train.parallelize import Trainer

OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Source:
    """The stored blocks of a commit, by tensor."""

    def __init__(self, reader: Reader, manifest: Manifest) -> None:
        self._reader, self._tensors = reader, manifest.tensors
        self._pieces: dict[str, list[Piece]] = {}
        for part in manifest.parts:
            for piece in part.pieces:
                self._pieces.setdefault(piece.tensor, []).append(piece)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def pieces_of(self, name: str) -> list[Piece]:
        return self._pieces.get(name, [])

    def fill(self, held: Held) -> None:
        """Give a block its stored values. Raises `Damaged` where something is not what was written, or missing."""
        entry = self._tensors.get(held.name)
        where = f"{self._reader.save.name}: {held.name}"
        if entry is None:
            raise Damaged(f"{where} is not in it")
        expected = DTYPES[held.values.dtype], held.whole_shape
        if (entry.dtype, entry.shape) != expected:
            raise Damaged(f"{where} is {entry.dtype} {list(entry.shape)}, not {expected[0]} {list(expected[1])}")
        pieces, shape = self.pieces_of(held.name), held.values.shape
        stored = TensorStorageMetadata(
            TensorProperties(dtype=held.values.dtype),
            torch.Size(held.whole_shape),
            [ChunkStorageMetadata(torch.Size(each.start), torch.Size(each.shape)) for each in pieces],
        )
        wanted = ChunkStorageMetadata(torch.Size(held.start), shape)
        missing = math.prod(shape)
        for item in create_read_items_for_chunk_list(held.name, stored, [wanted]) if missing else ():
            assert item.storage_index.index is not None
            piece = pieces[item.storage_index.index]
            into = held.values
            for dim, (first, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                into = into.narrow(dim, first, size)
            self._copy(piece, tuple(item.storage_offsets), tuple(item.lengths), into)
            missing -= math.prod(item.lengths)
        if missing:
            raise Damaged(f"{where} lacks {missing} of the values of a block of {list(shape)}")

    def whole(self, piece: Piece) -> torch.Tensor:
        """A stored block."""
        values = torch.empty(piece.shape, dtype=OF_NAME[self._tensors[piece.tensor].dtype])
        self._copy(piece, (0,) * len(piece.shape), piece.shape, values)
        return values

    def _copy(self, piece: Piece, start: tuple[int, ...], size: tuple[int, ...], into: torch.Tensor) -> None:
        """A part of a stored block. Rows are read from the first to the last; a part that is whole rows goes to
        where it is wanted at once."""
        row_bytes = piece.length_bytes // piece.shape[0]
        low, high = start[0] * row_bytes, (start[0] + size[0]) * row_bytes
        is_whole_rows = size[1:] == piece.shape[1:]
        if is_whole_rows and into.is_contiguous() and into.device.type == "cpu":
            self._reader.read(piece, low, high, _bytes_of(into))
            return
        rows = torch.empty((size[0], *piece.shape[1:]), dtype=into.dtype)
        self._reader.read(piece, low, high, _bytes_of(rows))
        for dim in range(1, rows.ndim):
            rows = rows.narrow(dim, start[dim], size[dim])
        into.copy_(rows)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@torch.no_grad()
def restore(trainer: Trainer, reader: Reader, manifest: Manifest) -> None:
    """Give a trainer the state of a commit. Where it raises `Damaged`, some tensors have it and some don't."""
    source = Source(reader, manifest)
    _fill_each(source, held_weights(trainer))
    make_moments(trainer, manifest.step - manifest.guard.skipped)
    for name, parameter, moments in kept_moments(trainer):
        for kind, values in moments.items():
            if f"{kind}_scale" in moments:
                _fill_int8(source, name, parameter, kind, moments)
            elif not kind.endswith("_scale"):
                _fill_each(source, blocks_of_moment(name, parameter, kind, values))
    trainer.data_parallel.after_update()
    if trainer.low_precision is not None:
        trainer.low_precision.restored()


def _fill_each(source: Source, held: Iterable[Held]) -> None:
    for each in held:
        if each.name.endswith((f".{HISTORY}", f".{FALLEN}")) and not source.has(each.name):
            each.values.zero_()
            continue
        source.fill(each)


def _fill_int8(
    source: Source, name: str, parameter: torch.Tensor, kind: str, moments: dict[str, torch.Tensor]
) -> None:
    start, shape = place_of(parameter)
    pieces = source.pieces_of(f"{name}:{kind}")
    if any((each.start, each.shape) == (start, shape) for each in pieces) or not math.prod(shape):
        for key in (kind, f"{kind}_scale"):
            _fill_each(source, blocks_of_moment(name, parameter, key, moments[key]))
        return
    own = torch.zeros(shape, dtype=parameter.dtype)
    is_signed = kind != "second"
    for piece in pieces:
        scale = source.pieces_of(name_of_scale(f"{name}:{kind}", piece.start, piece.shape))
        overlap = _overlap(piece, start, shape)
        if overlap is None or not scale:
            continue
        kept = source.whole(piece).view(-1), source.whole(scale[0])
        values = MOMENT_FORMATS["int8"].unpack(kept, own.dtype, is_signed).view(piece.shape)
        there, here = overlap
        own[here] = values[there]
    packed = MOMENT_FORMATS["int8"].pack(own.view(-1).to(parameter.device), is_signed)
    for key, values in zip((kind, f"{kind}_scale"), packed, strict=True):
        moments[key].copy_(values)


def _overlap(
    piece: Piece, start: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a stored block and one at `start` have in common, as places in either; None where they have nothing."""
    there, here = [], []
    for theirs, their_size, ours, our_size in zip(piece.start, piece.shape, start, shape, strict=True):
        low, high = max(theirs, ours), min(theirs + their_size, ours + our_size)
        if low >= high:
            return None
        there.append(slice(low - theirs, high - theirs))
        here.append(slice(low - ours, high - ours))
    return tuple(there), tuple(here)
