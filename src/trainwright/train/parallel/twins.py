"""Stages that two ranks of a pipeline hold, one for each way that microbatches go (DualPipe, arXiv:2412.19437
s3.2.3): rank r and its mirror image, rank pp - 1 - r, have the same two stages.

Each has the gradients of its own microbatches, which are half of all. After data parallelism has summed either
half over dp, the two are added up here: both take the same update and stay equal, and a shard's twin is a shard.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from trainwright.spec.units import MIB
from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh
from trainwright.train.parallel.local import local_of

BUCKET_BYTES = 25 * MIB
"""As in `replicated.py`."""


@torch.no_grad()
def sum_over_twins(parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, clock: Clock) -> None:
    """Add the twin's gradients to this rank's. Twins have their chunks in opposite order, so names decide."""
    gradients = [_gradient(name, parameter) for name, parameter in sorted(parameters, key=lambda each: each[0])]
    with clock.of("pp"):
        for bucket in _buckets(gradients):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            dist.all_reduce(flat, group=mesh.groups["twins"])
            for each, total in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                each.copy_(total.view_as(each))


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What travels together: at most `BUCKET_BYTES`, or one tensor."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for each in gradients:
        num_bytes = each.numel() * each.element_size()
        if num_bytes > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(each)
        room -= num_bytes
    return buckets


def _gradient(name: str, parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, f"{name} has no gradient"
    return local_of(parameter.grad)
