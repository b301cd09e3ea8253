"""A commit written anew without a trainer: its tensors whole, for other programs, or its blocks cut for another
number of ranks. Nothing here loads PyTorch, and what is read is verified.

A resume under any layout reads any commit. To cut it anew beforehand is for storage that is far away: each of the
new ranks then reads little more than its own file.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainwright.spec.errors import reject
from trainwright.spec.units import GIB
from trainwright.train.checkpoint.directory import Save, locked, save_of
from trainwright.train.checkpoint.files import blocks_of, digest_of, put_file, sync_directory, write_file
from trainwright.train.checkpoint.headers import WIDTHS, block_title, header_of
from trainwright.train.checkpoint.manifest import MANIFEST, FileEntry, Manifest, Part, Piece, TensorEntry, text_of
from trainwright.train.checkpoint.reading import Reader

NUMPY = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "U8": np.dtype("u1")}
"""By safetensors' names; numpy has no bf16, whose bytes are all that matters here."""
FILE_BYTES = 5 * GIB
"""Of one file of an export, about, as Hugging Face's own."""


@dataclass(frozen=True)
class Block:
    """A part of a tensor, with its values."""

    tensor: str
    start: tuple[int, ...]
    values: np.ndarray


def whole_tensor(reader: Reader, manifest: Manifest, name: str) -> np.ndarray:
    """A tensor put together from its blocks; raises `Damaged`."""
    entry = manifest.tensors[name]
    values = np.empty(entry.shape, NUMPY[entry.dtype])
    for piece in _pieces_of(manifest).get(name, ()):
        block = np.empty(piece.shape, values.dtype)
        reader.read(piece, 0, piece.length_bytes, _raw(block))
        values[tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))] = (
            block
        )
    return values


