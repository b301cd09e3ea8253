"""The matmuls of routed experts with operands of few bits: the three products of `linear.py`, for each expert's
own rows.

    Fprop    y (R, O)  = x (R, I)   w (X, O, I)      each run of rows with its expert
    Dgrad    dx (R, I) = dy (R, O)  w^T (X, I, O)
    Wgrad    dw (X, O, I): of each run dy^T (O, R') x^T (I, R')

Blocks along rows begin anew with each expert, as what they hold is summed with nothing of another's. A scale of
the whole tensor is one for all rows, and one for each expert's weight.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from trainwright.train.precision.arithmetic import Arithmetic
from trainwright.train.precision.linear import Multiply
from trainwright.train.precision.quantized import Quantized
from trainwright.train.precision.shared import HeldWeight, SharedInput, form_of, parts_of, put_together


class Rows(NamedTuple):
    """Rows as Fprop or Dgrad reads them, and each run of them as Wgrad does; no runs where there is no Wgrad."""

    along: Quantized
    across: tuple[Quantized, ...]


class LowPrecisionExperts:
    """`model.experts.GroupedProduct` of one stacked matrix. `inputs` is shared with those that read the same."""

    def __init__(self, arithmetic: Arithmetic, inputs: SharedInput[Any], weights: HeldWeight) -> None:
        self.arithmetic, self.inputs, self.weights = arithmetic, inputs, weights

    def __call__(self, row_RI: torch.Tensor, weight_XOI: torch.Tensor, count_X: torch.Tensor) -> torch.Tensor:
        """Rows (R, I) in the order of experts, `count_X` of each, and weights (X, O, I) to (R, O)."""
        wants = torch.is_grad_enabled() and weight_XOI.requires_grad
        rows, counts = len(row_RI), count_X.tolist()
        if not rows:
            # Nobody chose an expert that is here; ranks that others chose still ask for the largest value of all.
            row_RI, counts[0] = F.pad(row_RI, (0, 0, 0, 1)), 1
        made = self.inputs.of(row_RI, f"x {wants}", lambda x: self.rows("input", x, counts, wgrad=wants))
        place = _Keep.apply(row_RI, weight_XOI, self, made.across, counts)
        make = partial(self._output, made.along, weight_XOI, counts, row_RI.dtype)
        y_RO: torch.Tensor = Multiply.apply(place, make)  # pyright: ignore[reportAssignmentType]
        return y_RO[:rows]

    def rows(self, role: Any, row_RK: torch.Tensor, counts: Sequence[int], *, wgrad: bool) -> Rows:
        """Rows (R, K), quantized along K and, for Wgrad, along R."""
        if wgrad:
            return Rows(*self.arithmetic.runs(role, row_RK, counts))
        return Rows(self.arithmetic.along(role, row_RK), ())

    def _output(
        self, row_RI: Quantized, weight_XOI: torch.Tensor, counts: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Fprop."""
        return self._runs(row_RI, self.weights.of(weight_XOI, "Fprop", self.arithmetic), counts, dtype)

    def gradients(
        self,
        gradient: torch.Tensor,
        weight_XOI: torch.Tensor,
        x: Sequence[Quantized],
        counts: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dx (R, I), and dw (X, O, I) where x^T of each run is given, of dy (R, O)."""
        dy = self.rows("gradient", gradient, counts, wgrad=bool(x))
        dx_RI = self._runs(dy.along, self.weights.of(weight_XOI, "Dgrad", self.arithmetic), counts, gradient.dtype)
        if not x:
            return dx_RI, None
        dw_XOI = torch.zeros_like(weight_XOI)
        for dw_OI, dy_OR, x_IR in zip(dw_XOI, dy.across, x, strict=True):
            if x_IR.columns:
                dw_OI.copy_(self.arithmetic.multiplied(dy_OR, x_IR, weight_XOI.dtype))
        return dx_RI, dw_XOI

    def _runs(self, a: Quantized, b: Quantized, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Runs of a's rows, each with its matrix of the stack b."""
        runs = a.split(counts)
        return torch.cat([self.arithmetic.multiplied(run, b[expert], dtype) for expert, run in enumerate(runs)])


class _Keep(torch.autograd.Function):
    """As `linear.py`'s."""

    @staticmethod
    def forward(
        ctx: Any,
        row_RI: torch.Tensor,
        weight_XOI: torch.Tensor,
        layer: LowPrecisionExperts,
        runs: Sequence[Quantized],
        counts: Sequence[int],
    ) -> torch.Tensor:
        ctx.layer, ctx.counts, ctx.forms = layer, counts, [form_of(run) for run in runs]
        ctx.samples_B = layer.arithmetic.under_way.samples_B
        ctx.save_for_backward(weight_XOI, *(part for run in runs for part in parts_of(run)))
        return row_RI.new_empty(()).expand(len(row_RI), weight_XOI.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        weight_XOI, *parts = ctx.saved_tensors
        ctx.layer.arithmetic.under_way.samples_B = ctx.samples_B
        each = len(parts) // max(len(ctx.forms), 1)
        runs = [put_together(form, parts[run * each : (run + 1) * each]) for run, form in enumerate(ctx.forms)]
        return *ctx.layer.gradients(gradients[0], weight_XOI, runs, ctx.counts), None, None, None
