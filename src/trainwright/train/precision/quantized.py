"""A matrix in a low format: codes, and the scales of its blocks.

Its last dim is the one that a product sums over; there may be dims before the two of the matrix, for a stack of
experts. To quantize along the other dim, hand over the transposed view: `quantize(x.mT, ...)` works in x's
order in memory, costs the same, and its codes are a view of x's shape. A block that the matrix' edge cuts is a
smaller block.

Scaling per tensor has one block, per row one of each row, tiles have one row, and blocks several rows. Where a
block's scale is a power of two (fp8-block, E8M0) or E4M3 (over the tensor's scale), code times scale has at most 8
significant bits, so that it is exact in bf16 (from 2^-126 on): `operand` is what a matmul reads, and `factor` what
its sums are multiplied by.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainwright.train.precision.blocks import (
    PIECE_VALUES,
    Size,
    in_blocks,
    is_transposed,
    joined,
    pieces,
    scaled,
    stacked,
)
from trainwright.train.precision.formats import E2M1, NumberFormat, cast, decoded, packed, unpacked
from trainwright.train.precision.noise import Noise
from trainwright.train.precision.scales import RULES, Rule, Scales


@dataclass(frozen=True)
class Scaling:
    """Which values share a scale: blocks of rows x columns (None: all of them); and how it comes from their
    amax."""

    rows: int | None
    columns: int | None
    rule: Rule

    def __post_init__(self) -> None:
        if self.rule == "fp32" and self.columns is not None:
            raise ValueError("fp32 scales are of whole rows: a sum over columns can't have them taken out of it")

    @property
    def size(self) -> Size:
        return self.rows, self.columns

    @property
    def is_square(self) -> bool:
        """Whether a matrix that was quantized so is, transposed, quantized so along its other dim."""
        return self.rows == self.columns


TENSOR = Scaling(None, None, "fp32")
ROW = Scaling(1, None, "power_of_two")
TILE = Scaling(1, 128, "power_of_two")
BLOCK = Scaling(128, 128, "power_of_two")
MX = Scaling(1, 32, "e8m0")
NV = Scaling(1, 16, "e4m3")
NV_BLOCK = Scaling(16, 16, "e4m3")


@dataclass(frozen=True)
class Quantized:
    """(..., rows, columns), summed over columns."""

    values: torch.Tensor
    """Codes: (..., rows, columns) of the format's dtype, or (..., rows, ceil(columns / 2)) bytes of E2M1."""
    scale: torch.Tensor
    """(..., row blocks, column blocks): what a code is multiplied by; fp32, E8M0 or E4M3."""
    format: NumberFormat
    scaling: Scaling
    columns: int
    tensor_scale: torch.Tensor | None = None
    """(..., 1, 1) fp32: what E4M3 scales are multiplied by."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], self.columns))

    @property
    def factor(self) -> torch.Tensor | None:
        """What a sum over columns is still to be multiplied by, (..., rows or 1, 1) fp32; None: nothing."""
        return self.scale if self.scaling.rule == "fp32" else self.tensor_scale

    def operand(self) -> torch.Tensor:
        """Codes times what isn't in `factor`, exact in bf16: (..., rows, columns)."""
        if self.scaling.rule == "fp32":
            return decoded(self.values, self.format)[..., : self.columns]
        if self.values.ndim > 2 and self.values.numel() > PIECE_VALUES:
            return stacked([self[number].operand() for number in range(len(self.values))])
        # A byte of E2M1 is of two columns, so its pieces are of rows.
        values = self.values.contiguous() if self.format is E2M1 else self.values
        size, scale = self.scaling.size, self.scale.float()
        operands = []
        for piece in pieces(values, size):
            codes = decoded(piece.values, self.format)
            if self.format is E2M1:
                codes = codes[..., : self.columns]
            operands.append(scaled(codes, piece.cut(scale), size).bfloat16())
        return joined(operands, values)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(..., rows, columns)."""
        operand, factor = self.operand(), self.factor
        return (operand if factor is None else operand.float() * factor).to(dtype)

    def __getitem__(self, number: int) -> "Quantized":
        """One matrix of a stack."""
        tensor_scale = self.tensor_scale
        if tensor_scale is not None:
            tensor_scale = tensor_scale[number]
        return replace(self, values=self.values[number], scale=self.scale[number], tensor_scale=tensor_scale)

    def split(self, counts: Sequence[int]) -> list["Quantized"]:
        """Runs of a matrix' rows; blocks are of one row, or there is one block."""
        if self.scaling.rows not in (1, None):
            raise ValueError(f"rows can't be split where blocks have {self.scaling.rows} of them")
        values = self.values.split(list(counts))
        scales = self.scale.split(list(counts)) if self.scaling.rows else [self.scale] * len(counts)
        return [replace(self, values=run, scale=scale) for run, scale in zip(values, scales, strict=True)]

    def transposed(self) -> "Quantized":
        """Of the transposed matrix, with the same codes.

        Raises ValueError where its blocks wouldn't lie along what it then sums over.
        """
        if not self.scaling.is_square:
            raise ValueError(
                f"blocks of {self.scaling.rows} x {self.scaling.columns} aren't square: quantize x.mT"
            )
        values = self.values.mT
        if self.format is E2M1:
            values = packed(unpacked(self.values)[..., : self.columns].mT)
        return replace(self, values=values, scale=self.scale.mT, columns=self.values.shape[-2])


