"""What the backward of an MLP of low-precision matmuls holds for a while, beside what the layer has kept.

The gradient of a product's output is cast in both orientations, which stay until its two products are done. An
emulated product has its operands once more as bf16; where a factor is left over (fp32 scales of rows and tensors,
NVFP4's of tensors) its sums are fp32, and on a CPU so are the operands that it multiplies. Weights that zero 3
gives back are cast for each product. What rounding itself needs is smaller: large matrices are rounded piece by
piece.
"""

import numpy as np

from trainwright.plan.agreement import is_cast_by_use
from trainwright.plan.table import Floats, Table

WIDE, SUMS = 2, 4
"""Bytes of an operand's value that is wide again, and of a sum that isn't rounded yet."""


def product_bytes(table: Table, left: Floats, right: Floats, out: Floats) -> Floats:
    """The most that a product holds of so many values of operands and result, its result among it."""
    recipe, low = table.recipe, table.recipe.low_precision
    assert low is not None, "the recipe has a low precision"
    size = recipe.compute_bytes
    if not recipe.emulate_precision:
        return out * size
    operands = (left + right) * WIDE
    if low.activation.along is not None and not low.tensor_scale:
        return operands + out * size
    summed = operands + out * SUMS
    if table.cluster.device.kind == "cpu":
        summed = summed + (left + right) * SUMS
    return np.maximum(summed, operands + out * (SUMS + size))


def backward_bytes(
    table: Table, rows: Floats, width: Floats, groups: Floats | None, read_again: Floats | float
) -> Floats:
    """The most at the way down or the ways up, as they lie between the products: (rows,) for `rows` of each of the
    groups (None: a plain MLP) and a width; read_again: values of the input that is gathered again. What of the
    kept tensors is gone by then is taken off."""
    recipe, low, d_model = table.recipe, table.recipe.low_precision, float(table.model.d_model)
    assert low is not None, "the recipe has a low precision"
    count: Floats | float = 1.0 if groups is None else groups
    outer, inner, weights = rows * d_model, rows * width, width * d_model
    size, cast = recipe.compute_bytes, 2 * low.gradient.value_bytes
    by_use = is_cast_by_use(table, groups is not None) * weights * count * low.weight.value_bytes
    # Experts' results are collected and then joined; of their weights' gradients there is room for all.
    gathered = 0.0 if groups is None else 1.0
    room = gathered * weights * count * size

    def dgrad(read: Floats, made: Floats) -> Floats:
        one = product_bytes(table, read, weights, made) + gathered * (count - 1) * made * size
        return by_use + np.maximum(one, gathered * 2 * count * made * size)

    def wgrad(read: Floats, made: Floats) -> Floats:
        return count * made * size + room + product_bytes(table, read, made, weights)

    down = count * outer * cast + np.maximum(dgrad(outer, inner), wgrad(outer, inner))
    again = read_again * (size + low.activation.value_bytes)
    # The activation's input has given way to its gradient, and the product's copy is gone.
    up = count * inner * (cast - low.activation.value_bytes)
    up = up + np.maximum(dgrad(inner, outer), again + wgrad(inner, outer))
    return np.maximum(down, up)
