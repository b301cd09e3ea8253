"""One tensor on two stages: an embedding at the front of the pipeline that the back reads too, as its head or for
multi-token prediction.

Both ends hold a copy with the same initial value. Summing the two gradients on both keeps the copies equal
(Megatron-LM's embedding group). The tensor counts once in the norm, on the first stage.
"""

import torch.distributed as dist
from torch import nn

from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh
from trainwright.train.parallel.local import local_of


def sum_over_ends(parameter: nn.Parameter, mesh: Mesh, clock: Clock) -> None:
    """Add the other end's gradient to this one's."""
    assert parameter.grad is not None
    with clock.of("pp"):
        dist.all_reduce(local_of(parameter.grad), group=mesh.groups["first_last"])
