"""The loss of a microbatch: cross-entropies summed over its targets, of logits whole or cut along the vocabulary.

A sum, because the mean of a step is over the targets of all ranks and microbatches: each contributes its sum
divided by the step's global count, gradients are added up over dp, and unequal counts stay right.

-log p(target) = log(sum(exp(logits))) - logit(target), in fp32 at least. Where each rank of a tp group has a part
of the vocabulary, the ranks exchange two numbers per token, their parts of the two terms, instead of logits
(Megatron-LM, arXiv:1909.08053 s3). Kept for backward are the logits as they came and a number per token; the
gradient is softmax(logits) less one at the target.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather
from trainwright.train.data import IGNORED
from trainwright.train.model.later_tokens import shifted


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of the vocabulary in a tp group, from token `first` on."""

    first: int
    group: dist.ProcessGroup
    clock: Clock

    def gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers` of all ranks of the group, stacked."""
        ranks = self.group.size()
        whole = numbers.new_empty((ranks * numbers.shape[0], *numbers.shape[1:]))
        with self.clock.of("tp"):
            all_gather(whole, numbers, group=self.group)
        return whole.unflatten(0, (ranks, -1))


def summed_cross_entropy(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, part: VocabularyPart | None = None
) -> torch.Tensor:
    """Sum of -log p(target), a scalar; positions with target `IGNORED` don't count. The same on every rank of a
    tp group, each of which gives the logits of its `part`."""
    return _SummedCrossEntropy.apply(  # pyright: ignore[reportReturnType]
        logits_BSV.flatten(0, 1), targets_BS.flatten(), part
    )


def summed_losses(
    logits: torch.Tensor | tuple[torch.Tensor, ...],
    targets_BS: torch.Tensor,
    part: VocabularyPart | None,
    later_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of the next token, and the loss that is trained on: that, and `later_weight` times
    the sum of those of each later token that is predicted (arXiv:2412.19437 eq. 24 and 25).

    Module k has at a position the target that the model has k positions further on in the same sequence; none at
    the last k, and none where that is `IGNORED`. All are divided by one number, as in the paper: the next token's
    count of targets, so that a module with fewer of them weighs less.
    """
    if isinstance(logits, torch.Tensor):
        loss = summed_cross_entropy(logits, targets_BS, part)
        return loss, loss
    loss = total = summed_cross_entropy(logits[0], targets_BS, part)
    for further, logits_BSV in enumerate(logits[1:], 1):
        later = summed_cross_entropy(logits_BSV, shifted(targets_BS, further, filler=IGNORED), part)
        total = total + later_weight * later
    return loss, total


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, part: VocabularyPart | None
    ) -> torch.Tensor:
        place_T = targets_T - (part.first if part else 0)
        here_T = (place_T >= 0) & (place_T < logits_TV.shape[1]) & (targets_T != IGNORED)
        place_T = place_T.masked_fill(~here_T, 0)
        precise = _precise_dtype(logits_TV)
        # One pass gives logit - log(sum(exp(logits))) of every token; any column then gives the sum's logarithm.
        log_part_T = logits_TV[:, 0].to(precise) - F.log_softmax(logits_TV, dim=-1, dtype=precise)[:, 0]
        logit_T = logits_TV.gather(1, place_T.unsqueeze(1)).squeeze(1).to(precise).masked_fill(~here_T, 0.0)
        log_total_T = log_part_T
        if part is not None:
            parts = part.gathered(torch.stack((log_part_T, logit_T)))
            log_total_T, logit_T = torch.logsumexp(parts[:, 0], dim=0), parts[:, 1].sum(0)
        counted_T = targets_T != IGNORED
        # This rank's softmax is of its part: it has the share exp(log_part - log_total) of the whole.
        share_T = torch.exp(log_part_T - log_total_T) * counted_T
        ctx.save_for_backward(logits_TV, share_T, place_T, here_T)
        return ((log_total_T - logit_T) * counted_T).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_TV, share_T, place_T, here_T = ctx.saved_tensors
        gradient_TV = F.softmax(logits_TV, dim=-1, dtype=_precise_dtype(logits_TV))
        gradient_TV.mul_((share_T * gradients[0]).unsqueeze(1))
        one_T = here_T.to(gradient_TV.dtype) * gradients[0]
        gradient_TV.scatter_add_(1, place_T.unsqueeze(1), -one_T.unsqueeze(1))
        return gradient_TV.to(logits_TV.dtype), None, None


def _precise_dtype(logits_TV: torch.Tensor) -> torch.dtype:
    return torch.float32 if logits_TV.dtype in (torch.bfloat16, torch.float16) else logits_TV.dtype
