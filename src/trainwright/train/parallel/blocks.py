"""Attention over one block of keys at a time: its output, and the log-sum-exp by which outputs of blocks add up.

Softmax over all keys is a mean of softmaxes over blocks of them, weighted by exp(lse of the block - lse of all)
(FlashAttention, arXiv:2205.14135 s3.1); in backward a block needs no more of the others than the final output and
lse. So keys that lie on several ranks can be attended to one rank's part after the other.

Where PyTorch has a flash kernel that gives the lse away, it computes the block; where it has none (values of
another width than keys; on a GPU other number formats too, and masks that are neither causal nor empty) the
formula is written out, and scores of the block are in memory.
"""

from typing import Literal

import torch

Seen = torch.Tensor | Literal["causal", "all"]
"""Which keys a query sees: those up to its own place in the block, all of them, or a mask (queries, keys),
which may have dims of the batch and of both counts of heads before them."""

_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ON_GPU = torch.ops.aten._scaled_dot_product_flash_attention
_ON_GPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


def block_forward(
    query_BNSH: torch.Tensor, key_BKSH: torch.Tensor, value_BKSH: torch.Tensor, seen: Seen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, S, H) and lse (B, N, S) of the queries over this block's keys. A query that sees none has
    output 0 and lse -inf."""
    if _has_kernel(query_BNSH, value_BKSH, seen):
        if query_BNSH.is_cuda:
            out_BNSH, lse_BNS, *_ = _ON_GPU(
                query_BNSH, key_BKSH, value_BKSH, is_causal=seen == "causal", scale=scale
            )
            return out_BNSH, lse_BNS
        arguments = (query_BNSH, key_BKSH, value_BKSH)
        if isinstance(seen, str):
            return _ON_CPU(*arguments, is_causal=seen == "causal", scale=scale)
        out_BNSH, lse_BNS = _ON_CPU(*arguments, attn_mask=_added(seen, query_BNSH), scale=scale)
        # Of a query that sees no key the kernel says 0.
        return out_BNSH, lse_BNS.masked_fill(~_of_all_heads(seen).any(-1), -torch.inf)
    scores_BKGSS = _scores(query_BNSH, key_BKSH, seen, scale)
    lse_BKGS = scores_BKGSS.logsumexp(-1)
    weights_BKGSS = _weights(scores_BKGSS, lse_BKGS)
    out_BKGSH = weights_BKGSS @ _precise(value_BKSH).unsqueeze(2)
    return out_BKGSH.flatten(1, 2).to(query_BNSH.dtype), lse_BKGS.flatten(1, 2)


def block_backward(
    gradient_BNSH: torch.Tensor,
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    out_BNSH: torch.Tensor,
    lse_BNS: torch.Tensor,
    seen: Seen,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values through this block; output and lse are those over all blocks."""
    if _has_kernel(query_BNSH, value_BKSH, seen):
        lse_BNS = lse_BNS.contiguous()
        arguments = (gradient_BNSH, query_BNSH, key_BKSH, value_BKSH, out_BNSH, lse_BNS)
        if query_BNSH.is_cuda:
            # Without dropout the kernel draws nothing: the generator's state is one of no meaning.
            queries, keys = query_BNSH.shape[2], key_BKSH.shape[2]
            nothing = torch.empty(2, dtype=torch.uint64, device=query_BNSH.device)
            return _ON_GPU_BACKWARD(
                *arguments, None, None, queries, keys, 0.0, seen == "causal", nothing, nothing, scale=scale
            )
        mask = None if isinstance(seen, str) else _added(seen, query_BNSH)
        return _ON_CPU_BACKWARD(*arguments, 0.0, seen == "causal", attn_mask=mask, scale=scale)
    groups = (key_BKSH.shape[1], -1)
    query_BKGSH, gradient_BKGSH, out_BKGSH = (
        _precise(each).unflatten(1, groups) for each in (query_BNSH, gradient_BNSH, out_BNSH)
    )
    key_BK1SH, value_BK1SH = _precise(key_BKSH).unsqueeze(2), _precise(value_BKSH).unsqueeze(2)
    weights_BKGSS = _weights(_scores(query_BNSH, key_BKSH, seen, scale), lse_BNS.unflatten(1, groups))
    d_value_BKSH = (weights_BKGSS.transpose(-1, -2) @ gradient_BKGSH).sum(2)
    mean_BKGS1 = (gradient_BKGSH * out_BKGSH).sum(-1, keepdim=True)
    d_scores_BKGSS = weights_BKGSS * (gradient_BKGSH @ value_BK1SH.transpose(-1, -2) - mean_BKGS1) * scale
    d_query_BNSH = (d_scores_BKGSS @ key_BK1SH).flatten(1, 2)
    d_key_BKSH = (d_scores_BKGSS.transpose(-1, -2) @ query_BKGSH).sum(2)
    return d_query_BNSH.to(query_BNSH), d_key_BKSH.to(key_BKSH), d_value_BKSH.to(value_BKSH)


