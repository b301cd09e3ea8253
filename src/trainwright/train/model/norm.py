"""The norm of the residual stream, of queries and keys, and of latents: RMSNorm or LayerNorm."""

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.spec.model import ModelSpec
from trainwright.train.model.functions import precise, rms_norm


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim; where the model says so, with 1 + weight in the weight's place."""

    def __init__(self, spec: ModelSpec, width: int, *, may_have_bias: bool = True) -> None:
        super().__init__()
        self.kind, self.epsilon, self.zero_centered = spec.norm, spec.norm_epsilon, spec.zero_centered_norm
        self.weight = nn.Parameter(torch.zeros(width) if self.zero_centered else torch.ones(width))
        has_bias = may_have_bias and spec.norm == "layernorm"
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalize(x, self.weight, self.bias)

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The norm with these parameters, which are this module's or a rank's plain view of them."""
        if self.kind == "rmsnorm":
            return rms_norm(x, weight, self.epsilon, zero_centered=self.zero_centered)
        scale = self.scale(weight)
        bias = None if bias is None else bias.to(scale.dtype)
        return F.layer_norm(x.to(scale.dtype), scale.shape, scale, bias, self.epsilon).to(x.dtype)

    def scale(self, weight: torch.Tensor) -> torch.Tensor:
        """What the normed values are multiplied by. bf16 would round the sum of 1 and a small weight off."""
        return 1 + precise(weight) if self.zero_centered else weight
