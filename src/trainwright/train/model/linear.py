"""A linear layer whose product can be made by other arithmetic than PyTorch's own, such as one of few bits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From x (..., in), weight (out, in) and bias (out) to x W^T + b, (..., out)."""


class Linear(nn.Linear):
    """`product` is asked at every call, so that it can be set when the layer stands where it will run."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.product: Product = F.linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # PyTorch's name
        return self.product(input, self.weight, self.bias)
