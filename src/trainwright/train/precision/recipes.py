"""How a linear layer's six operands are quantized in each low precision: `spec/precision.py`'s facts, as
formats and scalings. Of y = x w^T, where w has out rows and in columns:

    fprop    input (tokens, in) and weight (out, in)             summed over in
    dgrad    gradient (tokens, out) and weight (in, out)         summed over out
    wgrad    gradient (out, tokens) and input (in, tokens)       summed over tokens

Operands are quantized along the dim that is summed, from the unquantized tensor or a transposed view of it. Where
`Operand.serves`, the first quantization is enough for both.

Rules that the facts leave open (`scales.py` has them): scales of tensors are Transformer Engine's, fp32 that
aren't powers of two; all other fp32 scales are powers of two; E8M0 is rounded up. Rounding is to nearest, and
by chance where a precision says so of gradients. Hadamard's transform is of both operands of wgrad.
"""

from dataclasses import dataclass, replace

import torch

from trainwright.spec import precision as facts
from trainwright.train.precision.formats import E2M1, E4M3, E5M2, NumberFormat
from trainwright.train.precision.hadamard import transformed
from trainwright.train.precision.noise import Noise
from trainwright.train.precision.product import Engine, engine
from trainwright.train.precision.quantized import Quantized, Scaling, quantize
from trainwright.train.precision.scales import Rule


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


FORMATS: dict[facts.Values, NumberFormat] = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}


def scaling_of(operand: facts.Operand, low: facts.LowPrecision) -> Scaling:
    """Blocks and rule of an operand."""
    rules: dict[facts.Scale, Rule] = {"e8m0": "e8m0", "e4m3": "e4m3", "fp32": "fp32"}
    rule = rules[operand.scale]
    if rule == "fp32" and (low.powers_of_two or operand.along is not None):
        rule = "power_of_two"  # a scale within the sum, whose products are then exact
    return Scaling(operand.across, operand.along, rule)


def operands_of(low: facts.LowPrecision) -> Operands:
    """Of the three products."""
    activation, weight, gradient = (
        Operand(FORMATS[each.values], scaling_of(each, low)) for each in (low.activation, low.weight, low.gradient)
    )
    gradient = replace(gradient, is_stochastic=low.stochastic_gradients)
    wide = low.hadamard > 0
    return Operands(
        fprop_input=activation,
        fprop_weight=weight,
        dgrad_gradient=gradient,
        dgrad_weight=weight,
        wgrad_gradient=replace(gradient, is_transformed=wide),
        wgrad_input=replace(activation, is_transformed=wide),
    )


RECIPES: dict[str, Operands] = {name: operands_of(low) for name, low in facts.LOW_PRECISION.items()}
"""By `Recipe.precision`. fp8-delayed differs from fp8-current in where amax comes from:
`Operand.quantized(amax=...)`."""


def engine_of(precision: str, device: torch.device) -> Engine:
    """What multiplies in all three products of a precision; where one of them is emulated, that."""
    of = RECIPES[precision]
    pairs = (
        (of.fprop_input, of.fprop_weight),
        (of.dgrad_gradient, of.dgrad_weight),
        (of.wgrad_gradient, of.wgrad_input),
    )
    engines = [engine(a.scaling, b.scaling, device) for a, b in pairs]
    return next((each for each in engines if not each.is_hardware), engines[0])
