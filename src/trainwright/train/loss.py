"""The loss of a microbatch: cross-entropies summed over its targets.

A sum, because the mean of a step is over the targets of all ranks and microbatches: each contributes its sum
divided by the step's global count, gradients are added up over dp, and unequal counts stay right. The softmax is
in fp32 at least. Logits that are cut along the vocabulary (a DTensor) stay so: PyTorch's `loss_parallel`
exchanges a maximum and a sum per token instead of the logits.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainwright.train.data import IGNORED


def summed_cross_entropy(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Sum of -log p(target), a scalar; positions with target `IGNORED` don't count."""
    logits_TV = logits_BSV.flatten(0, 1)
    if logits_TV.dtype in (torch.bfloat16, torch.float16):
        logits_TV = logits_TV.float()
    loss = F.cross_entropy(logits_TV, targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


def vocabulary_cut(is_cut: bool) -> AbstractContextManager[None]:
    """To be held around forward and backward where the logits are cut along the vocabulary."""
    return loss_parallel() if is_cut else nullcontext()
