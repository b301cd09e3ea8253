"""From the last norm's output to the loss, in the way that the recipe chooses.

    plain          logits are kept for backward, which makes their softmax and its gradient
    fused          the gradient is made in forward and written over the logits, a block of rows at a time, so that
                   no second tensor of their size ever lives (as Liger Kernel does, arXiv:2410.10989 s3.2)
    loss_chunks    the head's matmul, the loss and its gradients are done for one piece of the sequence after the
                   other, so that one piece's logits are alive; kept for backward are the gradients of the head's
                   input and weights (ibid.)

Whatever the way, under tensor parallelism ranks hold the logits of their part of the vocabulary. With chunks the
collectives of the head's input stand in forward: it is gathered, and its gradient summed, right there. The blocks
of `fused` are what one GPU kernel does in its registers; here they are PyTorch operations on any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from trainwright.train.loss import (
    Terms,
    VocabularyPart,
    column_of,
    gradient_of,
    log_sums,
    loss_of_logits,
    precise_dtype,
    terms_of,
)
from trainwright.train.model.functions import softcapped
from trainwright.train.model.linear import Linear
from trainwright.train.parallel.crossing import Crossing

BLOCK_VALUES = 2**18
"""Logits of a block of rows in the fused loss: 1 MiB in fp32, which stays in a core's cache."""


