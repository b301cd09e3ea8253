"""The two ways across the edge of a tensor-parallel block: in, and out again.

    sequence parallel    in: all-gather of the positions; out: reduce-scatter of the partial sums
    not                  in: nothing; out: all-reduce of the partial sums

and in backward the mirror image of each (arXiv:1909.08053 s3, arXiv:2205.05198 s4.2).

With `overlap.tp` both go round in parts, beside the matmuls that they stand around
(`parallel/collective_matmul.py`).

The block's projections read the gathered input, and their weight gradients need it again. Kept, it would be the
one thing in a layer that tensor parallelism does not make smaller. So what autograd saves is this rank's part, and
backward gathers it once more, once for all projections of the block (ibid., s4.2.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather, reduce_scatter
from trainwright.train.model.linear import Linear

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reader:
    """The forward of a linear layer, of whose weight and bias a rank has what `here` gives; such as of those that
    read a block's input."""

    linear: Linear
    here: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]

    def __call__(self, x: "torch.Tensor | Outside") -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return self.linear.product(x, *self.here())
        return x.product(self)


class Outside(Protocol):
    """A block's input that comes in with the products of those who read it."""

    def product(self, reader: Reader) -> torch.Tensor:
        """The reader's, of all positions."""
        ...


@dataclass(frozen=True)
class Crossing:
    """The edge of the blocks of one tp group. `gather_again` saves parts instead of gathered inputs; in a block
    that is recomputed whole nothing is saved anyway, and it is off."""

    group: dist.ProcessGroup
    clock: Clock
    sequence_parallel: bool
    gather_again: bool = True

    def enter(self, part_BSD: torch.Tensor) -> torch.Tensor:
        """The block's input: all positions, on every rank."""
        function = _Gather if self.sequence_parallel else _Copy
        return function.apply(part_BSD, self)  # pyright: ignore[reportReturnType]

    def leave(self, summand_BSD: torch.Tensor) -> torch.Tensor:
        """The block's output: partial sums of all ranks, added up; of this rank's positions or of all."""
        function = _ScatterSum if self.sequence_parallel else _Sum
        return function.apply(summand_BSD, self)  # pyright: ignore[reportReturnType]

    def multiplied_out(self, linear: Linear, x_BSI: torch.Tensor, weight_DI: torch.Tensor) -> torch.Tensor:
        """The product with this rank's rows of a weight, and out."""
        return self.leave(linear.product(x_BSI, weight_DI, None))

    def around(
        self, readers: Sequence[Reader], block: Callable[..., Result], part_BSD: torch.Tensor, *others: Any
    ) -> Result:
        """`block` on the gathered input, which its `readers` alone read, and of which autograd keeps no more than
        the part."""
        whole_BSD = self.enter(part_BSD)
        if not (self.sequence_parallel and self.gather_again and torch.is_grad_enabled()):
            return block(whole_BSD, *others)
        kept = _KeptPart(self, part_BSD.detach(), whole_BSD)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            return block(whole_BSD, *others)

    def gathered(self, part_BSD: torch.Tensor) -> torch.Tensor:
        ranks, (size, positions, *rest) = self.group.size(), part_BSD.shape
        parts = part_BSD.new_empty((ranks * size, positions, *rest))
        with self.clock.of("tp"):
            all_gather(parts, part_BSD.contiguous(), group=self.group)
        return parts.unflatten(0, (ranks, size)).transpose(0, 1).reshape(size, ranks * positions, *rest)

    def scattered_sum(self, summand_BSD: torch.Tensor) -> torch.Tensor:
        ranks, (size, positions, *rest) = self.group.size(), summand_BSD.shape
        parts = summand_BSD.unflatten(1, (ranks, positions // ranks)).transpose(0, 1).flatten(0, 1).contiguous()
        total = summand_BSD.new_empty((size, positions // ranks, *rest))
        with self.clock.of("tp"):
            reduce_scatter(total, parts, group=self.group)
        return total

    def summed(self, summand_BSD: torch.Tensor) -> torch.Tensor:
        total = summand_BSD.clone()
        with self.clock.of("tp"):
            dist.all_reduce(total, group=self.group)
        return total


class View(NamedTuple):
    """Where a tensor lies in a contiguous one."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _KeptPart:
    """Stands in for the gathered input among what autograd saves in one call of a block."""

    def __init__(self, crossing: Crossing, part_BSD: torch.Tensor, whole_BSD: torch.Tensor) -> None:
        self._crossing, self._part_BSD = crossing, part_BSD
        self._storage = whole_BSD.untyped_storage()._cdata
        self._saved = self._taken = 0
        self._whole_BSD: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | View:
        """Saved by an operation: kept as it is, or only where it lies in the gathered input, of which it is all or
        a view (a compiled block saves what its matmuls read)."""
        if tensor.untyped_storage()._cdata != self._storage:
            return tensor
        self._saved += 1
        return View(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: torch.Tensor | View) -> torch.Tensor:
        """Wanted by a backward: the input, gathered at the first wish and dropped at the last."""
        if isinstance(saved, torch.Tensor):
            return saved
        if self._whole_BSD is None:
            self._whole_BSD = self._crossing.gathered(self._part_BSD)
        whole = self._whole_BSD.as_strided(*saved)
        self._taken += 1
        if self._taken == self._saved:
            self._whole_BSD = None
        return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BSD: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        return crossing.gathered(part_BSD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.crossing.scattered_sum(gradients[0]), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand_BSD: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        return crossing.scattered_sum(summand_BSD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.crossing.gathered(gradients[0]), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_BSD: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        return whole_BSD.view_as(whole_BSD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.crossing.summed(gradients[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand_BSD: torch.Tensor, crossing: Crossing) -> torch.Tensor:
        return crossing.summed(summand_BSD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
