"""Three functions that keep less for backward than PyTorch's own composition of them does, on every device alike.

    rms_norm      keeps its input and one statistic per row; composed, it keeps a second tensor of the input's size
    gated         act(gate) * up keeps gate and up; composed, it keeps act(gate) too
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


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim (arXiv:1910.07467), computed in fp32 at least."""
    if x.is_cuda:
        return F.rms_norm(x, weight_D.shape, weight_D, epsilon)  # one kernel, which keeps the same
    return _RmsNorm.apply(x, weight_D, epsilon)  # pyright: ignore[reportReturnType]


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up (arXiv:2002.05202)."""
    return _Gated.apply(gate, up, activation)  # pyright: ignore[reportReturnType]


def _precise(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        precise = _precise(x)
        square = torch.linalg.vecdot(precise, precise).unsqueeze(-1)
        scale = torch.rsqrt(square / x.shape[-1] + epsilon)
        ctx.save_for_backward(x, weight_D, scale)
        return (precise * scale).mul_(_precise(weight_D)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # y = n * w with n = x * scale: dn = dy * w, and dx = scale * (dn - n * mean(dn * n)).
        x, weight_D, scale = ctx.saved_tensors
        upstream = _precise(gradients[0])
        normal = _precise(x) * scale
        d_weight = (upstream * normal).flatten(0, -2).sum(0)
        d_normal = upstream * _precise(weight_D)
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
