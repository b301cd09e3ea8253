"""Low-precision matmuls without numbers: shapes, number formats and what is multiplied are those of the program,
and nothing is rounded. Rounding one matrix is some thirty operators, each slow on fake tensors.

Emulated products read copies of their operands in 16 or 32 bits; those in hardware read codes and scales.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.train.parallelize import Trainer
from trainwright.train.precision.formats import NumberFormat
from trainwright.train.precision.hadamard import SIZE
from trainwright.train.precision.quantized import Quantized, Scaling

SCALE_DTYPES = {
    "fp32": torch.float32,
    "power_of_two": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e8m0_floor": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}


def round_nothing(trainer: Trainer, mode: FakeTensorMode) -> None:
    """Let a trainer's low-precision layers run without numbers, as in any step but the first."""
    layers = trainer.low_precision
    if layers is None:
        return
    layers.kernels.transform = lambda x, _: F.pad(x, (0, -x.shape[-1] % SIZE))
    layers.kernels.quantize = _quantized
    layers.kernels.product = partial(_product, copies=trainer.run.recipe.emulate_precision)
    for layer in layers.delayed.values():
        with mode:
            layer.history_RH = torch.zeros(layer.history_RH.shape)
            layer.seen_R, layer.past_R = torch.zeros(3), torch.zeros(3)
        layer.is_new = False


def _quantized(
    x: torch.Tensor, to: NumberFormat, scaling: Scaling, *, amax: object = None, noise: object = None
) -> Quantized:
    *stack, rows, columns = x.shape
    is_transposed = x.mT.is_contiguous() and not x.is_contiguous()
    blocks = [
        1 if of is None else -(-size // of) for size, of in ((rows, scaling.rows), (columns, scaling.columns))
    ]

    def empty(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        if is_transposed:
            return x.new_empty((*stack, *shape[::-1]), dtype=dtype).mT
        return x.new_empty((*stack, *shape), dtype=dtype)

    values = empty([rows, -(-columns // to.per_byte)], to.dtype)
    scale = empty(blocks, SCALE_DTYPES[scaling.rule])
    tensor_scale = empty([1, 1], torch.float32) if scaling.rule == "e4m3" else None
    return Quantized(values, scale, to, scaling, columns, tensor_scale)


def _product(a: Quantized, b: Quantized, dtype: torch.dtype, *, copies: bool) -> torch.Tensor:
    if not copies:
        # The shape of the operands, and no memory.
        left, right = (each.values.new_empty((), dtype=dtype).expand(each.shape) for each in (a, b))
        return left @ right.mT
    left, right = (each.values.new_empty(each.shape, dtype=torch.bfloat16) for each in (a, b))
    if a.factor is None and b.factor is None:
        return left @ right.mT
    # As on a CPU (`product.by_emulation`), whose sums in fp32 are of operands in fp32.
    sums = left.float() @ right.mT.float()
    return sums.to(dtype)
