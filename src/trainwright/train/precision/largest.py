"""The largest magnitude of a tensor, from which scales of the whole tensor are made, whatever ranks share it out.

    current    of the tensor itself; ranks that hold parts of it ask one another each time
    delayed    of the tensors that stood there in past steps (arXiv:2209.05433 s3, Transformer Engine's
               DelayedScaling), so that quantizing needs one pass. Ranks ask one another once a step. A tensor that
               has no past yet has that of the present: a scale of 1 in its place, as elsewhere, would flush the
               gradients of a first step to zero.

So scales depend on the seed and the step, and on no layout. Of a stack of matrices each has a largest value of its
own in `Current`, and all have one in `Delayed`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from trainwright.train.clock import Clock

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")


class Largest(Protocol):
    """Of the tensors of one linear layer."""

    def of(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        """What scales of `x` (..., N, K) are made from, fp32 that can be read as (..., 1, 1)."""
        ...

    def instead(self, role: Role, here: torch.Tensor) -> torch.Tensor:
        """The same of a tensor of which all ranks know that its largest values are `here`, those of its blocks
        or (..., 1, 1)."""
        ...


class Current:
    """See the file's first paragraph. `groups`: by role those over which parts of such a tensor lie."""

    def __init__(self, groups: Mapping[Role, Sequence[dist.ProcessGroup]], clock: Clock) -> None:
        self._groups, self._clock = groups, clock

    @torch.no_grad()
    def of(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        largest = _of_each(x)
        for group in self._groups.get(role, ()):
            with self._clock.of("tp"):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest

    def instead(self, role: Role, here: torch.Tensor) -> torch.Tensor:
        return here


class Delayed:
    """See the file's first paragraph. `current` is asked in the first step. Its state is `history_RH`: by role the
    largest value in each of the last steps, the newest first; 0 where there was none."""

    def __init__(self, steps: int, current: Current, device: torch.device) -> None:
        self._current = current
        self.history_RH = torch.zeros(len(ROLES), steps, device=device)
        self.seen_R = torch.zeros(len(ROLES), device=device)
        """In the step that is under way."""
        self.past_R = torch.zeros(len(ROLES), device=device)
        self.is_new = True

    @torch.no_grad()
    def of(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        return self.instead(role, self._current.of(role, x) if self.is_new else _of_each(x))

    @torch.no_grad()
    def instead(self, role: Role, here: torch.Tensor) -> torch.Tensor:
        place, largest = ROLES.index(role), here.amax()
        self.seen_R[place] = torch.maximum(self.seen_R[place], largest)
        # What was zero all the time, such as an expert that nobody chose, has no past either.
        past = self.past_R[place]
        return torch.where(past > 0, past, largest).expand(here.shape)

    def restored(self) -> None:
        """The history has been given other values."""
        self.seen_R.zero_()
        self.past_R = self.history_RH.amax(1)
        self.is_new = not bool(self.past_R.any())

    def advance(self) -> None:
        """The step is over, and `seen_R` is that of all ranks."""
        self.history_RH[:, 1:] = self.history_RH[:, :-1].clone()
        # A value that is no number says nothing of the steps to come, and would stay for all of them.
        self.history_RH[:, 0] = self.seen_R.where(self.seen_R.isfinite(), torch.zeros_like(self.seen_R))
        self.past_R = self.history_RH.amax(1)
        self.seen_R.zero_()
        self.is_new = False


def without_parts(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Without those whose ranks are all in another one, which say nothing new."""
    ranks = [frozenset(dist.get_process_group_ranks(group)) for group in groups]
    return [
        group
        for place, (group, own) in enumerate(zip(groups, ranks, strict=True))
        if not any(own < other for other in ranks) and own not in ranks[:place]
    ]


def _of_each(x: torch.Tensor) -> torch.Tensor:
    """(..., 1, 1) fp32 of (..., N, K)."""
    if not x.numel():
        return x.new_zeros((*x.shape[:-2], 1, 1), dtype=torch.float32)
    return torch.linalg.vector_norm(x, float("inf"), (-2, -1), keepdim=True).float()
