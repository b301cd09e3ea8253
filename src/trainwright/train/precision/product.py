"""Products of quantized matrices: a b^T, with a (rows, summed) and b (columns, summed).

Emulation runs anywhere. Operands are exact in bf16 (`quantized.py`), a product of two of them is exact in fp32,
and sums are fp32; so a bf16 matmul is the product in all but the order of its sums. Where a factor is left over
(fp32 scales; NVFP4's of tensors) or an fp32 result is wanted, the sums come out in fp32, are multiplied there
and are rounded once: by an fp32 matmul of the same operands on a CPU, whose bf16 matmul has bf16 results alone.
What a tensor core's narrower sums do is not in it: `accumulator.py`.

Hardware is `torch.nn.functional.scaled_mm`, whose restrictions were read in PyTorch 2.13
(aten/src/ATen/native/cuda/ScaledBlas.cpp, torch/_meta_registrations.py): both operands have the summed dim last
in memory and padded (with zeros) to the scales' blocks; fp32 scales of 1x128 lie column by column, those of
128x128 too and padded to four; E8M0 and E4M3 scales lie in tiles of 128 x 4 (`_swizzled`; cuBLAS, "1D block
scaling factors layout").
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from trainwright.train.precision.formats import E2M1
from trainwright.train.precision.quantized import (
    BLOCK,
    MX,
    NV,
    NV_BLOCK,
    ROW,
    TENSOR,
    TILE,
    Quantized,
    Scaling,
)


class Engine(NamedTuple):
    """What multiplies, and why."""

    is_hardware: bool
    why: str


def engine(a: Scaling, b: Scaling, device: torch.device) -> Engine:
    """What multiplies operands of two scalings on a device."""
    if device.type != "cuda":
        return Engine(False, f"emulated: torch multiplies fp8 on CUDA devices, and this is {device.type}")
    capability = torch.cuda.get_device_capability(device)
    found = _engine(a, b, capability)
    return Engine(found.is_hardware, f"{found.why}; {torch.cuda.get_device_name(device)} has {capability}")


def _engine(a: Scaling, b: Scaling, capability: tuple[int, int]) -> Engine:
    kinds = {a, b}
    if kinds == {TENSOR}:
        return _at_least((8, 9), capability, "scales of tensors")
    if kinds == {ROW}:
        return _at_least((9, 0), capability, "scales of rows")
    if kinds <= {TILE, BLOCK}:
        if kinds == {BLOCK}:
            return Engine(False, "emulated: no kernel has 128x128 blocks on both sides")
        is_hopper = capability[0] == 9
        return Engine(
            is_hopper, ("hardware" if is_hopper else "emulated") + ": 1x128 tiles are Hopper's, 9.0, alone"
        )
    if kinds == {MX} or kinds <= {NV, NV_BLOCK}:
        return _at_least((10, 0), capability, "scales in E8M0 and E4M3")
    return Engine(False, "emulated: no kernel has these two scalings together")


def _at_least(least: tuple[int, int], capability: tuple[int, int], what: str) -> Engine:
    has = capability >= least
    return Engine(has, f"{'hardware' if has else 'emulated'}: {what} need compute capability {least}")


def product(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """a b^T: (..., rows, summed) and (..., columns, summed) to (..., rows, columns), bf16 or fp32."""
    if a.columns != b.columns:
        raise ValueError(f"a and b are summed over {a.columns} and {b.columns} columns; they must be equally many")
    if a.values.ndim == 2 and engine(a.scaling, b.scaling, a.values.device).is_hardware:
        return by_hardware(a, b, out_dtype)
    return by_emulation(a, b, out_dtype)


def grouped_product(
    a: Quantized, b: Quantized, counts: Sequence[int], out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Runs of a's rows, (rows, summed), each with its matrix of the stack b, (groups, columns, summed): (rows,
    columns). counts: rows of each run, in order."""
    if len(counts) != b.values.shape[0] or sum(counts) != a.shape[0]:
        raise ValueError(
            f"counts={list(counts)} must be one for each of {len(b.values)} matrices and sum to {a.shape[0]} rows"
        )
    runs = a.split(counts)
    return torch.cat([product(run, b[group], out_dtype) for group, run in enumerate(runs)])


