"""A rank's own part of a tensor, and how many ranks hold the same part."""

import torch
from torch.distributed.tensor import DTensor, Replicate


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank stores, without a copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_alike(whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a tensor that is cut as `whole` is, marks of partial sums included; itself
    where that is plain."""
    if not isinstance(whole, DTensor):
        return local
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def copies_of(tensor: torch.Tensor) -> int:
    """Ranks of the tensor's own mesh that store the same elements as this one; 1 for a plain tensor."""
    copies = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                copies *= tensor.device_mesh.size(axis)
    return copies


def bytes_of(tensor: torch.Tensor | None) -> int:
    """Bytes of this rank's part."""
    if tensor is None:
        return 0
    local = local_of(tensor)
    return local.numel() * local.element_size()
