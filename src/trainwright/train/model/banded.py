"""Attention on a CPU as its fused kernel does it, where that has no word for what a query sees: windows,
documents, and sinks (openai/gpt-oss), a learned logit per head beside the scores.

Queries go some at a time, each time with the keys that they can reach, and the kernel is given the mask of these.
Masks are made again in backward, so what is kept is what flash attention keeps (arXiv:2205.14135 s3.1): queries,
keys, values, the output and one number per query, the log-sum-exp of its scores; and keys that no query of a part
can reach are not computed.

exp(sink) is added to the softmax's denominator: the log-sum-exp becomes log(exp(lse) + exp(sink)) and the output
that much less. Backward reads no more than these two; the sink's own gradient is minus its share of the softmax
times what the output's gradient and the output have in common, as its value is zero.

Shapes and rules are those of `layers.attention_core`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trainwright.spec.model import reaches

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def has_kernel(query_BNSH: torch.Tensor, value_BKSH: torch.Tensor) -> bool:
    """Whether `banded_attention` is for these: on a CPU, values as wide as keys."""
    return query_BNSH.device.type == "cpu" and query_BNSH.shape[-1] == value_BKSH.shape[-1]


def banded_attention(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention within a window and documents, with sinks where there are some."""
    scale = 1 / math.sqrt(query_BNSH.shape[-1]) if scale is None else scale
    band = Band(sliding_window or query_BNSH.shape[2], documents_BS, scale)
    return _Banded.apply(query_BNSH, key_BKSH, value_BKSH, sinks_N, band)  # pyright: ignore[reportReturnType]


class Part(NamedTuple):
    """Some queries and the keys that they can reach."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    """Added to their scores; None: all of a sequence, which is causal."""


class Band(NamedTuple):
    """Which keys a query sees."""

    window: int
    documents_BS: torch.Tensor | None
    scale: float

    def parts(self, query_BNSH: torch.Tensor) -> Iterator[Part]:
        seq_len = query_BNSH.shape[2]
        if self.window >= seq_len and self.documents_BS is None:
            yield Part(slice(None), slice(None), None)
            return
        for queries, keys in reaches(seq_len, self.window):
            offset = queries.start - keys.start
            is_seen = seen(queries.stop - queries.start, keys.stop - keys.start, offset, self.window, query_BNSH)
            if self.documents_BS is not None:
                is_seen = is_seen & same(self.documents_BS[:, queries], self.documents_BS[:, keys])
            yield Part(queries, keys, torch.where(is_seen, 0.0, -math.inf).to(query_BNSH.dtype))


def seen(queries: int, keys: int, offset: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Which keys each query sees, query i standing at key i + offset; a window counts the query's own position."""
    distance_QS = torch.arange(queries, device=like.device)[:, None] + offset
    distance_QS = distance_QS - torch.arange(keys, device=like.device)
    return (distance_QS >= 0) & (distance_QS < window)


def same(one_BQ: torch.Tensor, other_BS: torch.Tensor) -> torch.Tensor:
    """Which tokens are of one document, (B, 1, Q, S)."""
    return (one_BQ[:, :, None] == other_BS[:, None, :]).unsqueeze(1)


class _Banded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BNSH: torch.Tensor,
        key_BKSH: torch.Tensor,
        value_BKSH: torch.Tensor,
        sinks_N: torch.Tensor | None,
        band: Band,
    ) -> torch.Tensor:
        # Heads of one token lie side by side, as the next matmul reads them.
        batch, heads, seq_len, width = query_BNSH.shape
        out_BNSH = query_BNSH.new_empty((batch, seq_len, heads, width)).transpose(1, 2)
        lse_BNS = query_BNSH.new_empty((batch, heads, seq_len), dtype=_wide(query_BNSH))
        for queries, keys, mask in band.parts(query_BNSH):
            out_BNSH[:, :, queries], lse_BNS[:, :, queries] = _FORWARD(
                query_BNSH[:, :, queries],
                key_BKSH[:, :, keys],
                value_BKSH[:, :, keys],
                is_causal=mask is None,
                attn_mask=mask,
                scale=band.scale,
            )
        if sinks_N is not None:
            total_BNS = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS).view(1, -1, 1))
            out_BNSH.mul_((lse_BNS - total_BNS).exp_().unsqueeze(-1))
            lse_BNS = total_BNS
        ctx.save_for_backward(query_BNSH, key_BKSH, value_BKSH, sinks_N, out_BNSH, lse_BNS)
        ctx.band = band
        return out_BNSH

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_BNSH, key_BKSH, value_BKSH, sinks_N, out_BNSH, lse_BNS = ctx.saved_tensors
        upstream_BNSH, band = gradients[0], ctx.band
        d_query_BNSH = torch.empty_like(query_BNSH)
        # A key is in several parts.
        wide = _wide(query_BNSH)
        d_key_BKSH, d_value_BKSH = (torch.zeros_like(each, dtype=wide) for each in (key_BKSH, value_BKSH))
        for queries, keys, mask in band.parts(query_BNSH):
            d_query_BNSH[:, :, queries], d_keys, d_values = _BACKWARD(
                upstream_BNSH[:, :, queries],
                query_BNSH[:, :, queries],
                key_BKSH[:, :, keys],
                value_BKSH[:, :, keys],
                out_BNSH[:, :, queries],
                lse_BNS[:, :, queries].contiguous(),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=band.scale,
            )
            d_key_BKSH[:, :, keys] += d_keys
            d_value_BKSH[:, :, keys] += d_values
        d_sinks_N = None
        if sinks_N is not None:
            share_BNS = (sinks_N.to(lse_BNS).view(1, -1, 1) - lse_BNS).exp_()
            common_BNS = torch.linalg.vecdot(upstream_BNSH.to(wide), out_BNSH.to(wide))
            d_sinks_N = -(share_BNS * common_BNS).sum((0, 2)).to(sinks_N.dtype)
        return d_query_BNSH, d_key_BKSH.to(key_BKSH.dtype), d_value_BKSH.to(value_BKSH.dtype), d_sinks_N, None


def _wide(x: torch.Tensor) -> torch.dtype:
    """Of sums: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
