"""From the largest magnitude of a block to its scale. A scale decodes: value = code * scale.

rule          scale                                                     kept as
fp32          1 / (largest / amax), both rounded                        fp32
power_of_two  the least power of two with amax / scale <= largest       fp32
e8m0          the same                                                  E8M0, 2^-127 to 2^127
e8m0_floor    2^(floor(log2 amax) - floor(log2 largest))                E8M0
e4m3          amax / largest over the tensor's own scale, rounded       E4M3, with an fp32 scale of the tensor

fp32 and power_of_two are Transformer Engine's (common/recipe/recipe_common.cuh): Float8CurrentScaling and
DelayedScaling divide, Float8BlockScaling clears the mantissa of largest / amax. e8m0 rounds up, so that nothing
saturates, as Transformer Engine does (common/util/ptx.cuh: float_to_e8m0) and arXiv:2506.08027 s3.2 found to be
needed: with the rule of OCP MX 1.0 s6.3, e8m0_floor, what lies between 448 and 512 times a power of two saturates,
and pre-training got worse. e4m3 is NVFP4's (arXiv:2509.25149 appendix B): the tensor's scale is its amax over
largest * 448, so that the largest block's scale is 448.

A block of zeros has the scale 1, in E8M0 the least, in E4M3 0. A block with a value that isn't finite has the
scale NaN, and thus NaN for all its values: the loss shows it. (Transformer Engine's scale is 1 there; infinity
would become 448 and be lost.)
"""

import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from trainwright.train.precision.formats import E4M3, NumberFormat

Rule = Literal["fp32", "power_of_two", "e8m0", "e8m0_floor", "e4m3"]

LEAST, MOST = -127, 127
"""Exponents of E8M0 (OCP MX 1.0 s5.4.1); its code is the exponent plus 127, and 255 is NaN."""


class Scales(NamedTuple):
    """Of a matrix' blocks, each tensor (..., row blocks, column blocks)."""

    kept: torch.Tensor
    """What decodes, in the format that it is kept in."""
    encoding: torch.Tensor
    """What values are multiplied by; fp32."""
    of_tensor: torch.Tensor | None = None
    """(..., 1, 1) fp32, where `kept` is over a scale of the whole tensor."""


def exponent(amax: torch.Tensor, largest: float, round_up: bool = True) -> torch.Tensor:
    """Of the power of two that amax, fp32, is to be divided by to fit; int32. Rounded up it is ceil(log2(amax /
    largest)), exactly: the bits of positive floats are in the order of their logarithms, and linear between
    powers of two."""
    bits, top = amax.view(torch.int32), int.from_bytes(struct.pack(">f", largest), "big")
    return -((top - bits) >> 23) if round_up else (bits >> 23) - (top >> 23)


def _fp32(amax: torch.Tensor, to: NumberFormat, _: torch.Tensor | None) -> Scales:
    encoding = _quotient(to.largest, amax)
    return Scales(1 / encoding, encoding)


def _power_of_two(amax: torch.Tensor, to: NumberFormat, _: torch.Tensor | None) -> Scales:
    power = exponent(amax, to.largest).clamp_(LEAST + 1, MOST).masked_fill_(amax == 0, 0)
    return Scales(_power(power, amax), _power(-power, amax))


def _e8m0(amax: torch.Tensor, to: NumberFormat, _: torch.Tensor | None, round_up: bool = True) -> Scales:
    power = exponent(amax, to.largest, round_up).clamp_(LEAST, MOST)
    code = (power - LEAST).masked_fill_(~amax.isfinite(), 255).to(torch.uint8)
    return Scales(code.view(torch.float8_e8m0fnu), _power(-power, amax))


def _e8m0_floor(amax: torch.Tensor, to: NumberFormat, _: torch.Tensor | None) -> Scales:
    return _e8m0(amax, to, None, round_up=False)


def _e4m3(amax: torch.Tensor, to: NumberFormat, of_tensor: torch.Tensor | None) -> Scales:
    if of_tensor is None:
        of_tensor = amax.amax((-2, -1), keepdim=True)
    whole = _quotient(to.largest * E4M3.largest, of_tensor)
    kept = (amax * (whole * (1 / to.largest))).clamp_(max=E4M3.largest).to(E4M3.dtype)
    encoding = (1 / (kept.float() / whole)).clamp_(max=torch.finfo(torch.float32).max)
    return Scales(kept, encoding.masked_fill_(kept.float() == 0, 0), 1 / whole)


RULES: dict[Rule, Callable[[torch.Tensor, NumberFormat, torch.Tensor | None], Scales]] = {
    "fp32": _fp32,
    "power_of_two": _power_of_two,
    "e8m0": _e8m0,
    "e8m0_floor": _e8m0_floor,
    "e4m3": _e4m3,
}
"""From the blocks' amaxes, fp32, the format, and for e4m3 the tensor's amax if it isn't the largest of theirs."""


def _quotient(largest: float, amax: torch.Tensor) -> torch.Tensor:
    """largest / amax, rounded once; at most fp32's largest value, 1 where amax is 0, NaN where it isn't finite."""
    quotient = torch.full_like(amax, largest).div_(amax).clamp_(max=torch.finfo(torch.float32).max)
    return quotient.masked_fill_(amax == 0, 1).masked_fill_(~amax.isfinite(), torch.nan)


def _power(power: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """2^power as fp32, from -127 on; NaN where amax isn't finite."""
    # 2^-127 is below fp32's normal numbers: its bits are half of the mantissa's range.
    bits = ((power + 127) << 23).masked_fill_(power == -127, 1 << 22)
    return bits.view(torch.float32).masked_fill_(~amax.isfinite(), torch.nan)
