"""Which rank writes which block, and where in its files: agreed once, as it depends on the layout alone.

PyTorch Distributed Checkpoint's planner chooses among ranks that hold the same block, the one with the least to
write first, and checks that blocks tile every tensor without gap or overlap. A rank has two files, both
safetensors: `weights-RANK` and `optimizer-RANK`. A block that is not the whole tensor is named
`NAME@START:STOP,...`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from trainwright.train.checkpoint.files import digest_of
from trainwright.train.checkpoint.headers import block_title, header_of
from trainwright.train.checkpoint.manifest import FileEntry, TensorEntry
from trainwright.train.checkpoint.state import Held

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
"""Of the state, by safetensors' names."""


@dataclass(frozen=True)
class Slot:
    """A block's place in a file of this rank."""

    key: tuple[str, tuple[int, ...]]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    """From the file's beginning."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """One file of this rank."""

    entry: FileEntry
    header: bytes
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class WritePlan:
    """What this rank writes, and on rank 0 every tensor of the state."""

    files: tuple[FilePlan, ...]
    tensors: dict[str, TensorEntry]


def planned(held: Iterable[Held], rank: int, world: int) -> WritePlan:
    """All ranks call it, each with its blocks."""
    mine = SavePlan([_item(each) for each in {each.key: each for each in held}.values()])
    everyone: list[Any] = [mine]
    if world > 1:
        everyone = [None] * world if rank == 0 else []
        dist.gather_object(mine, everyone or None)
    agreed: list[Any] = [None] * world
    tensors: dict[str, TensorEntry] = {}
    if rank == 0:
        agreed, tensors = _agreed(everyone)
    if world > 1:
        own: list[Any] = [None]
        dist.scatter_object_list(own, agreed if rank == 0 else None)
        agreed[rank] = own[0]
    return WritePlan(tuple(_files(agreed[rank].items, rank)), tensors)


def _agreed(everyone: list[SavePlan]) -> tuple[list[SavePlan], dict[str, TensorEntry]]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan(everyone)
    entries = {}
    for name, each in metadata.state_dict_metadata.items():
        entries[name] = TensorEntry(dtype=DTYPES[each.properties.dtype], shape=tuple(each.size))  # pyright: ignore
    return plans, entries


def _item(held: Held) -> WriteItem:
    values = held.values
    return WriteItem(
        MetadataIndex(held.name, torch.Size(held.start)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(held.start), values.shape),
            properties=TensorProperties(dtype=values.dtype),
            size=torch.Size(held.whole_shape),
        ),
    )


def _files(items: Iterable[WriteItem], rank: int) -> Iterable[FilePlan]:
    by_kind: dict[str, list[WriteItem]] = {}
    for item in items:
        by_kind.setdefault("optimizer" if ":" in item.index.fqn else "weights", []).append(item)
    for kind, of_kind in sorted(by_kind.items()):
        # The widest first, so that every tensor is aligned to its values.
        of_kind.sort(key=lambda item: -_data_of(item).properties.dtype.itemsize)
        yield _file(f"{kind}-{rank:05d}.safetensors", of_kind)


def _file(name_of_file: str, items: list[WriteItem]) -> FilePlan:
    blocks = []
    for item in items:
        data = _data_of(item)
        start, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        blocks.append((item.index.fqn, start, shape, tuple(data.size), data.properties.dtype))
    header, offsets = header_of(
        (block_title(name, start, shape, whole), DTYPES[dtype], shape)
        for name, start, shape, whole, dtype in blocks
    )
    slots = tuple(
        Slot((name, start), shape, dtype, offset)
        for (name, start, shape, _, dtype), offset in zip(blocks, offsets, strict=True)
    )
    length = len(header) + sum(slot.num_bytes for slot in slots)
    entry = FileEntry(
        name=name_of_file, length_bytes=length, header_bytes=len(header), header_digest=digest_of(header)
    )
    return FilePlan(entry, header, slots)


def _data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data
