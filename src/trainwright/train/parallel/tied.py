"""One tensor in two places: an embedding at the front of the pipeline that the back reads too, as its head or for
multi-token prediction.

Each end is a piece with a copy of its own, with the same initial value. The ends stand on two ranks, or as two
chunks on one rank where the pipeline is a V or goes both ways. Giving both copies the sum of both gradients keeps
them equal (Megatron-LM's embedding group). The tensor counts once in the norm.
"""

import torch.distributed as dist
from torch import nn

from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh
from trainwright.train.parallel.local import local_of


def sum_over_ends(copies: list[nn.Parameter], mesh: Mesh, clock: Clock) -> None:
    """Add up the gradients of the two ends' copies, of which this rank has one or both."""
    gradients = [local_of(copy.grad) for copy in copies if copy.grad is not None]
    assert len(gradients) == len(copies)
    with clock.of("pp"):
        if len(gradients) == 1:
            dist.all_reduce(gradients[0], group=mesh.groups["first_last"])
        else:
            here, there = gradients
            there.copy_(here.add_(there))