@dataclass(frozen=True)
class HeadLoss:
    """The head and the loss together. Under tp `part` says which part of the vocabulary is here, and `edge` how
    the head's input and its gradient cross into the block."""

    fused: bool = False
    chunks: int = 1
    z_loss: float = 0.0
    softcap: float | None = None
    """Logits are capped by it (`functions.softcapped`)."""
    later_weight: float = 0.0
    """Of the loss of each later token, in multi-token prediction."""
    part: VocabularyPart | None = None
    edge: Crossing | None = None

    def __call__(
        self, head: Linear, read: list[torch.Tensor], targets_BS: Sequence[torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is minimised, `scale` being one over the step's targets, and the summed cross-entropy of the next
        token alone (`loss.loss_of_logits`); both the same on every rank of a tp group.

        `read` is what the head reads for the next token, and then for each later one, whose losses are added with
        their weight (arXiv:2412.19437 eq. 24 and 25); `targets_BS` are of each of them (`Batch.targets`). All are
        divided by one number, as in the paper: a module with fewer targets weighs less.
        """
        objective, entropy = self._of_one(head, read[0], targets_BS[0], scale)
        for x_BSD, targets in zip(read[1:], targets_BS[1:], strict=True):
            later, _ = self._of_one(head, x_BSD, targets, scale * self.later_weight)
            objective = objective + later
        return objective, entropy

    def _of_one(
        self, head: Linear, x_BSD: torch.Tensor, targets_BS: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.chunks > 1:
            weight_VD, bias_V = _own(head.weight), None if head.bias is None else _own(head.bias)
            return _LossInChunks.apply(  # pyright: ignore[reportReturnType]
                x_BSD, weight_VD, bias_V, targets_BS, self, scale
            )
        logits_BSV = head(x_BSD)
        if not self.fused:
            if self.softcap is not None:
                logits_BSV = softcapped(logits_BSV, self.softcap)
            return loss_of_logits(logits_BSV, targets_BS, self.part, z_loss=self.z_loss, scale=scale)
        return _FusedLoss.apply(  # pyright: ignore[reportReturnType]
            logits_BSV.flatten(0, 1), targets_BS.flatten(), self, scale
        )

    def of_logits(
        self, logits_TV: torch.Tensor, targets_T: torch.Tensor, scale: float
    ) -> tuple[Terms, torch.Tensor]:
        """The loss's terms and the gradient of the logits, which aren't capped yet; the fused one stands in their
        place."""
        if self.softcap is not None:
            logits_TV = (
                (logits_TV if self.fused else logits_TV.clone()).div_(self.softcap).tanh_().mul_(self.softcap)
            )
        if self.fused:
            return _written_over(logits_TV, targets_T, self, scale)
        terms = terms_of(targets_T, logits_TV.shape[1], log_sums(logits_TV), column_of(logits_TV), self.part)
        share_T = torch.exp(terms.log_part_T - terms.log_total_T) * terms.slope_T(self.z_loss)
        gradient_TV = gradient_of(logits_TV, share_T, terms.place_T, terms.here_T, scale)
        return terms, gradient_TV.mul_(slope_of_cap(logits_TV, self.softcap)) if self.softcap else gradient_TV


def _own(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part as a plain tensor; its gradient comes back cut as the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def slope_of_cap(capped: torch.Tensor, softcap: float) -> torch.Tensor:
    """Of c tanh(x / c) at its value: 1 - tanh^2."""
    return 1 - (capped / softcap) ** 2


def _written_over(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, loss: HeadLoss, scale: float
) -> tuple[Terms, torch.Tensor]:
    """The gradient of the loss in the storage of the logits, with no more than a block of rows beside them."""
    rows = max(1, BLOCK_VALUES // logits_TV.shape[1])
    blocks = logits_TV.split(rows)
    log_part_T = torch.cat([log_sums(block_TV) for block_TV in blocks])
    terms = terms_of(targets_T, logits_TV.shape[1], log_part_T, column_of(logits_TV), loss.part)
    factor_T, one_T = terms.slope_T(loss.z_loss) * scale, terms.here_T.to(log_part_T.dtype) * scale
    for block_TV, log_T, factor, one, place in zip(
        blocks,
        *(each.split(rows) for each in (terms.log_total_T, factor_T, one_T, terms.place_T)),
        strict=True,
    ):
        softmax_TV = (block_TV.to(precise_dtype(block_TV)) - log_T.unsqueeze(1)).exp_()
        softmax_TV.mul_(factor.unsqueeze(1))
        softmax_TV.scatter_add_(1, place.unsqueeze(1), -one.unsqueeze(1))
        if loss.softcap is not None:
            softmax_TV.mul_(slope_of_cap(block_TV, loss.softcap))
        block_TV.copy_(softmax_TV)
    return terms, logits_TV


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, loss: HeadLoss, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # No operation has saved the logits: a matmul keeps its inputs. Autograd would refuse if one had.
        terms, gradient_TV = loss.of_logits(logits_TV.detach(), targets_T, scale)
        ctx.save_for_backward(gradient_TV)
        objective, entropy = terms.sums(loss.z_loss, scale)
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient_TV,) = ctx.saved_tensors
        # The program's upstream is one, as the scale is in the gradient already.
        return gradient_TV.mul_(gradients[0]), None, None, None


class _LossInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_BS: torch.Tensor,
        loss: HeadLoss,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        edge = loss.edge
        whole_BSD = edge.gathered(x_BSD) if edge is not None and edge.sequence_parallel else x_BSD
        d_whole_BSD = torch.empty_like(whole_BSD)
        # Summed over the pieces in the loss's precision, and rounded once.
        d_weight_VD = torch.zeros_like(weight_VD, dtype=precise_dtype(weight_VD))
        d_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=precise_dtype(bias_V))
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        pieces = (each.tensor_split(loss.chunks, dim=1) for each in (whole_BSD, d_whole_BSD, targets_BS))
        for piece_BSD, d_piece_BSD, targets in zip(*pieces, strict=True):
            flat_TD = piece_BSD.flatten(0, 1)
            logits_TV = F.linear(flat_TD, weight_VD, bias_V)
            terms, gradient_TV = loss.of_logits(logits_TV, targets.flatten(), scale)
            del logits_TV
            d_piece_BSD.copy_((gradient_TV @ weight_VD).view_as(piece_BSD))
            d_weight_VD += gradient_TV.T @ flat_TD
            if d_bias_V is not None:
                d_bias_V += gradient_TV.sum(0, dtype=d_bias_V.dtype)
            sums.append(terms.sums(loss.z_loss, scale))
        d_x_BSD = d_whole_BSD
        if edge is not None:
            d_x_BSD = edge.scattered_sum(d_whole_BSD) if edge.sequence_parallel else edge.summed(d_whole_BSD)
        kept_bias = () if d_bias_V is None else (d_bias_V.to(weight_VD.dtype),)
        ctx.save_for_backward(d_x_BSD, d_weight_VD.to(weight_VD.dtype), *kept_bias)
        objective, entropy = (torch.stack(each).sum() for each in zip(*sums, strict=True))
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        d_x_BSD, d_weight_VD, *d_bias = ctx.saved_tensors
        upstream = gradients[0]
        d_bias_V = d_bias[0] * upstream if d_bias else None
        return d_x_BSD * upstream, d_weight_VD * upstream, d_bias_V, None, None, None
