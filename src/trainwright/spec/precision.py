"""What the operands of a low-precision matmul are: number format, which neighbours share a scale, and the scale.

A linear layer has three products, and each reads two operands, with its sum over the last dim of both:

    Fprop   input (tokens, in)   x  weight (out, in)       sums over in
    Dgrad   gradient (tokens, out)  x  weight (in, out)    sums over out
    Wgrad   gradient (out, tokens)  x  input (in, tokens)  sums over tokens

So each tensor is quantized twice, along either of its dims: a scale can leave the sum only if the values that
share it lie along what is summed. A weight whose blocks are squares has the same scales both ways. A block that
doesn't fit any more, at the end of a dim, is a shorter one with a scale of its own; kernels fill it with zeros.
"""

from typing import Any, Literal, NamedTuple

from trainwright.spec.cluster import BlockScales, Format

Values = Literal["e4m3", "e5m2", "e2m1"]
"""Bits of exponent and mantissa: fp8 with range to 448 (E4M3) or 57344 (E5M2), arXiv:2209.05433 s3; fp4 with range
to 6 (E2M1), OCP Microscaling Formats 1.0 s5.3."""

Scale = Literal["fp32", "e8m0", "e4m3"]
"""fp32; a power of two in a byte (OCP Microscaling Formats 1.0 s5.4.1); an fp8 number, over which an fp32 one of
the whole tensor stands (NVFP4, arXiv:2509.25149 s2)."""

VALUE_BYTES: dict[Values, float] = {"e4m3": 1.0, "e5m2": 1.0, "e2m1": 0.5}
"""Two of fp4 share a byte."""

SCALE_BYTES: dict[Scale, int] = {"fp32": 4, "e8m0": 1, "e4m3": 1}


class Operand(NamedTuple):
    """One tensor as a matmul reads it."""

    values: Values
    along: int | None
    """Values along the summed dim that share a scale; None: all of them."""
    across: int | None = 1
    """Neighbours of them across it that do; None: all."""
    scale: Scale = "fp32"

    @property
    def is_per_tensor(self) -> bool:
        """Whether one scale is for everything."""
        return self.along is None and self.across is None

    def scale_bytes(self, summed: Any, others: Any) -> Any:
        """Bytes of the scales of a matrix of (others, summed) values; the single numbers that stand for a whole
        tensor are left out (`spec.left_out`). Of numbers or arrays."""
        if self.is_per_tensor:
            return 0.0 * summed * others
        blocks = 1.0 if self.along is None else -(-summed // self.along)
        rows = 1.0 if self.across is None else -(-others // self.across)
        return SCALE_BYTES[self.scale] * blocks * rows

    def num_bytes(self, summed: Any, others: Any) -> Any:
        """Bytes of values and scales of a matrix of (others, summed) values. Of numbers or arrays."""
        packed = -(-summed // 2) if self.values == "e2m1" else summed
        return packed * others + self.scale_bytes(summed, others)

    @property
    def value_bytes(self) -> float:
        """Bytes of a value and its share of a block's scale, in a large matrix."""
        share = 0.0 if self.along is None else SCALE_BYTES[self.scale] / (self.along * (self.across or 1))
        return VALUE_BYTES[self.values] + share

    @property
    def text(self) -> str:
        """Values, and what shares a scale: `e4m3/1x128`."""
        shared = "tensor" if self.is_per_tensor else "row" if self.along is None else f"{self.across}x{self.along}"
        return f"{self.values}/{shared}"


class LowPrecision(NamedTuple):
    """A way of training with matmuls of fewer than 16 bits."""

    format: Format
    """The device's, whose peak the matmuls have."""
    activation: Operand
    weight: Operand
    gradient: Operand
    source: str
    block_scales: BlockScales | None = None
    """That the device's matmuls must apply themselves; None: kernels multiply sums by the scales."""
    amax_history: int = 0
    """Past steps whose largest value makes the scale; 0: the present values'."""
    powers_of_two: bool = False
    """fp32 scales are rounded to powers of two."""
    tensor_scale: bool = False
    """An fp32 scale of the whole tensor stands over the blocks'."""
    hadamard: int = 0
    """Width of the random Hadamard transform of both operands of Wgrad; 0: none."""
    stochastic_gradients: bool = False
    """Gradients are rounded up or down by chance, so that the mean is right."""

    @property
    def has_one_cast_of_weights(self) -> bool:
        """Whether a weight's values and scales are the same for both products that read it."""
        return self.weight.along == self.weight.across

    @property
    def text(self) -> str:
        """How its numbers are made, in words."""
        parts = [f"{self.activation.scale} scales"]
        if self.tensor_scale:
            parts.append("an fp32 scale per tensor over them")
        if self.powers_of_two:
            parts.append("powers of two")
        if self.amax_history:
            parts.append(f"of the largest value in {self.amax_history:,} steps before")
        if self.hadamard:
            parts.append(f"a random Hadamard transform of {self.hadamard} on both operands of Wgrad")
        if self.stochastic_gradients:
            parts.append("gradients rounded by chance")
        return f"{', '.join(parts)} ({self.source})"


_TENSOR = Operand("e4m3", None, None)
_TENSOR_WIDE = Operand("e5m2", None, None)
_ROW = Operand("e4m3", None)
_LINE = Operand("e4m3", 128)
_MX = Operand("e4m3", 32, scale="e8m0")
_NV = Operand("e2m1", 16, scale="e4m3")

LOW_PRECISION: dict[str, LowPrecision] = {
    "fp8-delayed": LowPrecision(
        "fp8",
        _TENSOR,
        _TENSOR,
        _TENSOR_WIDE,
        amax_history=1024,
        source="Transformer Engine DelayedScaling: HYBRID, amax_history_len=1024, the largest of it",
    ),
    "fp8-current": LowPrecision(
        "fp8",
        _TENSOR,
        _TENSOR,
        _TENSOR_WIDE,
        source="Transformer Engine Float8CurrentScaling: HYBRID",
    ),
    "fp8-rowwise": LowPrecision(
        "fp8",
        _ROW,
        _ROW,
        _ROW,
        powers_of_two=True,
        source="torchao Float8LinearRecipeName.ROWWISE: axiswise scales, E4M3 for gradients too",
    ),
    "fp8-block": LowPrecision(
        "fp8",
        _LINE,
        Operand("e4m3", 128, 128),
        _LINE,
        powers_of_two=True,
        source="DeepSeek-V3, arXiv:2412.19437 s3.3.2; powers of two as Transformer Engine's Float8BlockScaling",
    ),
    "mxfp8": LowPrecision(
        "fp8",
        _MX,
        _MX,
        _MX,
        block_scales="mx",
        source="OCP Microscaling Formats 1.0 s5.2; E4M3 for gradients too, arXiv:2506.08027 s3",
    ),
    "nvfp4": LowPrecision(
        "fp4",
        _NV,
        Operand("e2m1", 16, 16, scale="e4m3"),
        _NV,
        block_scales="nvfp4",
        tensor_scale=True,
        hadamard=16,
        stochastic_gradients=True,
        source="arXiv:2509.25149 s4: 16x16 of weights, stochastic rounding of gradients, transform in Wgrad",
    ),
}
"""By `Recipe.precision`."""
