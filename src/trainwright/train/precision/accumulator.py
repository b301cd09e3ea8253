"""Sums as Hopper's tensor cores make them of fp8, with fewer bits than fp32.

An instruction multiplies 32 pairs of codes and adds the products to a running sum. It finds the largest
exponent among the products (the sum of their factors' exponents, so that a product's significand is below 4)
and the running sum, cuts each of these 33 numbers off, toward zero, at 13 bits below that exponent, adds them
exactly, and cuts the result off to 13 bits of mantissa. So the 14 bits of arXiv:2412.19437 s3.3.2 and s3.5.2
are the leading one and 13 behind it. That the device does this to the bit was found by MMA-Sim
(arXiv:2511.10909; github.com/microsoft/MMA-Sim: WGMMA, F=13 and RZ-E8M13), and agrees with "FP22" in issue 50
of deepseek-ai/DeepGEMM.

DeepSeek-V3 takes the running sum out after every N_C = 128 values, multiplies it by the scales of its tiles and
adds it up in fp32 (ibid. s3.3.2): `promoted_every`. docs/log.md has what that is worth.
"""

import torch
import torch.nn.functional as F

from trainwright.train.precision.formats import E2M1, NumberFormat, decoded
from trainwright.train.precision.quantized import Quantized

GROUP = 32
"""Products of one instruction: wgmma's k for 8-bit operands (PTX ISA, wgmma.mma_async)."""
FRACTION_BITS = 13
CHUNK_VALUES = 2**18
"""Products at a time, so that they stay in a core's cache."""


def limited_product(a: Quantized, b: Quantized, promoted_every: int | None = None) -> torch.Tensor:
    """`product` with such sums: two matrices in fp8, (rows, summed) and (columns, summed), to (rows, columns)
    fp32.

    promoted_every: columns after which the running sum is added to one in fp32; None: never. A multiple of 32, and
    as many as a block of scales has where there are blocks.
    """
    widths = {x.scaling.columns for x in (a, b)}
    if E2M1 in (a.format, b.format):
        raise ValueError("these sums are Hopper's, which has no E2M1")
    if promoted_every is not None and (promoted_every < GROUP or promoted_every % GROUP):
        raise ValueError(f"promoted_every={promoted_every} must be a multiple of {GROUP}")
    if widths not in ({None}, {promoted_every}):
        raise ValueError(f"promoted_every={promoted_every} must be the columns of a block of scales, of {widths}")
    left, right = (_by_group(decoded(x.values, x.format)) for x in (a, b))
    scales = _of_rows(a), _of_rows(b)
    result = torch.zeros(a.shape[0], b.shape[0])
    height = max(1, CHUNK_VALUES // (GROUP * max(1, b.shape[0])))
    for first in range(0, a.shape[0], height):
        rows = slice(first, first + height)
        result[rows] = _sums(
            (left[:, :, rows], right), (a.format, b.format), (scales[0][rows], scales[1]), promoted_every
        )
    return result


def _by_group(codes: torch.Tensor) -> torch.Tensor:
    """(rows, summed) as (groups, 32, rows) fp32, with zeros in the last group."""
    return F.pad(codes.float(), (0, -codes.shape[1] % GROUP)).T.contiguous().unflatten(0, (-1, GROUP))


def _of_rows(x: Quantized) -> torch.Tensor:
    """Scales, (rows, blocks of columns) fp32."""
    scale = x.scale.float()
    height = x.scaling.rows or x.shape[0]
    return scale.repeat_interleave(height, 0)[: x.shape[0]]


def _sums(
    operands_GKR: tuple[torch.Tensor, torch.Tensor],
    formats: tuple[NumberFormat, NumberFormat],
    scales_RT: tuple[torch.Tensor, torch.Tensor],
    promoted_every: int | None,
) -> torch.Tensor:
    """(rows, columns), of codes by group, place in the group, and row; and scales by row and block."""
    groups = len(operands_GKR[0])
    each = promoted_every // GROUP if promoted_every else groups
    running = torch.zeros(operands_GKR[0].shape[2], operands_GKR[1].shape[2])
    total = torch.zeros_like(running)
    for group in range(groups):
        running = _after(running, operands_GKR[0][group], operands_GKR[1][group], formats)
        if (group + 1) % each == 0 or group == groups - 1:
            block = group // each if scales_RT[0].shape[1] > 1 else 0
            total += running * (scales_RT[0][:, block, None] * scales_RT[1][None, :, block])
            running.zero_()
    return total


def _after(
    running: torch.Tensor, a_KR: torch.Tensor, b_KC: torch.Tensor, formats: tuple[NumberFormat, NumberFormat]
) -> torch.Tensor:
    """The running sum, (rows, columns), after one instruction."""
    powers_KRC = _power(a_KR, formats[0])[:, :, None] * _power(b_KC, formats[1])[:, None]
    largest = torch.maximum(powers_KRC.amax(0), _power(running))
    # Where all is zero there is nothing to cut off.
    per_unit = (2.0**FRACTION_BITS / largest).masked_fill_(largest == 0, 0)
    products_KRC = torch.mul(a_KR[:, :, None], b_KC[:, None], out=powers_KRC)
    units = products_KRC.mul_(per_unit).trunc_().sum(0).add_((running * per_unit).trunc_())
    sums = units.mul_(largest * 2.0**-FRACTION_BITS)
    return (sums.view(torch.int32) & (-1 << (23 - FRACTION_BITS))).view(torch.float32)


def _power(x: torch.Tensor, of: NumberFormat | None = None) -> torch.Tensor:
    """The power of two of a value's exponent, in its format; 0 of 0."""
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power if of is None else power.clamp_(min=2.0**of.least_exponent).masked_fill_(x == 0, 0)
