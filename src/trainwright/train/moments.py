"""Formats that an optimizer keeps its moments in; it computes with them in the parameters' precision.

bf16    rounded to nearest (DeepSeek-V3 keeps both moments so, arXiv:2412.19437 s3.3.3). A second moment that
        falls by less than half of bf16's spacing stays where it is: `door.MOST_BETA2_OF_BF16`
int8    a byte per value, an index into 256 values between -1 and 1 (0 and 1 for what is never negative) whose
        spacing grows with the value, times the largest of its block of 256 (dynamic block-wise quantization,
        arXiv:2110.02861 s1.3 and s2.1). Rounded to nearest, but a second moment above zero never to zero, for
        it divides. Blocks are of a rank's own part of a tensor, so their bounds depend on the layout.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from trainwright.spec.recipe import INT8_BLOCK

DECADES = 7
"""Powers of ten that the values of the code span (ibid. s1.3)."""

Kept = tuple[torch.Tensor, ...]


class MomentFormat(NamedTuple):
    """From a moment, (values,), and whether it has a sign, to what is kept of it; and back, as a tensor of a
    precision."""

    pack: Callable[[torch.Tensor, bool], Kept]
    unpack: Callable[[Kept, torch.dtype, bool], torch.Tensor]


def code(is_signed: bool) -> torch.Tensor:
    """The 256 values (256,), fp32. No tensor is cached: one of a run without numbers would stay."""
    return torch.tensor(_values(is_signed), dtype=torch.float32)


@functools.cache
def _values(is_signed: bool) -> tuple[float, ...]:
    """In order: in each decade from 10^-7 on twice as many as in the one below, at the middles of equal intervals
    of its upper nine tenths; and 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        intervals = 2 ** (decade if is_signed else decade + 1)
        edges = np.linspace(0.1, 1.0, intervals + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
        values += middles + ([-each for each in middles] if is_signed else [])
    return tuple(sorted(values))


def _to_int8(moment: torch.Tensor, is_signed: bool) -> Kept:
    values = code(is_signed).to(moment.device)
    padded = F.pad(moment.float(), (0, -moment.numel() % INT8_BLOCK)).view(
        -(-moment.numel() // INT8_BLOCK), INT8_BLOCK
    )
    scale = padded.abs().amax(1)
    share = padded / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    index = torch.bucketize(share, (values[:-1] + values[1:]) / 2)
    if not is_signed:
        index.masked_fill_((index == 0) & (share > 0), 1)
    return index.to(torch.uint8).view(-1)[: moment.numel()].clone(), scale


def _from_int8(kept: Kept, dtype: torch.dtype, is_signed: bool) -> torch.Tensor:
    index, scale = kept
    values = code(is_signed).to(index.device)[index.long()]
    return (values * scale.repeat_interleave(INT8_BLOCK)[: index.numel()]).to(dtype)


MOMENT_FORMATS: dict[str, MomentFormat] = {
    "fp32": MomentFormat(lambda moment, _: (moment,), lambda kept, dtype, _: kept[0].to(dtype)),
    "bf16": MomentFormat(lambda moment, _: (moment.bfloat16(),), lambda kept, dtype, _: kept[0].to(dtype)),
    "int8": MomentFormat(_to_int8, _from_int8),
}
"""By `Optimizer.moments`; fp32 is the parameters' precision, which float64 runs have too."""
