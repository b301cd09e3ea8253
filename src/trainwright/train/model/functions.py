"""Functions that keep less for backward than PyTorch's own composition of them does, on every device alike.

    rms_norm      keeps its input and one statistic per row; composed, it keeps a second tensor of the input's size
    gated         act(gate) * up keeps gate and up; composed, it keeps act(gate) too
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


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim (arXiv:1910.07467), computed in fp32 at least."""
    if x.is_cuda and x.dtype == weight_D.dtype:
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)  # one kernel, which keeps the same
    return _RmsNorm.apply(x, weight_D, epsilon)  # pyright: ignore[reportReturnType]


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up (arXiv:2002.05202)."""
    if torch.compiler.is_compiling():
        return activation(gate) * up  # the compiler makes act(gate) again by itself
    return _Gated.apply(gate, up, activation)  # pyright: ignore[reportReturnType]


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 * gate) * (up + 1), with gate at most 7 and up between -7 and 7 (gpt-oss)."""
    return gated(gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1, _swish)


def softcapped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap): nearly x where it is small, and never beyond the cap (Gemma 2, arXiv:2408.00118 s2)."""
    return _Softcapped.apply(x, cap)  # pyright: ignore[reportReturnType]


def precise(x: torch.Tensor) -> torch.Tensor:
    """In fp32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(SLOPE * x)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = precise(x)
        square = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        scale = torch.rsqrt(square / x.shape[-1] + epsilon)
        ctx.save_for_backward(x, weight_D, scale)
        return (wide * scale).mul_(precise(weight_D)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # y = n * w with n = x * scale: dn = dy * w, and dx = scale * (dn - n * mean(dn * n)).
        x, weight_D, scale = ctx.saved_tensors
        upstream = precise(gradients[0])
        normal = precise(x) * scale
        d_weight = (upstream * normal).flatten(0, -2).sum(0)
        d_normal = upstream * precise(weight_D)
        mean = torch.linalg.vecdot(d_normal, normal).unsqueeze_(-1).div_(x.shape[-1])
        d_x = d_normal.addcmul_(normal, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight_D.dtype), None


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
