"""The loss of a microbatch: cross-entropies summed over its targets, of logits whole or cut along the vocabulary.

A sum, because the mean of a step is over the targets of all ranks and microbatches: each contributes its sum
divided by the step's global count, gradients are added up over dp, and unequal counts stay right.

-log p(target) = log(sum(exp(logits))) - logit(target), in fp32 at least. Where each rank of a tp group has a part
of the vocabulary, the ranks exchange two numbers per token, their parts of the two terms, instead of logits
(Megatron-LM, arXiv:1909.08053 s3). Kept for backward are the logits as they came and a number per token; the
gradient is softmax(logits) less one at the target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather
from trainwright.train.data import IGNORED


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
    return loss_of_logits(logits_BSV, targets_BS, part)[0]


def loss_of_logits(
    logits_BSV: torch.Tensor,
    targets_BS: torch.Tensor,
    part: VocabularyPart | None,
    *,
    z_loss: float = 0.0,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is minimised: `scale` times the sum of -log p(target) + z_loss * log(Z)^2 over the targets, Z being the
    softmax's denominator (PaLM, arXiv:2204.02311 s5); and, to be told, the sum of -log p(target) alone."""
    return _LossOfLogits.apply(  # pyright: ignore[reportReturnType]
        logits_BSV.flatten(0, 1), targets_BS.flatten(), part, z_loss, scale
    )


class Terms(NamedTuple):
    """Of each token: what its loss and its logits' gradient are made of."""

    place_T: torch.Tensor
    """Column of the target in this rank's part of the vocabulary, 0 where it isn't `here`."""
    here_T: torch.Tensor
    counted_T: torch.Tensor
    log_part_T: torch.Tensor
    """log(sum(exp(logits))) over this rank's part."""
    log_total_T: torch.Tensor
    logit_T: torch.Tensor
    """Of the target, on every rank."""

    def sums(self, z_loss: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The two results of a loss (`loss_of_logits`)."""
        entropy_T = (self.log_total_T - self.logit_T) * self.counted_T
        entropy = entropy_T.sum()
        if not z_loss:
            return entropy * scale, entropy
        return (entropy_T + z_loss * self.log_total_T.square() * self.counted_T).sum() * scale, entropy

    def slope_T(self, z_loss: float) -> torch.Tensor:
        """By which each token's softmax enters its gradient: d(log Z + z log(Z)^2) / d(log Z)."""
        return (1 + 2 * z_loss * self.log_total_T) * self.counted_T


def terms_of(
    targets_T: torch.Tensor,
    columns: int,
    log_part_T: torch.Tensor,
    logit_at: Callable[[torch.Tensor], torch.Tensor],
    part: VocabularyPart | None,
) -> Terms:
    """From this rank's logarithms of sums and a look at its logits to all that the loss needs: where the
    vocabulary is cut, its ranks exchange two numbers per token."""
    place_T = targets_T - (part.first if part else 0)
    here_T = (place_T >= 0) & (place_T < columns) & (targets_T != IGNORED)
    place_T = place_T.masked_fill(~here_T, 0)
    logit_T = logit_at(place_T).to(log_part_T.dtype).masked_fill(~here_T, 0.0)
    log_total_T = log_part_T
    if part is not None:
        parts = part.gathered(torch.stack((log_part_T, logit_T)))
        log_total_T, logit_T = torch.logsumexp(parts[:, 0], dim=0), parts[:, 1].sum(0)
    return Terms(place_T, here_T, targets_T != IGNORED, log_part_T, log_total_T, logit_T)


def log_sums(logits_TV: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of every row, in fp32 at least."""
    precise = precise_dtype(logits_TV)
    # One pass gives logit - log(sum(exp(logits))) of every token; any column then gives the sum's logarithm.
    return logits_TV[:, 0].to(precise) - F.log_softmax(logits_TV, dim=-1, dtype=precise)[:, 0]


def column_of(logits_TV: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Looks up one column of each row."""
    return lambda place_T: logits_TV.gather(1, place_T.unsqueeze(1)).squeeze(1)


def gradient_of(
    logits_TV: torch.Tensor,
    share_T: torch.Tensor,
    place_T: torch.Tensor,
    here_T: torch.Tensor,
    scale: torch.Tensor | float,
) -> torch.Tensor:
    """`scale` times (softmax of this rank's part, `share_T` of the whole, less one at the target)."""
    gradient_TV = F.softmax(logits_TV, dim=-1, dtype=precise_dtype(logits_TV))
    gradient_TV.mul_((share_T * scale).unsqueeze(1))
    one_T = here_T.to(gradient_TV.dtype) * scale
    gradient_TV.scatter_add_(1, place_T.unsqueeze(1), -one_T.unsqueeze(1))
    return gradient_TV.to(logits_TV.dtype)


class _LossOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        part: VocabularyPart | None,
        z_loss: float,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms = terms_of(targets_T, logits_TV.shape[1], log_sums(logits_TV), column_of(logits_TV), part)
        # This rank's softmax is of its part: it has the share exp(log_part - log_total) of the whole.
        share_T = torch.exp(terms.log_part_T - terms.log_total_T) * terms.slope_T(z_loss)
        ctx.save_for_backward(logits_TV, share_T, terms.place_T, terms.here_T)
        ctx.scale = scale
        objective, entropy = terms.sums(z_loss, scale)
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits_TV, share_T, place_T, here_T = ctx.saved_tensors
        gradient_TV = gradient_of(logits_TV, share_T, place_T, here_T, gradients[0] * ctx.scale)
        return gradient_TV, None, None, None, None


def precise_dtype(logits_TV: torch.Tensor) -> torch.dtype:
    """That losses are computed in."""
    return torch.float32 if logits_TV.dtype in (torch.bfloat16, torch.float16) else logits_TV.dtype
