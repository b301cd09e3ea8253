"""Dropout (Srivastava et al. 2014) whose masks are a function of where in the run a value stands, never of the
layout: the seed, the number of the sequence among those of all steps, the layer, the place in it, and position and
width (or head and the two positions) in the whole tensor.

So a mask can be drawn by whoever has a part of the tensor, and drawn again when a layer is recomputed. Each value
has a number; the finalizer of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators",
fig. 16) turns number and key into bits, of which 32 are held against the rate.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.train.model.banded import same, seen
from trainwright.train.model.functions import softcapped
from trainwright.train.model.transformer import Transformer

Place = Literal["attention weights", "attention", "mlp"]

GOLDEN, FIRST, SECOND = (each - 2**64 for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants, as the signed numbers that PyTorch has."""


@dataclass
class Dropping:
    """Of one piece: the rate, and which sequences are on their way through it. Whoever runs the piece sets these
    before each forward, and before each backward, which may recompute."""

    rate: float
    seed: int
    samples_B: torch.Tensor
    """Global number of each sequence, counted through all steps."""
    sequence_part: int = 0
    """Which of equal parts of the positions the residual stream has here."""
    head_part: int = 0
    """Which of equal parts of the heads are here."""

    def branch(self, layer: int, place: Place, x_BSD: torch.Tensor) -> torch.Tensor:
        """What a block adds to the residual stream, with values dropped."""
        positions, width = x_BSD.shape[1:]
        position_S = torch.arange(positions, device=x_BSD.device) + self.sequence_part * positions
        number_SD = position_S[:, None] * width + torch.arange(width, device=x_BSD.device)
        return self._dropped(x_BSD, self._kept(layer, place, number_SD))

    def weights(self, layer: int, weights_BNSS: torch.Tensor) -> torch.Tensor:
        """Attention weights of this rank's heads, (queries, keys), with values dropped."""
        heads, seq_len = weights_BNSS.shape[1:3]
        head_N = torch.arange(heads, device=weights_BNSS.device) + self.head_part * heads
        number_SS = torch.arange(seq_len * seq_len, device=weights_BNSS.device).view(seq_len, seq_len)
        number_NSS = head_N[:, None, None] * (seq_len * seq_len) + number_SS
        return self._dropped(weights_BNSS, self._kept(layer, "attention weights", number_NSS))

    def _kept(self, layer: int, place: Place, number: torch.Tensor) -> torch.Tensor:
        """Which values stay, (B, ...), by their numbers in the whole tensor of one sequence."""
        digest = hashlib.blake2b(f"{self.seed}/{layer}/{place}".encode(), digest_size=8).digest()
        samples_B = self.samples_B.to(number.device)
        key_B = _mixed(samples_B * GOLDEN + int.from_bytes(digest, "little", signed=True))
        bits = _mixed(key_B.view(-1, *(1,) * number.ndim) + number * GOLDEN)
        return ((bits >> 32) & 0xFFFFFFFF) >= round(self.rate * 2**32)

    def _dropped(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return _Dropped.apply(x, kept, 1 / (1 - self.rate))  # pyright: ignore[reportReturnType]


def unfused_core(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
    *,
    layer: int = 0,
    dropping: Dropping | None = None,
) -> torch.Tensor:
    """`layers.attention_core` with the scores in memory, where dropout can reach them."""
    (_, heads, seq_len, d_head), kv_heads = query_BNSH.shape, key_BKSH.shape[1]
    grouped = query_BNSH.unflatten(1, (kv_heads, heads // kv_heads))
    scores = grouped @ key_BKSH.unsqueeze(2).mT * (d_head**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcapped(scores, softcap)
    seen_SS = seen(seq_len, seq_len, 0, sliding_window or seq_len, scores)
    if documents_BS is not None:
        seen_SS = seen_SS & same(documents_BS, documents_BS).unsqueeze(2)
    scores = scores.masked_fill(~seen_SS, -torch.inf).flatten(1, 2)
    if sinks_N is not None:
        scores = torch.cat((scores, sinks_N.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights_BNSS = F.softmax(scores, dim=-1)[..., :seq_len]
    if dropping is not None:
        weights_BNSS = dropping.weights(layer, weights_BNSS)
    mixed = weights_BNSS.unflatten(1, (kv_heads, heads // kv_heads)) @ value_BKSH.unsqueeze(2)
    return mixed.flatten(1, 2)


def use_unfused_cores(piece: Transformer, dropping: Dropping | None) -> None:
    """Attention with its scores in memory, in place."""
    for number, layer in piece.numbered_layers():
        layer.attention.core = partial(unfused_core, layer=number, dropping=dropping)


def drop_branches(piece: Transformer, dropping: Dropping) -> None:
    """Drop values of what attention and MLP add to the residual stream, in place. Around what is recomputed of
    them, whose recomputation thus ends before the mask."""
    for number, layer in piece.numbered_layers():
        blocks: dict[Place, nn.Module] = {"attention": layer.attention, "mlp": layer.mlp}
        for place, block in blocks.items():
            plain: Callable[..., torch.Tensor] = block.forward
            setattr(block, "forward", partial(_branch, dropping, number, place, plain))  # noqa: B010


def _branch(dropping: Dropping, layer: int, place: Place, block: Any, *inputs: Any) -> torch.Tensor:
    return dropping.branch(layer, place, block(*inputs))


def _mixed(number: torch.Tensor) -> torch.Tensor:
    """64 well-mixed bits of each int64; products wrap, and shifts have to be told that there is no sign."""
    for bits, factor in ((30, FIRST), (27, SECOND)):
        number = (number ^ ((number >> bits) & ((1 << (64 - bits)) - 1))) * factor
    return number ^ ((number >> 31) & ((1 << 33) - 1))


class _Dropped(torch.autograd.Function):
    """Keeps the mask alone for backward, a byte per value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.factor = factor
        return (x * kept).mul_(factor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (gradients[0] * kept).mul_(ctx.factor), None, None
