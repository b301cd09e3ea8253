"""Which experts a token goes to, and with what weight: functions of the router's logits alone.

    scores   softmax (Shazeer et al., arXiv:1701.06538) or sigmoid (DeepSeek-V3, arXiv:2412.19437 s2.1.2) of the
             logits, in fp32 at least
    choice   the top_k experts by score; with a balance bias by score + bias, which steers the choice and nothing
             else (auxiliary-loss-free balancing, arXiv:2408.15664). In groups, the best top_groups groups alone:
             a group is as good as its two best experts together where there is a balance bias (DeepSeek-V3), and
             as its best one elsewhere (DeepSeek-V2, arXiv:2405.04434 s2.2.2)
    weights  the scores of the chosen, made to sum to one or not, times routed_scale

A capacity is counted in each sequence alone, in the order of positions: an expert takes the first
ceil(capacity_factor * S * top_k / X) tokens of a sequence that chose it. So what is dropped is a matter of the
sequence, never of the micro-batch or the layout. The loss for balance is of each sequence alone too
(arXiv:2412.19437 eq. 17-20); one of a batch would depend on the micro-batch.
"""

import math

import torch

from trainwright.spec.model import MoeMlp

EPSILON = 1e-20
"""Beside the sum of weights in the divisor (DeepSeek-V3's code): sigmoids may all be zero."""


def scores_of(logits_BSX: torch.Tensor, mlp: MoeMlp) -> torch.Tensor:
    precise = logits_BSX.double() if logits_BSX.dtype == torch.float64 else logits_BSX.float()
    return precise.softmax(-1) if mlp.router == "softmax" else precise.sigmoid()


def chosen_experts(scores_BSX: torch.Tensor, balance_bias_X: torch.Tensor | None, mlp: MoeMlp) -> torch.Tensor:
    """Numbers of the chosen experts (B, S, C), the best first."""
    rank_BSX = scores_BSX.detach()
    if balance_bias_X is not None:
        rank_BSX = rank_BSX + balance_bias_X
    if mlp.top_groups < mlp.num_groups:
        grouped = rank_BSX.unflatten(-1, (mlp.num_groups, -1))
        counted = min(2, grouped.shape[-1]) if mlp.balance_bias else 1
        goodness = grouped.topk(counted, dim=-1).values.sum(-1)
        best = goodness.topk(mlp.top_groups, dim=-1).indices
        closed = torch.ones_like(goodness, dtype=torch.bool).scatter_(-1, best, value=False)
        rank_BSX = grouped.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(-2)
    return rank_BSX.topk(mlp.top_k, dim=-1).indices


def weights_of(scores_BSX: torch.Tensor, expert_BSC: torch.Tensor, mlp: MoeMlp) -> torch.Tensor:
    weight_BSC = scores_BSX.gather(-1, expert_BSC)
    if mlp.normalize_top_k:
        weight_BSC = weight_BSC / (weight_BSC.sum(-1, keepdim=True) + EPSILON)
    return weight_BSC * mlp.routed_scale


def marks_of(expert_BSC: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Whether a token chose an expert, (B, S, X)."""
    marks = torch.zeros((*expert_BSC.shape[:2], num_experts), dtype=torch.bool, device=expert_BSC.device)
    return marks.scatter_(-1, expert_BSC, value=True)


def within_capacity(
    marks_BSX: torch.Tensor, earlier_BX: torch.Tensor, seq_len: int, capacity_factor: float, mlp: MoeMlp
) -> torch.Tensor:
    """Which of the marks an expert takes, where it is chosen `earlier_BX` times at earlier positions of the
    sequence, which has `seq_len` in all."""
    capacity = math.ceil(capacity_factor * seq_len * mlp.top_k / mlp.num_experts)
    place_BSX = marks_BSX.long().cumsum(1) + earlier_BX.unsqueeze(1)
    return marks_BSX & (place_BSX <= capacity)


def balance_loss(scores_BSX: torch.Tensor, count_BX: torch.Tensor, seq_len: int, mlp: MoeMlp) -> torch.Tensor:
    """This part's share of sum(f * P) over experts, summed over sequences: f is an expert's share of the
    sequence's choices `count_BX` over the even one, P the mean over all `seq_len` positions of its part of a
    token's scores."""
    part_BSX = scores_BSX / (scores_BSX.sum(-1, keepdim=True) + EPSILON)
    share_BX = count_BX.to(part_BSX.dtype) * (mlp.num_experts / (mlp.top_k * seq_len))
    return (share_BX * part_BSX.sum(1) / seq_len).sum()


def moved_bias(balance_bias_X: torch.Tensor, load_X: torch.Tensor, rate: float) -> torch.Tensor:
    """The balance bias after a step in which experts were chosen `load_X` times: lower by `rate` for those above
    the mean, higher for those below it (arXiv:2408.15664 algorithm 1)."""
    # In whole numbers, so that a load that is the mean is exactly that.
    surplus_X = load_X * load_X.numel() - load_X.sum()
    return balance_bias_X - rate * surplus_X.sign().to(balance_bias_X.dtype)
