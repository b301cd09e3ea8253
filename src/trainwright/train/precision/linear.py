"""A linear layer whose three products read operands of few bits (`precision/recipes.py` says which).

    Fprop    y (T, O)  = x (T, I)    w (O, I)     sums over I
    Dgrad    dx (T, I) = dy (T, O)   w^T (I, O)   sums over O
    Wgrad    dw (O, I) = dy^T (O, T) x^T (I, T)   sums over T

What stays for backward is x as Wgrad reads it: a byte a value and scales, once for all layers that read x. Where
autograd keeps a tensor-parallel rank's part of x anyway and gathers it again, x is quantized again too. The weight
is quantized once a step where it stays the same for so long.

Activations and gradients come and go in the run's activation format; sums are in fp32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from trainwright.train.precision.arithmetic import Arithmetic
from trainwright.train.precision.quantized import Quantized
from trainwright.train.precision.shared import HeldWeight, SharedInput, form_of, parts_of, put_together


class Input(NamedTuple):
    """x as Fprop reads it, and, where it is kept so, x^T as Wgrad does."""

    rows: Quantized
    columns: Quantized | None


class LowPrecision:
    """`model.linear.Product` of one layer. `inputs` is shared with the layers that read the same. keeps_input: x
    itself is there again in backward."""

    def __init__(
        self, arithmetic: Arithmetic, inputs: SharedInput[Any], weights: HeldWeight, *, keeps_input: bool
    ) -> None:
        self.arithmetic, self.inputs, self.weights, self.keeps_input = arithmetic, inputs, weights, keeps_input

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., I), weight (O, I), bias (O) to (..., O)."""
        if has_torch_function((x, weight)):
            return handle_torch_function(self, (x, weight), x, weight, bias)
        wants = torch.is_grad_enabled() and weight.requires_grad
        columns = wants and not self.keeps_input
        made = self.inputs.of(x, f"x {columns}", lambda x: self._input(x.flatten(0, -2), columns))
        place = _Keep.apply(x, weight, self, made, wants)
        y: torch.Tensor = Multiply.apply(place, partial(self._output, made.rows, x, weight))  # pyright: ignore[reportAssignmentType]
        return y if bias is None else y + bias

    def _input(self, x_TI: torch.Tensor, columns: bool) -> Input:
        if columns:
            return Input(*self.arithmetic.both("input", x_TI))
        return Input(self.arithmetic.along("input", x_TI), None)

    def _output(self, x_TI: Quantized, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Fprop."""
        w_OI = self.weights.of(weight, "Fprop", self.arithmetic)
        return self.arithmetic.multiplied(x_TI, w_OI, x.dtype).view(*x.shape[:-1], weight.shape[0])

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Dgrad: of dy (..., O) and w (O, I) dx (..., I)."""
        return self._dgrad(self.arithmetic.along("gradient", gradient.flatten(0, -2)), gradient, weight)

    def _dgrad(self, dy_TO: Quantized, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        w_IO = self.weights.of(weight, "Dgrad", self.arithmetic)
        return self.arithmetic.multiplied(dy_TO, w_IO, gradient.dtype).view(*gradient.shape[:-1], weight.shape[1])

    def input_again(self, x: torch.Tensor) -> Quantized:
        """x^T (I, T) as Wgrad reads it, of x (..., I) that was kept."""
        return self.inputs.of(x, "x^T", lambda x: self.arithmetic.across("input", x.flatten(0, -2)))

    def gradients(
        self, gradient: torch.Tensor, weight: torch.Tensor, x_IT: Quantized, *, dgrad: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """dx (..., I), if it is asked for, and dw (O, I), of dy (..., O)."""
        dx = None
        if dgrad:
            dy_TO, dy_OT = self.arithmetic.both("gradient", gradient.flatten(0, -2))
            dx = self._dgrad(dy_TO, gradient, weight)
        else:
            dy_OT = self.arithmetic.across("gradient", gradient.flatten(0, -2))
        return dx, self.arithmetic.multiplied(dy_OT, x_IT, weight.dtype)


class _Keep(torch.autograd.Function):
    """The layer's backward, and what it reads. Its output, which has no values, is that of the product, which is
    made behind it: so all is kept before the product is made, and recomputation that ends here makes none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: LowPrecision, made: Input, wants: bool
    ) -> torch.Tensor:
        ctx.layer, ctx.form = layer, None
        ctx.samples_B = layer.arithmetic.under_way.samples_B
        kept = []
        if made.columns is not None:
            ctx.form, kept = form_of(made.columns), parts_of(made.columns)
        elif wants:
            kept = [x]
        ctx.save_for_backward(weight, *kept)
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: LowPrecision = ctx.layer
        layer.arithmetic.under_way.samples_B = ctx.samples_B
        (gradient,), (weight, *kept) = gradients, ctx.saved_tensors
        dgrad, wgrad = ctx.needs_input_grad[:2]
        if not wgrad:
            return layer.input_gradient(gradient, weight), None, None, None, None
        x_IT = layer.input_again(kept[0]) if ctx.form is None else put_together(ctx.form, kept)
        return *layer.gradients(gradient, weight, x_IT, dgrad=dgrad), None, None, None


class Multiply(torch.autograd.Function):
    """What `make` gives, in the place of a tensor without values, which has its gradient."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
