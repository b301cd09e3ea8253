"""Weights that sharded data parallelism gathers as the products read them: a code a value, in the place of bf16.

Once a step the ranks agree on what scales are made of, the largest magnitude of each block of each weight, by one
all-reduce over those that share the weights out: a grid of blocks is 4 bytes for 128 x 128 values, or for a whole
tensor. Then each rank rounds its shard by the scales of the whole, wherever it cuts blocks, and has the codes that
rounding the whole weight would give it. Codes alone are gathered, and every rank has the scales already.

It is for weights whose codes serve both products (`Operand.serves`): one format, and blocks that are squares or
the whole tensor. `parallel/gathered_codes.py` is the way through FSDP2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.train.clock import Clock
from trainwright.train.precision.arithmetic import Arithmetic
from trainwright.train.precision.quantized import Quantized, Scaling, block_amax
from trainwright.train.precision.scales import RULES
from trainwright.train.precision.shared import HeldWeight


@dataclass(frozen=True)
class Shard:
    """This rank's part of a weight, and where it lies: `values` are the master's, line `start` of `dim` and
    on."""

    values: torch.Tensor
    shape: torch.Size
    """Of the whole weight, (..., O, I), as this rank would gather it."""
    dim: int
    start: int
    padded: torch.Size
    """Of the largest rank's part: all gather as many codes."""
    compute: torch.dtype
    """That the weight would be gathered in."""


class GatheredWeight:
    """Of one layer. `place` is called before the first step, `codes` before each gather, `arrived` after it."""

    def __init__(self, arithmetic: Arithmetic, held: HeldWeight, agreement: "Agreement") -> None:
        self._arithmetic, self._held, self._agreement = arithmetic, held, agreement
        self._operand = arithmetic.weight_operand
        self._shard: Shard | None = None
        self.amax = self.scale = torch.empty(0)
        """By block, fp32, as ranks have agreed; and what codes are multiplied by."""

    def place(self, shard: Shard) -> None:
        """Its shard lies there from now on."""
        self._shard = shard
        self._agreement.weights.append(self)

    @property
    def shard(self) -> Shard:
        assert self._shard is not None
        return self._shard

    def own_amax(self) -> torch.Tensor:
        """(..., row blocks, column blocks) of the whole weight: of each the largest magnitude in this rank's part
        of it, 0 where it has none; infinity for what is no number, which no maximum would keep."""
        blocks = self._blocks()
        amax = self.shard.values.new_zeros(blocks, dtype=torch.float32)
        if self.shard.values.numel():
            lines = block_amax(self._prepared(), self._by_line()).nan_to_num_(nan=torch.inf, posinf=torch.inf)
            amax.index_reduce_(self.shard.dim, self._block_of_line(), lines, "amax")
        return amax

    def agreed(self, amax: torch.Tensor) -> None:
        """The ranks' largest magnitudes of each block, in the order of `own_amax`."""
        self.amax = self._arithmetic.largest.instead("weight", amax.view(self._blocks()))
        self.scale = RULES[self._operand.scaling.rule](self.amax, self._operand.format, None).kept

    def codes(self) -> torch.Tensor:
        """Of this rank's shard, bytes in the shape of the largest rank's."""
        self._agreement.reach()
        shard = self.shard
        if not shard.values.numel():
            return shard.values.new_zeros(shard.padded, dtype=torch.uint8)
        amax = self.amax.index_select(shard.dim, self._block_of_line())
        operand = replace(self._operand, scaling=self._by_line())
        x = self._prepared()
        rounded = self._arithmetic.rounded(operand, x, amax, "along")
        self._arithmetic.health.saw(self._arithmetic.name, "weight", x, rounded)
        fill = [0, 0] * (x.ndim - 1) + [0, shard.padded[0] - x.shape[0]]
        return F.pad(rounded.values.view(torch.uint8), fill)

    def arrived(self, codes: torch.Tensor) -> None:
        """Codes of all ranks' shards, one after another with what fills them up."""
        shape, operand = self.shard.shape, self._operand
        values = codes.view(-1)[: shape.numel()].view(operand.format.dtype).view(shape)
        self._held.gathered = Quantized(values, self.scale, operand.format, operand.scaling, shape[-1])

    def _prepared(self) -> torch.Tensor:
        return self._arithmetic.prepared(self._operand, self.shard.values.to(self.shard.compute))

    def _blocks(self) -> tuple[int, ...]:
        *stack, rows, columns = self.shard.shape
        size = self._operand.scaling.size
        return *stack, *(-(-all_ // of) if of else 1 for all_, of in zip((rows, columns), size, strict=True))

    def _block_size(self) -> int | None:
        """Lines of a block along what is cut; None: all of them."""
        from_end = self.shard.dim - len(self.shard.shape)
        return self._operand.scaling.size[from_end] if from_end >= -2 else 1

    def _by_line(self) -> Scaling:
        """The blocks, each line of what is cut by itself: so a shard has whole ones."""
        scaling, from_end = self._operand.scaling, self.shard.dim - len(self.shard.shape)
        if from_end < -2 or not self._block_size():
            return scaling
        return replace(scaling, rows=1) if from_end == -2 else replace(scaling, columns=1)

    def _block_of_line(self) -> torch.Tensor:
        """Of each line of the shard the block of the whole weight that it is in."""
        size, values = self._block_size(), self.shard.values
        if not size:
            return torch.zeros(1, dtype=torch.int64, device=values.device)
        return torch.arange(values.shape[self.shard.dim], device=values.device).add_(self.shard.start) // size


class Agreement:
    """On the largest magnitudes of weights that are shared out among the same ranks; once a step, all together."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], clock: Clock) -> None:
        self._groups, self._clock = groups, clock
        self.weights: list[GatheredWeight] = []
        self._is_reached = False

    def reach(self) -> None:
        """Ask the other ranks, unless that was done since the weights have changed."""
        if self._is_reached:
            return
        own = [weight.own_amax() for weight in self.weights]
        amax = torch.cat([each.flatten() for each in own])
        for group in self._groups:
            with self._clock.of("dp"):
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        for weight, part in zip(self.weights, amax.split([each.numel() for each in own]), strict=True):
            weight.agreed(part)
        self._is_reached = True

    def forget(self) -> None:
        """The weights have changed."""
        self._is_reached = False
