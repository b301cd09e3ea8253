"""A matrix as blocks, in its own order in memory, and in pieces that stay in a core's cache.

A transposed view is worked on as the matrix that lies in memory, with blocks of columns x rows; results are views
again. Temporary tensors of a large matrix would cost more than what is done with them: a CPU gets their pages anew
from the system each time, which takes six times as long as rounding the values does (docs/log.md). So what is done
value by value is done piece by piece, and only the result is as large as the matrix.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

PIECE_VALUES = 2**17
"""As fast as twice as many, whose temporaries, three or four of fp32, would show in a small run's peak."""

Size = tuple[int | None, int | None]
"""Rows and columns of a block; None: all."""


def is_transposed(x: torch.Tensor) -> bool:
    return not x.is_contiguous() and x.mT.is_contiguous()


def in_blocks(x: torch.Tensor, size: Size) -> tuple[torch.Tensor, bool]:
    """x, or x transposed if it lies so in memory, as (..., row blocks, rows, column blocks, columns), with zeros
    beyond its edges; and whether it is transposed."""
    transposed = is_transposed(x)
    x, size = (x.mT, (size[1], size[0])) if transposed else (x.contiguous(), size)
    (rows, height), (columns, width) = (
        (-(-length // block), block) if block else (1, max(length, 1))
        for length, block in zip(x.shape[-2:], size, strict=True)
    )
    missing = rows * height - x.shape[-2], columns * width - x.shape[-1]
    if any(missing):
        x = F.pad(x, (0, missing[1], 0, missing[0]))
    return x.unflatten(-1, (columns, width)).unflatten(-3, (rows, height)), transposed


def scaled(x: torch.Tensor, scale: torch.Tensor, size: Size) -> torch.Tensor:
    """x times its blocks' scales, (..., row blocks, column blocks), in fp32."""
    blocks, transposed = in_blocks(x, size)
    scale = scale.mT if transposed else scale
    product = (blocks * scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    product = product.mT if transposed else product
    return product[..., : x.shape[-2], : x.shape[-1]]


class Piece(NamedTuple):
    """Some rows of a matrix, or where it lies transposed, some columns."""

    values: torch.Tensor
    row: int
    column: int
    """Where it begins."""
    cut: Callable[[torch.Tensor], torch.Tensor]
    """From the scales of all blocks to those of its own."""


def pieces(x: torch.Tensor, size: Size) -> list[Piece]:
    """A matrix in pieces of whole blocks, with an even number of rows or columns; a small one, or a stack,
    whole."""
    dim = 1 if is_transposed(x) else 0
    if x.ndim > 2 or x.numel() <= PIECE_VALUES:
        return [Piece(x, 0, 0, _whole)]
    unit = size[dim] or 2
    step = max(unit, PIECE_VALUES // x.shape[1 - dim] // unit * unit)
    found = []
    for first in range(0, x.shape[dim], step):
        values = x.narrow(dim, first, min(step, x.shape[dim] - first))
        count = -(-values.shape[dim] // unit)
        cut = partial(torch.narrow, dim=dim, start=first // unit, length=count) if size[dim] else _whole
        found.append(Piece(values, *((0, first) if dim else (first, 0)), cut))
    return found


def joined(results: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Results of x's pieces, in x's order in memory."""
    if len(results) == 1:
        return results[0]
    return torch.cat([result.mT for result in results]).mT if is_transposed(x) else torch.cat(list(results))


def stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """In a stack, in their order in memory."""
    if is_transposed(matrices[0]):
        return torch.stack([matrix.mT for matrix in matrices]).mT
    return torch.stack(list(matrices))


def _whole(scale: torch.Tensor) -> torch.Tensor:
    return scale
