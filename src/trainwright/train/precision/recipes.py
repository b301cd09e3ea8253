"""What each low precision makes of a linear layer's three products, y = x w^T (w has out rows and in columns):

    fprop    input (tokens, in) and weight (out, in)             summed over in
    dgrad    gradient (tokens, out) and weight (in, out)         summed over out
    wgrad    gradient (out, tokens) and input (in, tokens)       summed over tokens

Operands are quantized along the dim that is summed, so five of the six are views or their transposes of three
tensors. Where `Operand.serves`, one quantization is enough for both.

fp8-delayed, fp8-current   Transformer Engine's DelayedScaling and Float8CurrentScaling (TE, common/recipe):
                           HYBRID, which is E4M3 forward and E5M2 for gradients, one fp32 scale a tensor
fp8-rowwise                torchao's "rowwise" (torchao/float8/config.py): E4M3, a power of two for each row along
                           the summed dim, anew for each product
fp8-block                  DeepSeek-V3 (arXiv:2412.19437 s3.3.2) as TE's Float8BlockScaling: E4M3, 1x128 of
                           activations and gradients, 128x128 of weights, powers of two
mxfp8                      TE's MXFP8BlockScaling: E4M3, 1x32, E8M0 rounded up; both directions from the
                           unquantized tensor (arXiv:2506.08027)
nvfp4                      arXiv:2509.25149 s4, TE's NVFP4BlockScaling: E2M1, 1x16 with E4M3 scales; weights 16x16,
                           so that forward and backward see the same; gradients rounded stochastically; both
                           operands of wgrad through the Hadamard transform
"""

from dataclasses import dataclass, replace

import torch

from trainwright.spec.recipe import Precision
from trainwright.train.precision.formats import E2M1, E4M3, E5M2, NumberFormat
from trainwright.train.precision.hadamard import transformed
from trainwright.train.precision.noise import Noise
from trainwright.train.precision.product import Engine, engine
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
    quantize,
)


@dataclass(frozen=True)
class Operand:
    """How one matrix is quantized for one product."""

    format: NumberFormat
    scaling: Scaling
    is_stochastic: bool = False
    is_transformed: bool = False
    """By the Hadamard transform."""

    def serves(self, other: "Operand") -> bool:
        """Whether `Quantized.transposed` of this is what quantizing the transposed matrix for the other would
        give."""
        plain = not (self.is_stochastic or self.is_transformed or other.is_stochastic or other.is_transformed)
        return plain and (self.format, self.scaling) == (other.format, other.scaling) and self.scaling.is_square

    def quantized(
        self,
        x: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        hadamard_seed: int = 0,
        noise: Noise | None = None,
    ) -> Quantized:
        """x, (..., rows, summed), as this operand. amax: `quantize`'s. noise: where is_stochastic."""
        if self.is_transformed:
            x = transformed(x, hadamard_seed)
        return quantize(x, self.format, self.scaling, amax=amax, noise=noise if self.is_stochastic else None)


@dataclass(frozen=True)
class Operands:
    """Of the three products, in the order above."""

    fprop_input: Operand
    fprop_weight: Operand
    dgrad_gradient: Operand
    dgrad_weight: Operand
    wgrad_gradient: Operand
    wgrad_input: Operand


def _same(activation: Operand, weight: Operand, gradient: Operand) -> Operands:
    return Operands(activation, weight, gradient, weight, gradient, activation)


_NV_GRADIENT = Operand(E2M1, NV, is_stochastic=True)
_NV_INPUT, _NV_WEIGHT = Operand(E2M1, NV), Operand(E2M1, NV_BLOCK)
_HYBRID = _same(Operand(E4M3, TENSOR), Operand(E4M3, TENSOR), Operand(E5M2, TENSOR))

RECIPES: dict[Precision, Operands] = {
    "fp8-delayed": _HYBRID,
    "fp8-current": _HYBRID,
    "fp8-rowwise": _same(Operand(E4M3, ROW), Operand(E4M3, ROW), Operand(E4M3, ROW)),
    "fp8-block": _same(Operand(E4M3, TILE), Operand(E4M3, BLOCK), Operand(E4M3, TILE)),
    "mxfp8": _same(Operand(E4M3, MX), Operand(E4M3, MX), Operand(E4M3, MX)),
    "nvfp4": Operands(
        fprop_input=_NV_INPUT,
        fprop_weight=_NV_WEIGHT,
        dgrad_gradient=_NV_GRADIENT,
        dgrad_weight=_NV_WEIGHT,
        wgrad_gradient=replace(_NV_GRADIENT, is_transformed=True),
        wgrad_input=replace(_NV_INPUT, is_transformed=True),
    ),
}
"""fp8-delayed differs from fp8-current in where amax comes from: `Operand.quantized(amax=...)`."""


def engine_of(precision: Precision, device: torch.device) -> Engine:
    """What multiplies in all three products of a precision; where one of them is emulated, that."""
    of = RECIPES[precision]
    pairs = (
        (of.fprop_input, of.fprop_weight),
        (of.dgrad_gradient, of.dgrad_weight),
        (of.wgrad_gradient, of.wgrad_input),
    )
    engines = [engine(a.scaling, b.scaling, device) for a, b in pairs]
    return next((each for each in engines if not each.is_hardware), engines[0])
