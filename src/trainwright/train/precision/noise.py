"""Random numbers for stochastic rounding that are a function of a seed and of where a value stands in the whole
matrix, never of the layout or of what was drawn before: a rank that has a part of the matrix names its first
row and column there, and draws the part's numbers.

A row's place and a column's are mixed to 32 bits each, and their exclusive or is mixed again. The mixing
function is two rounds of shift and multiply whose constants Chris Wellons' search found to have the least bias
("lowbias32", github.com/skeeto/hash-prospector).
"""

from dataclasses import dataclass, replace

import torch

FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""The constants, as the signed numbers that PyTorch has."""
LOW = 2**32 - 1


@dataclass(frozen=True)
class Noise:
    """Of one matrix in one step: its seed, and which row and column of the whole matrix its first ones are; of a
    stack, which of its matrices is the first."""

    seed: int
    row: int = 0
    column: int = 0
    matrix: int = 0

    def shifted(self, row: int = 0, column: int = 0, matrix: int = 0) -> "Noise":
        """Of a part that begins there."""
        return replace(self, row=self.row + row, column=self.column + column, matrix=self.matrix + matrix)

    def uniform(self, x: torch.Tensor) -> torch.Tensor:
        """A number in [0, 1) for each value of x, (..., rows, columns), in x's order in memory; fp32, multiples of
        2^-24. Matrices of a stack have numbers of their own."""
        rows, columns = x.shape[-2:]
        batches = x.shape[:-2].numel()
        low, high = _signed(self.seed), _signed(self.seed >> 32)
        batch = _mixed(_places(self.matrix, batches, x.device) + high).view(*x.shape[:-2], 1)
        row = _mixed(_mixed(_places(self.row, rows, x.device) ^ low) + batch)
        column = _mixed(_places(self.column, columns, x.device))
        if x.mT.is_contiguous() and not x.is_contiguous():
            return _fraction(_mixed(column[:, None] ^ row[..., None, :])).mT
        return _fraction(_mixed(row[..., None] ^ column))


def _places(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers of rows or columns, mixed from 64 bits to 32."""
    place = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return _wrapped(place) ^ _mixed(_wrapped(place >> 32))


def _wrapped(number: torch.Tensor) -> torch.Tensor:
    return ((number + 2**31) & LOW).sub_(2**31).to(torch.int32)


def _signed(number: int) -> int:
    return ((number + 2**31) & LOW) - 2**31


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits of each int32; products wrap, and shifts have to be told that there is no sign."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * FIRST
    bits.bitwise_xor_((bits >> 15) & 0x1FFFF).mul_(SECOND)
    return bits.bitwise_xor_((bits >> 16) & 0xFFFF)


def _fraction(bits: torch.Tensor) -> torch.Tensor:
    return ((bits >> 8) & 0xFFFFFF).float().mul_(2.0**-24)