def by_emulation(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """`product`, by a bf16 or fp32 matmul."""
    left, right = a.operand(), b.operand().mT
    if a.factor is None and b.factor is None and out_dtype == torch.bfloat16:
        return left @ right
    if left.is_cuda:
        multiply = torch.mm if left.ndim == 2 else torch.bmm
        sums = multiply(left, right, out_dtype=torch.float32)
    else:
        sums = left.float() @ right.float()
    for factor in (a.factor, None if b.factor is None else b.factor.mT):
        sums = sums if factor is None else sums.mul_(factor)
    return sums.to(out_dtype)


def by_hardware(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """`product`, by the device's own instructions; of two matrices."""
    rows, columns = a.shape[0], b.shape[0]
    if not rows or not columns or not a.columns:
        return a.values.new_zeros((rows, columns), dtype=out_dtype)
    return _scaled_mm(_laid_out(a), _laid_out(b), out_dtype)[:rows, :columns]


class _Laid(NamedTuple):
    """An operand as scaled_mm reads it."""

    values: torch.Tensor
    scales: list[torch.Tensor]
    kinds: list[ScalingType]
    swizzles: list[SwizzleType]


def _scaled_mm(a: _Laid, b: _Laid, out_dtype: torch.dtype) -> torch.Tensor:
    # The second operand's scales of rows are a row.
    b_scales = [b.scales[0].mT] if b.kinds == [ScalingType.RowWise] else b.scales
    return F.scaled_mm(
        a.values,
        b.values.t(),
        a.scales,
        a.kinds,
        b_scales,
        b.kinds,
        a.swizzles,
        b.swizzles,
        output_dtype=out_dtype,
    )


def _laid_out(x: Quantized) -> _Laid:
    plain = [SwizzleType.NO_SWIZZLE]
    if x.scaling == TENSOR:
        return _Laid(_padded(x, 16, 16), [x.scale.reshape(())], [ScalingType.TensorWise], plain)
    if x.scaling == ROW:
        scale = F.pad(x.scale, (0, 0, 0, -x.shape[0] % 16), value=1.0)
        return _Laid(_padded(x, 16, 16), [scale], [ScalingType.RowWise], plain)
    if x.scaling == TILE:
        scale = F.pad(x.scale, (0, 0, 0, -x.shape[0] % 16), value=1.0)
        return _Laid(_padded(x, 16, 128), [scale.mT.contiguous().mT], [ScalingType.BlockWise1x128], plain)
    if x.scaling == BLOCK:
        scale = F.pad(x.scale, (0, -x.scale.shape[1] % 4), value=1.0)
        return _Laid(_padded(x, 128, 128), [scale.contiguous().mT], [ScalingType.BlockWise128x128], plain)
    swizzled = SwizzleType.SWIZZLE_32_4_4
    if x.scaling == MX:
        return _Laid(_padded(x, 16, 32), [_swizzled(x.scale)], [ScalingType.BlockWise1x32], [swizzled])
    scale = x.scale
    if x.scaling == NV_BLOCK:
        scale = scale.view(torch.uint8).repeat_interleave(16, 0)[: x.shape[0]].view(scale.dtype)
    assert x.tensor_scale is not None
    scales = [_swizzled(scale), x.tensor_scale.reshape(())]
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    return _Laid(_padded(x, 16, 32), scales, kinds, [swizzled, *plain])


def _padded(x: Quantized, rows: int, columns: int) -> torch.Tensor:
    """Codes with zeros up to multiples of rows and columns, the columns one after another in memory."""
    codes = x.values.view(torch.uint8)
    missing = -x.columns % columns
    if x.format is E2M1:
        missing = (x.columns + missing) // 2 - codes.shape[1]
    codes = F.pad(codes, (0, missing, 0, -x.shape[0] % rows)).contiguous()
    return codes.view(torch.float4_e2m1fn_x2 if x.format is E2M1 else x.format.dtype)


def _swizzled(scale: torch.Tensor) -> torch.Tensor:
    """(rows, blocks) of scales, padded, as tiles of 128 rows x 4 blocks one after another; within a tile, rows r,
    r + 32, r + 64 and r + 96 are neighbours."""
    rows, blocks = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(-1).view(scale.dtype)
