"""How far the results of a linear layer's three products are off, against how many values they sum over (K) and
after how many the sum of few bits is taken out into fp32 (N_C of arXiv:2412.19437 s3.3.2).

Operands are drawn from the values of a real layer, each by itself, so that K can be any; what neighbours have in
common is lost. Formats are fp8-current's, with one scale a tensor: with scales of blocks N_C is a block's.
Errors are over the root mean square of the results, as single results may be near zero.
"""

from collections.abc import Mapping
from typing import get_args

import numpy as np
import torch

from trainwright.spec.precision_lab import Kept, ProductName, SumError
from trainwright.train.precision.accumulator import limited_product
from trainwright.train.precision.largest import Role
from trainwright.train.precision.product import by_emulation
from trainwright.train.precision.quantized import Quantized
from trainwright.train.precision.recipes import RECIPES, Operand

SUMMED = (1024, 4096, 16384)
RESULTS = 48
"""Rows and columns of what is summed."""
_OF = RECIPES["fp8-current"]
OPERANDS: dict[ProductName, tuple[tuple[Role, Operand], tuple[Role, Operand]]] = {
    "Fprop": (("input", _OF.fprop_input), ("weight", _OF.fprop_weight)),
    "Dgrad": (("gradient", _OF.dgrad_gradient), ("weight", _OF.dgrad_weight)),
    "Wgrad": (("gradient", _OF.wgrad_gradient), ("input", _OF.wgrad_input)),
}


def errors_of_sums(
    product: ProductName, samples: Mapping[Role, np.ndarray], summed: tuple[int, ...] = SUMMED
) -> list[SumError]:
    """Of one product, for each K and each way to sum. samples: fp32 values by role, of any number."""
    found = []
    for number, length in enumerate(summed):
        generator = np.random.default_rng(number)
        plain = [
            torch.from_numpy(generator.choice(samples[role], (RESULTS, length))) for role, _ in OPERANDS[product]
        ]
        a, b = (operand.quantized(x) for x, (_, operand) in zip(plain, OPERANDS[product], strict=True))
        exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT
        size = exact.square().mean().sqrt()
        for kept in get_args(Kept):
            errors = (_summed(kept, a, b, plain).double() - exact) / size
            worst, typical = float(errors.abs().max()), float(errors.square().mean().sqrt())
            found.append(SumError(product=product, summed=length, kept=kept, worst=worst, typical=typical))
    return found


def _summed(kept: Kept, a: Quantized, b: Quantized, plain: list[torch.Tensor]) -> torch.Tensor:
    if kept == "operands":
        return plain[0].double() @ plain[1].double().mT
    if kept == "fp32":
        return by_emulation(a, b, torch.float32)
    return limited_product(a, b, None if kept == "never" else int(kept))
