"""Number formats of 8 and 4 bits, rounded to and read back exactly.

E4M3, E5M2    arXiv:2209.05433; torch has them as dtypes, and they lie in memory as such
E2M1          OCP Microscaling Formats 1.0 s5.3.3; two codes a byte, the even one in the low four bits, as in
              torch.float4_e2m1fn_x2, for which torch has no arithmetic
E8M0          scales alone (`scales.py`)

Rounding is to nearest, ties to even, and saturates: what is beyond the largest value, infinity too, becomes it,
as in NVIDIA's cvt.satfinite. NaN stays NaN in 8 bits; E2M1 has none, and it becomes 0 there (`quantize` gives
its block the scale NaN). Values below the least normal one are multiples of the least.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from trainwright.train.precision.noise import Noise


@dataclass(frozen=True)
class NumberFormat:
    """Sign, exponent, mantissa."""

    name: str
    largest: float
    mantissa_bits: int
    least_exponent: int
    """Of normal values."""
    dtype: torch.dtype
    """That its codes lie in memory as."""
    per_byte: int = 1
    has_infinity: bool = False

    @property
    def least(self) -> float:
        """The least value above zero, and the spacing below the least normal one."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits)

    @property
    def half_step(self) -> float:
        """Largest relative error of rounding a normal value to nearest."""
        return 2.0 ** -(self.mantissa_bits + 1)


E4M3 = NumberFormat("e4m3", 448.0, 3, -6, torch.float8_e4m3fn)
E5M2 = NumberFormat("e5m2", 57344.0, 2, -14, torch.float8_e5m2, has_infinity=True)
E2M1 = NumberFormat("e2m1", 6.0, 1, 0, torch.uint8, per_byte=2)


def cast(x: torch.Tensor, to: NumberFormat, noise: Noise | None = None) -> torch.Tensor:
    """The codes of x, (..., columns), rounded to nearest; E2M1's are packed, (..., ceil(columns / 2)), and with
    noise rounded to one of the two neighbours, so that the expected value is x."""
    if to is E2M1:
        return packed(codes_of(x, noise))
    return x.clamp(-to.largest, to.largest).to(to.dtype)


def decoded(values: torch.Tensor, of: NumberFormat) -> torch.Tensor:
    """Codes as bf16, which has every value of every format here: (..., columns), or twice as many as E2M1's
    bytes."""
    if not values.is_contiguous():
        if of is not E2M1 and values.mT.is_contiguous():
            return decoded(values.mT, of).mT
        values = values.contiguous()
    if of is E2M1:
        pairs = values.view(torch.uint8)
    elif values.is_cuda or values.numel() % 2:
        return values.to(torch.bfloat16)
    else:
        pairs = values.view(-1).view(torch.uint16)
    # Two values at a time through a table: six times as fast on a CPU as torch's own cast of E4M3.
    table = torch.from_numpy(_pairs(of)).to(values.device)
    shape = (*values.shape[:-1], values.shape[-1] * of.per_byte)
    return table.index_select(0, pairs.reshape(-1).int()).view(torch.bfloat16).view(shape)


def codes_of(x: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
    """E2M1 codes of x, one an int16, (..., columns).

    The code of a magnitude a is the least of 2a, a + 2 and a / 2 + 4: lines that cross where the spacing doubles.
    Each is rounded by itself, to even where the code is even; with noise u in [0, 1) to the whole number below
    a + u, and so on, which is the one above as often as a is near it.
    """
    wide = x.float()
    sign = (wide.view(torch.int32) >> 28).to(torch.int16).bitwise_and_(8)
    low = wide.abs().clamp_(max=E2M1.largest)
    middle, high = low.clone(), low * 0.5
    low.mul_(2)
    above = None if noise is None else noise.uniform(x)
    for line, offset in ((low, 0), (middle, 2), (high, 4)):
        if above is None:
            line.round_()
        else:
            line.add_(above).floor_()
        line.add_(offset)
    code = torch.minimum(low, middle, out=low)
    code = torch.minimum(code, high, out=code).to(torch.int16).bitwise_and_(7)
    return code.bitwise_or_(sign)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, (..., ceil(columns / 2)) uint8, the even one in the low four bits."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def unpacked(values: torch.Tensor) -> torch.Tensor:
    """One code an int16, (..., 2 * bytes)."""
    wide = values.to(torch.int16)
    return torch.stack((wide & 15, wide >> 4), -1).flatten(-2)


def value_of_codes(of: NumberFormat) -> np.ndarray:
    """The value of each code, fp32: what the format means, from its bits."""
    code = np.arange(2 ** (8 // of.per_byte))
    magnitude, is_negative = code % (len(code) // 2), code >= len(code) // 2
    field, mantissa = magnitude >> of.mantissa_bits, magnitude % 2**of.mantissa_bits
    whole = np.where(field > 0, mantissa + 2**of.mantissa_bits, mantissa)
    value = np.ldexp(whole.astype(np.float32), np.maximum(field, 1) - 1 + of.least_exponent - of.mantissa_bits)
    beyond = value > of.largest
    value[beyond & (mantissa > 0 if of.has_infinity else True)] = np.nan
    value[beyond & (mantissa == 0 if of.has_infinity else False)] = np.inf
    return np.where(is_negative, -value, value)


@functools.cache
def _pairs(of: NumberFormat) -> np.ndarray:
    """Two bf16 values in an int32, by the byte or the two bytes that hold their codes."""
    one = value_of_codes(of).view(np.uint32) >> 16  # bf16 is the upper half of fp32
    return (one[None, :] | one[:, None] << 16).view(np.int32).reshape(-1)
