"""Sums as Hopper's tensor cores make them for fp8, which have fewer bits than fp32.

An instruction multiplies 32 pairs of codes and adds the products to a running sum. It finds the largest
exponent among the products (the sum of their factors' exponents, so that a product's significand is below 4)
and the running sum, cuts every one of these 33 numbers off, toward zero, at 13 bits below that exponent, adds
them exactly, and cuts the result off to 13 bits of mantissa. The 14 bits of arXiv:2412.19437 s3.3.2 and s3.5.2
are thus the leading one and 13 behind it. That this is what the device does to the bit was found by MMA-Sim
(arXiv:2511.10909, and github.com/microsoft/MMA-Sim: WGMMA with F=13 and RZ-E8M13) and fits DeepGEMM's "FP22"
(issue 50 there).

DeepSeek-V3 takes the running sum out every 128 values, N_C, and adds it up in fp32 (ibid. s3.3.2):
`promoted_every`.
"""

import torch

GROUP = 32
"""Products of one instruction: wgmma's k for 8-bit operands (PTX ISA, wgmma.mma_async)."""
FRACTION_BITS = 13
CHUNK_VALUES = 2**18
"""Products at a time, so that they stay in a core's cache."""


def limited_product(
    a: torch.Tensor, b: torch.Tensor, promoted_every: int | None = None, fraction_bits: int = FRACTION_BITS
) -> torch.Tensor:
    """a b^T with such sums: decoded codes of fp8, (rows, summed) and (columns, summed), to (rows, columns) fp32.

    promoted_every: columns after which the running sum is added to one in fp32; None: never. A multiple of 32.
    """
    if promoted_every is not None and (promoted_every < GROUP or promoted_every % GROUP):
        raise ValueError(f"promoted_every={promoted_every} must be a multiple of {GROUP}")
    groups = [_by_group(x.float()) for x in (a, b)]
    result = torch.zeros(len(a), len(b))
    height = max(1, CHUNK_VALUES // (GROUP * max(1, len(b))))
    for first in range(0, len(a), height):
        rows = slice(first, first + height)
        result[rows] = _sums(groups[0][:, :, rows], groups[1], promoted_every, fraction_bits)
    return result


def _by_group(x: torch.Tensor) -> torch.Tensor:
    """(rows, summed) as (groups, 32, rows), with zeros in the last group."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).T.contiguous().unflatten(0, (-1, GROUP))


def _sums(
    a_GKR: torch.Tensor, b_GKC: torch.Tensor, promoted_every: int | None, fraction_bits: int
) -> torch.Tensor:
    """(rows, columns), of values by group, place in the group, and row or column."""
    running = torch.zeros(a_GKR.shape[2], b_GKC.shape[2])
    total = torch.zeros_like(running)
    for group, (a_KR, b_KC) in enumerate(zip(a_GKR, b_GKC, strict=True), 1):
        scale_KRC = _power(a_KR)[:, :, None] * _power(b_KC)[:, None]
        largest = torch.maximum(scale_KRC.amax(0), _power(running))
        # Where all is zero there is nothing to cut off.
        per_unit = (2.0**fraction_bits / largest).masked_fill_(largest == 0, 0)
        products_KRC = torch.mul(a_KR[:, :, None], b_KC[:, None], out=scale_KRC)
        units = products_KRC.mul_(per_unit).trunc_().sum(0).add_((running * per_unit).trunc_())
        running = _cut(units.mul_(largest * 2.0**-fraction_bits), fraction_bits)
        if promoted_every and group * GROUP % promoted_every == 0:
            total += running
            running.zero_()
    return total.add_(running)


def _power(x: torch.Tensor) -> torch.Tensor:
    """The power of two of a value's exponent; 0 of 0."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _cut(x: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    return (x.view(torch.int32) & (-1 << (23 - fraction_bits))).view(torch.float32)
