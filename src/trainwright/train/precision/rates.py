"""What rounding did to a matrix: how many values saturated, how many became zero, and the largest magnitude."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from trainwright.train.precision.blocks import pieces, scaled
from trainwright.train.precision.formats import E2M1
from trainwright.train.precision.quantized import TENSOR, Quantized, block_amax


class Counts(NamedTuple):
    """As tensors of one value each, so that reading them can wait; they add up over matrices and ranks."""

    values: int
    overflow: torch.Tensor
    """int64: values that saturated: without a largest one they would have rounded beyond it."""
    underflow: torch.Tensor
    """int64: values that weren't zero, and became it."""
    amax: torch.Tensor
    """fp32."""


def counts(x: torch.Tensor, quantized: Quantized) -> Counts:
    """Of x, (..., rows, columns), and what it was quantized to. Where the Hadamard transform came before, x is its
    result."""
    form = quantized.format
    # Halfway to what would come after the largest value.
    beyond = form.largest + form.half_step * 2.0 ** math.floor(math.log2(form.largest))
    scale = quantized.scale.float()
    if quantized.tensor_scale is not None:
        scale = scale * quantized.tensor_scale
    encoding, size = (1 / scale).masked_fill_(scale == 0, 0), quantized.scaling.size
    codes = quantized.values.view(torch.uint8)
    magnitudes = (0x07, 0x70) if form is E2M1 else (0x7F,)
    return Counts(
        values=x.numel(),
        overflow=_sum(scaled(p.values, p.cut(encoding), size).abs_() > beyond for p in pieces(x.detach(), size)),
        underflow=torch.count_nonzero(x) - _sum(codes & bits for bits in magnitudes),
        amax=block_amax(x, TENSOR).amax(),
    )


def _sum(kinds: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.count_nonzero(each) for each in kinds]).sum()
