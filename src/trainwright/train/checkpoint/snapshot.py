"""A copy of this rank's blocks in memory, in the very bytes of its files: all that a step waits for.

Buffers are made once and used again, so that memory doesn't grow; on a GPU they are pinned, and blocks are copied
beside one another.
"""

from collections.abc import Iterable

import torch

from trainwright.train.checkpoint.state import Held
from trainwright.train.checkpoint.writers import FilePlan


class Snapshot:
    """Buffers for the files of a plan."""

    def __init__(self, files: Iterable[FilePlan], device: torch.device) -> None:
        self._device = device
        self.buffers: dict[str, torch.Tensor] = {}
        self._places: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        for file in files:
            buffer = torch.zeros(file.entry.length_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            buffer[: file.entry.header_bytes] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
            self.buffers[file.entry.name] = buffer
            for slot in file.slots:
                part = buffer[slot.offset_bytes : slot.offset_bytes + slot.num_bytes]
                self._places[slot.key] = part.view(slot.dtype).view(slot.shape)

    @torch.no_grad()
    def take(self, held: Iterable[Held]) -> None:
        """Copy the blocks that are this rank's to write."""
        left = dict(self._places)
        for each in held:
            place = left.pop(each.key, None)
            if place is not None:
                place.copy_(each.values, non_blocking=True)
        assert not left, f"no values for {sorted(left)[:3]}"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def bytes_of(self, file: str) -> memoryview:
        return self.buffers[file].numpy().data
