"""A norm over a width that tp ranks share: of queries or keys over all heads (OLMo 2, arXiv:2501.00656 s3).

Each rank has some heads, and what all of them need is one number per token, the mean of squares: a sum over ranks,
and in backward another. Where a head stands on several ranks each of them gives its share.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trainwright.train.model.functions import precise
from trainwright.train.parallel.crossing import Crossing


@dataclass(frozen=True)
class OverRanks:
    """`width` values per token over the ranks of `crossing`'s group, each on `copies` of them."""

    crossing: Crossing
    width: int
    copies: int

    def normalized(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, is_centered: bool
    ) -> torch.Tensor:
        """RMSNorm of this rank's part `x` with its part of the weight; LayerNorm where the mean is taken off."""
        if is_centered:
            x = (precise(x) - _Mean.apply(precise(x), self)).to(x.dtype)
        return _RmsNormOverRanks.apply(x, weight, epsilon, self)  # pyright: ignore[reportReturnType]

    def mean(self, part: torch.Tensor) -> torch.Tensor:
        """Of the whole width, from this rank's sums (..., 1)."""
        return self.crossing.summed(part).div_(self.copies * self.width)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: OverRanks) -> torch.Tensor:
        ctx.over, ctx.width = over, x.shape[-1]
        return over.mean(x.sum(-1, keepdim=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        mean = ctx.over.mean(gradients[0].contiguous())
        return mean.expand(*mean.shape[:-1], ctx.width), None


class _RmsNormOverRanks(torch.autograd.Function):
    """As `functions._RmsNorm`, with both of its means over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, over: OverRanks) -> torch.Tensor:
        wide = precise(x)
        scale = torch.rsqrt(over.mean(torch.linalg.vecdot(wide, wide).unsqueeze(-1)) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.over = over
        return (wide * scale).mul_(precise(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        upstream = precise(gradients[0])
        normal = precise(x) * scale
        d_weight = (upstream * normal).flatten(0, -2).sum(0)
        d_normal = upstream * precise(weight)
        mean = ctx.over.mean(torch.linalg.vecdot(d_normal, normal).unsqueeze(-1))
        d_x = d_normal.addcmul_(normal, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None, None
