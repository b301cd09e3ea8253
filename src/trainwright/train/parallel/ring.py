"""A ring of ranks, each of which passes on to the next what came from the one before, while it uses it.

    parts     every rank's part comes by: n - 1 sends of a part each, as many bytes as an all-gather
    summed    sums of what all ranks have of each part come home: n - 1 sends, as many as a reduce-scatter

The order is that of collective matmuls (Wang et al., ASPLOS 2023, s5.1): a rank begins with its own part, and ends
with its own sum, so that neither has to travel further than to the rank before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainwright.train.clock import Clock


@dataclass(frozen=True)
class Ring:
    """The ranks of a group in their order; what a rank waits is charged to `cause`."""

    group: dist.ProcessGroup
    clock: Clock
    cause: str

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def parts(self, own: torch.Tensor, into: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Places and parts of all ranks, this rank's first; the next is on its way while one is used. `into`,
        (ranks, *part), keeps them; without it two are here at a time."""
        part = own.contiguous()
        if into is not None:
            part = into[self.rank].copy_(part)
        for step in range(self.size):
            place = (self.rank - step) % self.size
            coming = None
            if step + 1 < self.size:
                coming = Passing(self, part, 0, None if into is None else into[place - 1])
            yield place, part
            if coming is not None:
                part = coming.arrived()

    def summed(self, summand: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The sum over ranks of `summand(place)` for this rank's place. Each is asked for once, while a sum of
        others is on its way here, and is written over."""
        coming: Passing | None = None
        for step in range(self.size):
            total = summand((self.rank - 1 - step) % self.size)
            if coming is not None:
                total += coming.arrived()
                coming = None
            if step + 1 == self.size:
                return total
            coming = Passing(self, total, 1)
        raise AssertionError("a ring has ranks")


class Passing:
    """A tensor on its way to the next rank, and one like it on its way here. Tags tell apart what travels at one
    time."""

    def __init__(self, ring: Ring, leaving: torch.Tensor, tag: int, arriving: torch.Tensor | None = None) -> None:
        self._ring, self._leaving = ring, leaving
        self._arriving = torch.empty_like(leaving) if arriving is None else arriving
        group, ranks = ring.group, dist.get_process_group_ranks(ring.group)
        there, here = ranks[(ring.rank + 1) % ring.size], ranks[(ring.rank - 1) % ring.size]
        with ring.clock.of(ring.cause):
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._leaving, there, group, tag),
                    dist.P2POp(dist.irecv, self._arriving, here, group, tag),
                ]
            )

    def arrived(self) -> torch.Tensor:
        with self._ring.clock.of(self._ring.cause):
            for work in self._works:
                work.wait()
        return self._arriving
