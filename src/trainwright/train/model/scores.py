"""Attention with scores that aren't just scaled products: capped (Gemma 2), and with a sink beside them (gpt-oss).

    capped   softcap * tanh(score / softcap) before the softmax (arXiv:2408.00118 s2). No kernel of
             `scaled_dot_product_attention` does it, so it is written out, some queries at a time; scores are not
             kept but made again in backward, as flash attention does (arXiv:2205.14135 s3.1).
    sinks    exp(sink) is added to the softmax's denominator (openai/gpt-oss). That is what one more key does in
             front of all others, whose score is the sink and whose value is zero; so the fused kernels of any
             device serve. On a CPU `banded.py` needs no such key.

Shapes and rules are those of `layers.attention_core`.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainwright.spec.model import reaches
from trainwright.train.model.banded import same, seen
from trainwright.train.model.functions import precise

ALIGNED = 8
"""Widths of heads that fused kernels take are multiples of it."""


def capped_attention(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None,
    softcap: float,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention with capped scores, and with sinks where there are some."""
    seq_len, window = query_BNSH.shape[2], sliding_window or query_BNSH.shape[2]
    parts = []
    for queries, keys in reaches(seq_len, window):
        part_BNQH = checkpoint(
            _capped_part,
            query_BNSH[:, :, queries],
            key_BKSH[:, :, keys],
            value_BKSH[:, :, keys],
            queries.start - keys.start,
            window,
            None if documents_BS is None else (documents_BS[:, queries], documents_BS[:, keys]),
            _scale(scale, query_BNSH),
            softcap,
            sinks_N,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        assert isinstance(part_BNQH, torch.Tensor)
        parts.append(part_BNQH)
    return torch.cat(parts, dim=2)


def attention_with_sinks(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None,
    sinks_N: torch.Tensor,
) -> torch.Tensor:
    """Causal attention with a key in front that every query sees. Its score is the sink because queries carry
    sink / scale at one more place, where this key alone has a one. A query in front, which nobody reads, keeps the
    mask causal."""
    _, _, seq_len, width = query_BNSH.shape
    scale = _scale(scale, query_BNSH)
    more = ALIGNED - width % ALIGNED
    key_BKSH, value_BKSH = F.pad(key_BKSH, (0, more, 1, 0)), F.pad(value_BKSH, (0, more, 1, 0))
    key_BKSH[:, :, 0, width] = 1.0
    carried_BNSH = (sinks_N / scale).view(1, -1, 1, 1).expand(*query_BNSH.shape[:3], 1)
    query_BNSH = F.pad(torch.cat((query_BNSH, carried_BNSH), dim=-1), (0, more - 1, 1, 0))
    seen_SS = None
    if documents_BS is not None or (sliding_window is not None and sliding_window < seq_len):
        seen_SS = seen(seq_len + 1, seq_len + 1, 0, sliding_window or seq_len + 1, query_BNSH)
        if documents_BS is not None:
            documents_BS = F.pad(documents_BS, (1, 0), value=-1)
            seen_SS = seen_SS & same(documents_BS, documents_BS)
        seen_SS[..., 0] = True
    mixed_BNSH = F.scaled_dot_product_attention(
        query_BNSH,
        key_BKSH,
        value_BKSH,
        attn_mask=seen_SS,
        is_causal=seen_SS is None,
        scale=scale,
        enable_gqa=True,
    )
    return mixed_BNSH[:, :, 1:, :width]


def _capped_part(
    query_BNQH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    offset: int,
    window: int,
    documents: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
    softcap: float,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    kv_heads = key_BKSH.shape[1]
    query_BKGQH = query_BNQH.unflatten(1, (kv_heads, -1))
    score_BKGQS = precise(query_BKGQH @ key_BKSH.unsqueeze(2).transpose(-1, -2)) * scale
    score_BKGQS = softcap * torch.tanh(score_BKGQS / softcap)
    is_seen = seen(query_BNQH.shape[2], key_BKSH.shape[2], offset, window, query_BNQH)
    if documents is not None:
        is_seen = (is_seen & same(*documents)).unsqueeze(2)
    score_BKGQS = score_BKGQS.masked_fill(~is_seen, -math.inf)
    if sinks_N is not None:
        sinks_BKGQ1 = precise(sinks_N).view(kv_heads, -1, 1, 1).expand(*score_BKGQS.shape[:4], 1)
        score_BKGQS = torch.cat((score_BKGQS, sinks_BKGQ1), dim=-1)
    share_BKGQS = torch.softmax(score_BKGQS, dim=-1).to(value_BKSH.dtype)
    return (share_BKGQS[..., : key_BKSH.shape[2]] @ value_BKSH.unsqueeze(2)).flatten(1, 2)


def _scale(scale: float | None, query_BNSH: torch.Tensor) -> float:
    return 1 / math.sqrt(query_BNSH.shape[-1]) if scale is None else scale
