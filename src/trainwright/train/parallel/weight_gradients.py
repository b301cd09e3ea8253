"""Backward in two acts: input gradients first, weight gradients later (zero bubble, arXiv:2401.10241 s2).

Of y = x w^T the stage before waits for dx = dy w, and nobody waits for dw = dy^T x. So while a microbatch's
forward runs under its `WeightGradients`, each product is recorded as two graphs that share one y: one from y to x,
which the input-gradient act walks, and one from y to w, which ends at x's values. The first walk leaves dy with
the second graph; the weight-gradient act walks those, and all that lies between a weight and its parameter (a tp
rank's part, a slice) and that listens to its gradient is as in an ordinary backward.

What is held in between is what the planner counts: every product's input, once, and its output's gradient. All
else of the microbatch's graph is gone after the first act. An input that tensor parallelism has gathered is held
as this rank's part and gathered again in the second act (`parallel/crossing.py`). Norms, biases that stand outside
a product and the embedding, whose gradients are small or cheap, get theirs in the first act.

PyTorch's pipelines split a backward from outside (`torch.distributed.pipelining._backward`), by keeping the whole
graph alive until the second act; that frees nothing, and finds parameters resharded by FSDP2 gone.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from trainwright.train.model.linear import Product
from trainwright.train.parallel.collective_matmul import gathered_products, scattered_product
from trainwright.train.precision.linear import LowPrecision

InputGradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From an output's gradient and the weight to the input's gradient."""


class WeightGradients(TorchFunctionMode):
    """Those of one microbatch on one chunk. On during its forward, and during its input gradients, in which
    recomputed layers run again: what they hold is then new, and held until the weight gradients are done."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[tuple[Sequence[GradientEdge], Sequence[torch.Tensor]]] = deque()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(F.linear, torch.matmul, *args, **(kwargs or {}))
        if isinstance(func, LowPrecision):
            return self._linear(func, func.input_gradient, *args, **(kwargs or {}))
        if func in (gathered_products, scattered_product):
            return func(*args, put_off=self.wait)
        return func(*args, **(kwargs or {}))

    def _linear(
        self,
        product: Product,
        input_gradient: InputGradient,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return product(x, weight, bias)
        y = product(x.detach(), weight, bias)
        return _InputGradient.apply(  # pyright: ignore[reportReturnType]
            x, weight.detach(), y.detach(), get_gradient_edge(y), input_gradient, self
        )

    def wait(self, products: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
        """The output gradients of a product are there, or of several that read the same."""
        self._waiting.append((products, gradients))

    def compute(self) -> None:
        """Add them to the parameters' gradients, one product at a time, so that what each held is gone at once."""
        while self._waiting:
            products, gradients = self._waiting.popleft()
            torch.autograd.backward(products, gradients)


class _InputGradient(torch.autograd.Function):
    """y, computed already, as a function of x alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        product: GradientEdge,
        input_gradient: InputGradient,
        weight_gradients: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.product, ctx.input_gradient, ctx.weight_gradients = product, input_gradient, weight_gradients
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        ctx.weight_gradients.wait((ctx.product,), gradients)
        return ctx.input_gradient(gradients[0], weight), None, None, None, None, None
