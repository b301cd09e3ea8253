"""Activation outliers of a chosen size that change nothing but what the matmuls' operands look like.

Of what a layer's matmuls read behind a norm (query, key, value; gate and up, of experts too), some channels are
multiplied by a power of two, and the weights' columns that meet them are divided by it:

    y = x w^T = (x s) (w / s)^T

Each product of two numbers is what it was, as are the gradients of x and w, and powers of two are exact in bf16
until its exponents end: so a run in bf16 has the same losses, to the bit, whatever the factor is, and all that
a run in few bits loses is lost by rounding. Growing a norm's weight alone would give another model, which learns
otherwise in bf16 too; and dividing the stored weights would have AdamW, whose steps are as large for small
weights as for others, undo it.

Trained models have such channels by themselves: a few dimensions of hidden states grow to tens of times the others
(arXiv:2208.07339 s4), single activations to ten thousand times their median (arXiv:2402.17762 s2).
"""

from typing import Any

import torch

from trainwright.train.model.experts import Experts, GroupedProduct, MixtureOfExperts
from trainwright.train.model.layers import Layer, Mlp
from trainwright.train.model.linear import Linear, Product
from trainwright.train.model.transformer import Transformer
from trainwright.train.precision.shared import SharedInput

CHANNELS = (0, 1)
"""Neighbours, so that they lie in one block of every format's scales."""


def plant(piece: Transformer, factor: float) -> None:
    """Let the matmuls behind the norms of a piece's layers read outliers, in place, whatever multiplies there now.
    `factor`: a power of two."""
    for layer in piece.layers.values():
        assert isinstance(layer, Layer)
        attention, mlp = layer.attention, layer.mlp
        _plant_linears([attention.get_submodule(name) for name in ("query", "key", "value")], factor)
        if isinstance(mlp, MixtureOfExperts):
            _plant_experts(mlp.experts, factor)
            mlp = mlp.shared
        if mlp is not None:
            assert isinstance(mlp, Mlp)
            _plant_linears([each for each in (mlp.up, mlp.gate) if each is not None], factor)


def scale_of(width: int, factor: float, like: torch.Tensor) -> torch.Tensor:
    """By channel (width), in the type of `like`: the factor where outliers are, else 1."""
    scale_I = torch.ones(width, dtype=like.dtype, device=like.device)
    scale_I[list(CHANNELS)] = factor
    return scale_I


def _plant_linears(linears: list[Any], factor: float) -> None:
    """In linears that read the same."""
    inputs: SharedInput[torch.Tensor] = SharedInput(len(linears))
    for linear in linears:
        assert isinstance(linear, Linear)
        linear.product = _planted(linear.product, inputs, factor)


def _planted(product: Product, inputs: SharedInput[torch.Tensor], factor: float) -> Product:
    def planted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scale_I = scale_of(x.shape[-1], factor, x)
        return product(inputs.of(x, "x s", lambda x: x * scale_I), weight / scale_I, bias)

    return planted


def _plant_experts(experts: Experts, factor: float) -> None:
    names = [name for name in ("up", "gate") if getattr(experts, name) is not None]
    inputs: SharedInput[torch.Tensor] = SharedInput(len(names))
    for name in names:
        product = experts.products.get(name, experts.plain_product)
        experts.products[name] = _planted_experts(product, inputs, factor)


def _planted_experts(product: GroupedProduct, inputs: SharedInput[torch.Tensor], factor: float) -> GroupedProduct:
    def planted(row_RI: torch.Tensor, weight_XOI: torch.Tensor, count_X: torch.Tensor) -> torch.Tensor:
        scale_I = scale_of(row_RI.shape[-1], factor, row_RI)
        return product(inputs.of(row_RI, "x s", lambda x: x * scale_I), weight_XOI / scale_I, count_X)

    return planted
