"""Context parallelism by exchanging heads for positions (DeepSpeed-Ulysses, arXiv:2309.14509).

Before the core each rank has all its heads at its positions, inside it whole sequences of some heads, and then its
positions again. The core is the plain one: it sees a whole sequence in order, as ranks hold contiguous positions
and what arrives is laid out by sender.

Where there are fewer key/value heads than ranks, or not a multiple, heads are sent in as many copies as make them
one, so that each rank has those that its query heads read.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from trainwright.train.parallel.positions import Context, Core


def exchanged(
    context: Context,
    core: Core,
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`core` over whole sequences."""
    kv_heads = key_BKSH.shape[1]
    copies = math.lcm(kv_heads, context.size) // kv_heads
    if copies > 1:
        key_BKSH, value_BKSH = (each.repeat_interleave(copies, dim=1) for each in (key_BKSH, value_BKSH))
    query_BNSH, key_BKSH, value_BKSH = _ToHeads.apply(context, query_BNSH, key_BKSH, value_BKSH)  # pyright: ignore[reportGeneralTypeIssues]
    if sinks_N is not None:
        sinks_N = sinks_N.unflatten(0, (context.size, -1))[context.rank]
    mixed_BNSH = core(query_BNSH, key_BKSH, value_BKSH, sliding_window, scale, documents_BS, softcap, sinks_N)
    return _ToPositions.apply(context, mixed_BNSH)  # pyright: ignore[reportReturnType]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.context = context
        return _to_heads(context, mine)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_to_positions(ctx.context, gradients)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, mixed_BNSH: torch.Tensor) -> torch.Tensor:
        ctx.context = context
        return _to_positions(context, (mixed_BNSH,))[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_to_heads(ctx.context, gradients)


def _to_heads(context: Context, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """From (B, all heads, own positions, H) to (B, own heads, all positions, H)."""
    parts = [each.unflatten(1, (context.size, -1)).movedim(1, 0) for each in tensors]
    return tuple(each.movedim(0, 2).flatten(2, 3) for each in _exchange(context, parts))


def _to_positions(context: Context, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """And back. The heads of one token lie side by side, as the next matmul reads them."""
    parts = [each.unflatten(2, (context.size, -1)).movedim(2, 0) for each in tensors]
    return tuple(each.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2) for each in _exchange(context, parts))


def _exchange(context: Context, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Slice i of each of `parts` to rank i, all in one message; what came from each rank stands in its place."""
    leaving = torch.cat([each.reshape(context.size, -1) for each in parts], dim=1)
    arriving = torch.empty_like(leaving)
    with context.clock.of("cp"):
        dist.all_to_all_single(arriving, leaving, group=context.group)
    widths = [each[0].numel() for each in parts]
    return [each.reshape(part.shape) for each, part in zip(arriving.split(widths, dim=1), parts, strict=True)]
