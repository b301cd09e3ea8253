"""Functions that keep less for backward than PyTorch's own composition of them does, on every device alike.

    rms_norm      keeps its input and one statistic per row; composed, it keeps a second tensor of the input's size
    gated         act(gate) * up keeps gate and up; composed, it keeps act(gate) too
    clamped       gpt-oss' SwiGLU keeps gate and up; composed, both once more, clamped, and three products
    softcapped    c * tanh(x / c) keeps its output, which what comes next keeps anyway; composed, another one too
    (the loss, which keeps its logits and one number per token, stands in train/loss.py)

What they keep is what `plan/operations.py` counts. On a CPU they also pass over memory fewer times.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
CLAMP, SLOPE = 7.0, 1.702
"""Of gpt-oss' clamped SwiGLU (openai/gpt-oss, gpt_oss/torch/model.py: swiglu)."""


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, epsilon: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim (arXiv:1910.07467), computed in fp32 at least; with
    1 + weight in the weight's place where it is `zero_centered`."""
    if x.is_cuda and x.dtype == weight_D.dtype and not zero_centered:
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)  # one kernel, which keeps the same
    return _RmsNorm.apply(x, weight_D, epsilon, float(zero_centered))  # pyright: ignore[reportReturnType]


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up (arXiv:2002.05202)."""
    if torch.compiler.is_compiling():
        return activation(gate) * up  # the compiler makes act(gate) again by itself
    return _Gated.apply(gate, up, activation)  # pyright: ignore[reportReturnType]


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 * gate) * (up + 1), with gate at most 7 and up between -7 and 7 (gpt-oss)."""
    return made_again(_clamped_swiglu, gate, up)


def weighted_clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
    """The same of rows (R, F), each times its weight."""
    return made_again(_weighted_clamped_swiglu, gate, up, weight_R)


def made_again(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """`function` of `inputs`, which alone are kept: backward computes it once more."""
    if torch.compiler.is_compiling():
        return function(*inputs)  # what to make again the compiler chooses
    return _MadeAgain.apply(function, *inputs)  # pyright: ignore[reportReturnType]


def softcapped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap): nearly x where it is small, and never beyond the cap (Gemma 2, arXiv:2408.00118 s2)."""
    return _Softcapped.apply(x, cap)  # pyright: ignore[reportReturnType]


def precise(x: torch.Tensor) -> torch.Tensor:
    """In fp32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    # x * sigmoid(c * x) = silu(c * x) / c.
    active = F.silu(gate.clamp(max=CLAMP).mul_(SLOPE)).div_(SLOPE)
    return _times(active, up.clamp(-CLAMP, CLAMP).add_(1))


def _weighted_clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
    return _times(_clamped_swiglu(gate, up), weight_R.unsqueeze(-1).to(up.dtype))


def _times(made: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """In the place of `made`, unless its gradient is asked for."""
    return made * other if torch.is_grad_enabled() else made.mul_(other)


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.function = function
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            made = ctx.function(*inputs)
        return (None, *torch.autograd.grad(made, inputs, gradients[0]))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float, more: float) -> torch.Tensor:
        wide = precise(x)
        square = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        scale = torch.rsqrt(square / x.shape[-1] + epsilon)
        ctx.save_for_backward(x, weight_D, scale)
        ctx.more = more
        return (wide * scale).mul_(precise(weight_D) + more if more else precise(weight_D)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        # y = n * w with n = x * scale: dn = dy * w, and dx = scale * (dn - n * mean(dn * n)).
        x, weight_D, scale = ctx.saved_tensors
        upstream = precise(gradients[0])
        normal = precise(x) * scale
        d_weight = (upstream * normal).flatten(0, -2).sum(0)
        d_normal = upstream * (precise(weight_D) + ctx.more if ctx.more else precise(weight_D))
        mean = torch.linalg.vecdot(d_normal, normal).unsqueeze_(-1).div_(x.shape[-1])
        d_x = d_normal.addcmul_(normal, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight_D.dtype), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        upstream = gradients[0]
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = ctx.activation(gate)
        (d_gate,) = torch.autograd.grad(active, gate, upstream * up)
        return d_gate, active.detach().mul_(upstream), None


class _Softcapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cap: float) -> torch.Tensor:
        capped = (x / cap).tanh_().mul_(cap)
        ctx.save_for_backward(capped)
        ctx.cap = cap
        return capped

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The derivative of tanh is 1 - tanh^2.
        (capped,) = ctx.saved_tensors
        slope = (capped / ctx.cap).square_().neg_().add_(1)
        return slope.mul_(gradients[0]), None
