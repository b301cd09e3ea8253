"""The random Hadamard transform of NVFP4's weight gradients (arXiv:2509.25149 s4.2): 16 values along the summed
dim become their sums with signs, over 4, so that an outlier is spread over 16 values before they are rounded.

The matrix is diag(signs) H / 4, with H the 16 x 16 matrix of Sylvester. It is orthogonal, so a product whose two
operands are both transformed is what it was. One vector of signs serves all products of a run (ibid. s4.2 and
appendix C; Transformer Engine has one too).
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F

SIZE = 16


@functools.cache
def matrix(seed: int) -> np.ndarray:
    """(16, 16) fp32, with random signs of a seed; every entry is 1/4 or -1/4."""
    signs = np.random.default_rng(seed).choice([-1, 1], (SIZE, 1))
    sylvester = np.ones((1, 1))
    while len(sylvester) < SIZE:
        sylvester = np.kron([[1, 1], [1, -1]], sylvester)
    return (signs * sylvester / SIZE**0.5).astype(np.float32)


def transformed(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x, (..., rows, columns), with each 16 of a row's columns transformed; zeros fill up the last ones, so
    that the result has a multiple of 16 columns. In x's dtype, as Transformer Engine's reference."""
    transform, missing = torch.from_numpy(matrix(seed)).to(x), -x.shape[-1] % SIZE
    if x.mT.is_contiguous():
        padded = F.pad(x.mT, (0, 0, 0, missing)) if missing else x.mT
        return (transform.mT @ padded.unflatten(-2, (-1, SIZE))).flatten(-3, -2).mT
    padded = F.pad(x, (0, missing)) if missing else x
    return (padded.unflatten(-1, (-1, SIZE)) @ transform).flatten(-2)
