"""What rounding did to a matrix: how many values saturated, how many became zero, and how large the largest
was."""

import math
from typing import NamedTuple

import torch

from trainwright.train.precision.formats import E2M1, unpacked
from trainwright.train.precision.quantized import Quantized


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
    """Of x, (..., rows, columns), and what it was quantized to."""
    form = quantized.format
    if form is E2M1:
        magnitude = unpacked(quantized.values)[..., : quantized.columns] & 7
        top = 7
    else:
        magnitude = quantized.values.view(torch.uint8) & 0x7F
        top = int(torch.tensor(form.largest).to(form.dtype).view(torch.uint8))
    half_way = 1 + form.half_step * 2.0 ** math.floor(math.log2(form.largest)) / form.largest
    at_top = magnitude == top
    beyond = x.abs() > quantized.dequantize(torch.float32).abs() * half_way
    return Counts(
        x.numel(),
        (at_top & beyond).sum(),
        ((magnitude == 0) & (x != 0)).sum(),
        x.abs().amax().float(),
    )