def quantize(
    x: torch.Tensor,
    to: NumberFormat,
    scaling: Scaling,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    noise: Noise | None = None,
) -> Quantized:
    """x, (..., rows, columns), bf16 or fp32, in a format and with scales of its blocks.

    amax: to take scales from instead of x's own (of past steps, or over ranks), fp32, in the shape of the scales;
    for E4M3 scales (..., 1, 1), the tensor's. scale: the scales themselves, fp32. What is beyond the format's
    largest value then saturates. noise: rounds E2M1 stochastically.
    """
    x = x.detach()
    if x.ndim > 2 and x.numel() > PIECE_VALUES:
        return _one_by_one(x, to, scaling, amax, scale, noise)
    x = x if is_transposed(x) else x.contiguous()
    scales = _scales(x, to, scaling, amax, scale)
    codes = []
    for piece in pieces(x, scaling.size):
        values = scaled(piece.values, piece.cut(scales.encoding), scaling.size)
        codes.append(cast(values, to, noise and noise.shifted(piece.row, piece.column)))
    return Quantized(joined(codes, x), scales.kept, to, scaling, x.shape[-1], scales.of_tensor)


def block_amax(x: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Largest magnitude of each block of x, (..., row blocks, column blocks) fp32; NaN where there is one."""
    largest = joined([_amax(piece.values, scaling) for piece in pieces(x.detach(), scaling.size)], x)
    # Where a block has more than a piece, it has an amax of each.
    for dim, size in ((-2, scaling.rows), (-1, scaling.columns)):
        largest = largest if size else largest.amax(dim, keepdim=True)
    return largest


def _amax(x: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    blocks, transposed = in_blocks(x, scaling.size)
    # Magnitudes are in the order of their bits, NaN above all; whole numbers have a faster maximum.
    bits = blocks.view(torch.int16 if blocks.element_size() == 2 else torch.int32)
    largest = (bits & torch.iinfo(bits.dtype).max).amax((-3, -1)).view(blocks.dtype).float()
    return largest.mT if transposed else largest


def _scales(
    x: torch.Tensor,
    to: NumberFormat,
    scaling: Scaling,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> Scales:
    if scale is not None:
        return Scales(scale, 1 / scale)
    if scaling.rule == "e4m3":
        return RULES[scaling.rule](block_amax(x, scaling), to, amax)
    return RULES[scaling.rule](block_amax(x, scaling) if amax is None else amax, to, None)


def _one_by_one(
    stack: torch.Tensor,
    to: NumberFormat,
    scaling: Scaling,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    noise: Noise | None,
) -> Quantized:
    """`quantize` of the matrices of a large stack."""
    found = [
        quantize(
            x,
            to,
            scaling,
            amax=None if amax is None else amax[number],
            scale=None if scale is None else scale[number],
            noise=noise and noise.shifted(matrix=number * stack.shape[1:-2].numel()),
        )
        for number, x in enumerate(stack)
    ]
    first = found[0]
    tensor_scales = [x.tensor_scale for x in found if x.tensor_scale is not None]
    return replace(
        first,
        values=stacked([x.values for x in found]),
        scale=torch.stack([x.scale for x in found]),
        tensor_scale=torch.stack(tensor_scales) if tensor_scales else None,
    )
