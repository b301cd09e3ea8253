"""Who holds which positions of a sequence: a rank's place in its cp group.

Under the causal mask a later position sees more keys. So where keys and values travel, the sequence is cut into
2 * cp chunks, of which rank r holds r and 2 * cp - 1 - r, one early and one late: every rank then has as much to
do (Llama 3, arXiv:2407.21783 s3.3.2). Where heads are exchanged every rank sees whole sequences, and it holds
contiguous positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainwright.spec.recipe import Recipe
from trainwright.train.clock import Clock

Core = Callable[..., torch.Tensor]
"""An attention core; `layers.attention_core` says what it is given."""


@dataclass(frozen=True)
class Context:
    """A rank's place in its cp group."""

    group: dist.ProcessGroup
    clock: Clock

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def positions_of(recipe: Recipe, cp: int, rank: int) -> torch.Tensor:
    """Positions in the sequence that `rank` of `cp` holds, in ascending order."""
    if recipe.cp_method == "all_to_all" or cp == 1:
        return torch.arange(recipe.seq_len).view(cp, -1)[rank]
    return torch.arange(recipe.seq_len).view(2 * cp, -1)[[rank, 2 * cp - 1 - rank]].flatten()
