"""From shapes to numbers: fill the parameters that were laid out on the meta device with this rank's part.

Every rank draws the whole tensor and keeps its part (`model/initialize.py` says why); one tensor at a time is
whole in memory.
"""

from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainwright.train.model.initialize import initial_value
from trainwright.train.model.transformer import Transformer


class Values(Protocol):
    """What fills the meta parameters of a module: `materialize`, or what stands in for it where there are none."""

    def __call__(
        self,
        piece: Transformer,
        module: nn.Module,
        prefix: str,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...


def materialize(
    piece: Transformer, module: nn.Module, prefix: str, *, seed: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Give the meta parameters of `module`, which stands at `prefix` in `piece`, their initial values."""
    for name, parameter in list(module.named_parameters()):
        if not parameter.is_meta:
            continue
        full = initial_value(piece.spec, seed, prefix + name, parameter.shape, dtype).to(device)
        value: torch.Tensor = full
        if isinstance(parameter, DTensor):
            value = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        owner_name, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner_name), last, nn.Parameter(value))
    piece.tie()