class Merged:
    """The sum of blocks so far, in fp32 at least; a query sees a key in the first of its blocks."""

    def __init__(self, query_BNSH: torch.Tensor, d_value: int) -> None:
        shape, like = query_BNSH.shape[:3], _precise(query_BNSH[..., :0])
        self._out_BNSH = like.new_zeros((*shape, d_value))
        self._lse_BNS = like.new_full(shape, -torch.inf)
        self._dtype = query_BNSH.dtype

    def add(self, queries: slice, out_BNSH: torch.Tensor, lse_BNS: torch.Tensor) -> None:
        """A block's part for some of the queries."""
        before_BNS = self._lse_BNS[:, :, queries]
        total_BNS = torch.logaddexp(before_BNS, lse_BNS)
        here_BNSH = self._out_BNSH[:, :, queries]
        here_BNSH.mul_((before_BNS - total_BNS).exp().unsqueeze(-1))
        here_BNSH.add_(out_BNSH * (lse_BNS - total_BNS).exp().unsqueeze(-1))
        before_BNS.copy_(total_BNS)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, N, S, H), whose heads of one token lie side by side as the next matmul reads them, and
        lse."""
        out_BSNH = self._out_BNSH.transpose(1, 2).to(self._dtype).contiguous()
        return out_BSNH.transpose(1, 2), self._lse_BNS


def _has_kernel(query_BNSH: torch.Tensor, value_BKSH: torch.Tensor, seen: Seen) -> bool:
    if query_BNSH.shape[-1] != value_BKSH.shape[-1]:
        return False
    if query_BNSH.is_cuda:
        if isinstance(seen, torch.Tensor):
            return False
        is_half = query_BNSH.dtype in (torch.bfloat16, torch.float16)
        return is_half and query_BNSH.shape[-1] % 8 == 0 and query_BNSH.shape[-1] <= 256
    return True


def _of_all_heads(seen: torch.Tensor) -> torch.Tensor:
    """Without a dim for the groups of heads: (queries, keys), or (B, 1, queries, keys)."""
    return seen if seen.ndim < 5 else seen.squeeze(2)


def _added(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a kernel adds to scores."""
    return torch.where(_of_all_heads(seen), 0.0, -torch.inf).to(like.dtype)


def _scores(query_BNSH: torch.Tensor, key_BKSH: torch.Tensor, seen: Seen, scale: float) -> torch.Tensor:
    """Scores (B, K, N / K, queries, keys), -inf where a key isn't seen."""
    query_BKGSH = _precise(query_BNSH).unflatten(1, (key_BKSH.shape[1], -1))
    scores_BKGSS = query_BKGSH @ _precise(key_BKSH).unsqueeze(2).transpose(-1, -2) * scale
    if isinstance(seen, str):
        if seen == "all":
            return scores_BKGSS
        seen = torch.ones(scores_BKGSS.shape[-2:], dtype=torch.bool, device=scores_BKGSS.device).tril()
    return scores_BKGSS.masked_fill(~seen, -torch.inf)


def _weights(scores_BKGSS: torch.Tensor, lse_BKGS: torch.Tensor) -> torch.Tensor:
    """Softmax weights; 0 for a query that sees no key."""
    return (scores_BKGSS - lse_BKGS.masked_fill(lse_BKGS == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _precise(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