def export(save: Save, out: Path) -> int:
    """Write the weights of a commit as safetensors with whole tensors, by their names in `train/model`, with an
    index, and the run; the bytes of it. Raises `Damaged`, and `InvalidSpec` where `out` is there."""
    manifest = save.look_over()
    weights = sorted(name for name in manifest.tensors if ":" not in name)
    files = list(_in_files(weights, manifest.tensors))
    _require_new(out)
    beside = out.with_name(out.name + ".writing")
    shutil.rmtree(beside, ignore_errors=True)
    where: dict[str, str] = {}
    total = 0
    with _whole_or_not(beside), Reader(save, manifest.parts) as reader:
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors = [(name, manifest.tensors[name].dtype, manifest.tensors[name].shape) for name in names]
            header, _ = header_of(tensors)
            values = (_raw(whole_tensor(reader, manifest, name)) for name in names)
            write_file(beside / file, _after(header, values))
            where |= dict.fromkeys(names, file)
            total += sum(_num_bytes(manifest.tensors[name]) for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        put_file(beside / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
        put_file(beside / "run.json", json.dumps(manifest.run, indent=2).encode())
        beside.rename(out)
        sync_directory(out.parent)
    return total


def reshard(save: Save, root: Path, ranks: int) -> Save:
    """Write a commit of the same state to `root`, its tensors cut along their first dim for so many ranks. Raises
    `Damaged`, and `InvalidSpec` where a commit of this step is there, or a run saves there."""
    manifest = save.look_over()
    new = save_of(root, save.step, save.generation)
    _require_new(new.path)
    # A run that saves there meanwhile would take it for a save that never ended.
    with locked(root, patience_s=0.0), _whole_or_not(new.path), Reader(save, manifest.parts) as reader:
        blocks = (_blocks_for(reader, manifest, rank, ranks) for rank in range(ranks))
        parts = tuple(_written(new, rank, manifest.tensors, each) for rank, each in enumerate(blocks))
        changed = manifest.changed(parts=parts, written_at_s=time.time())
        put_file(new.path / MANIFEST, text_of(changed))
        sync_directory(root)
    return new


@contextmanager
def _whole_or_not(path: Path) -> Iterator[None]:
    """Make a directory, and remove it where its filling fails."""
    path.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _blocks_for(reader: Reader, manifest: Manifest, rank: int, ranks: int) -> Iterator[Block]:
    packed = {name.partition("@")[0].removesuffix("_scale") for name in manifest.tensors if "@" in name}
    for number, (name, entry) in enumerate(sorted(manifest.tensors.items())):
        pieces = _pieces_of(manifest).get(name, ())
        if name in packed or "@" in name:
            # Moments of few bits belong to the scales of their own blocks, and are not cut anew.
            for place, piece in enumerate(pieces):
                if (number + place) % ranks == rank:
                    block = np.empty(piece.shape, NUMPY[entry.dtype])
                    reader.read(piece, 0, piece.length_bytes, _raw(block))
                    yield Block(name, piece.start, block)
            continue
        if not entry.shape or entry.shape[0] < ranks:
            if number % ranks == rank:
                yield Block(name, (0,) * len(entry.shape), whole_tensor(reader, manifest, name))
            continue
        chunk = -(-entry.shape[0] // ranks)
        low, high = min(entry.shape[0], rank * chunk), min(entry.shape[0], (rank + 1) * chunk)
        if low < high:
            values = whole_tensor(reader, manifest, name)[low:high]
            yield Block(name, (low, *(0,) * (len(entry.shape) - 1)), values)


def _written(new: Save, rank: int, tensors: Mapping[str, TensorEntry], blocks: Iterator[Block]) -> Part:
    held = list(blocks)
    entries, pieces = [], []
    for kind, is_kind in (("optimizer", True), ("weights", False)):
        own = [each for each in held if (":" in each.tensor) == is_kind]
        if not own:
            continue
        file = f"{kind}-{rank:05d}.safetensors"
        titled = [
            (
                block_title(each.tensor, each.start, each.values.shape, tensors[each.tensor].shape),
                tensors[each.tensor].dtype,
                each.values.shape,
            )
            for each in own
        ]
        header, offsets = header_of(titled)
        write_file(new.path / file, _after(header, (_raw(each.values) for each in own)))
        length = len(header) + sum(each.values.nbytes for each in own)
        entries.append(
            FileEntry(name=file, length_bytes=length, header_bytes=len(header), header_digest=digest_of(header))
        )
        for each, offset in zip(own, offsets, strict=True):
            raw = _raw(each.values)
            digests = tuple(digest_of(block) for block in blocks_of(raw))
            pieces.append(
                Piece(
                    tensor=each.tensor,
                    start=each.start,
                    shape=each.values.shape,
                    file=file,
                    offset_bytes=offset,
                    length_bytes=each.values.nbytes,
                    digests=digests,
                )
            )
    sync_directory(new.path)
    part = Part(
        generation=new.generation,
        rank=rank,
        files=tuple(entries),
        pieces=tuple(pieces),
        snapshot_s=0.0,
        write_s=0.0,
    )
    with Reader(new, [part]) as reader:
        reader.verify(part)
    return part


def _pieces_of(manifest: Manifest) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for part in manifest.parts:
        for piece in part.pieces:
            found.setdefault(piece.tensor, []).append(piece)
    return found


def _in_files(names: Sequence[str], tensors: Mapping[str, TensorEntry]) -> Iterator[list[str]]:
    """Names in their order, in files of about `FILE_BYTES`."""
    now: list[str] = []
    held = 0
    for name in names:
        num_bytes = _num_bytes(tensors[name])
        if now and held + num_bytes > FILE_BYTES:
            yield now
            now, held = [], 0
        now.append(name)
        held += num_bytes
    yield now


def _num_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * WIDTHS[entry.dtype]


def _raw(values: np.ndarray) -> memoryview:
    """Its bytes; of values that lie end to end, these themselves."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _after(header: bytes, values: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    yield header
    for each in values:
        yield from blocks_of(each)


def _require_new(path: Path) -> None:
    if path.exists():
        reject("--out", str(path), "is there already; name another, or remove it")
