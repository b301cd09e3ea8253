"""From shapes to numbers: fill the parameters that were laid out on the meta device with this rank's part.

Every rank draws the whole tensor and keeps its part (`model/initialize.py` says why); one tensor at a time is
whole in memory.
"""

from collections.abc import Callable
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

    def initial(name: str, parameter: nn.Parameter) -> torch.Tensor:
        full = initial_value(piece.spec, seed, prefix + name, parameter.shape, dtype).to(device)
        if not isinstance(parameter, DTensor):
            return full
        return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)

    fill(piece, module, initial)


def fill(piece: Transformer, module: nn.Module, value_of: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Put `value_of` in the place of each meta parameter of `module`, by its name there."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            owner_name, _, last = name.rpartition(".")
            owner = module.get_submodule(owner_name)
            setattr(owner, last, nn.Parameter(value_of(name, parameter)))
    piece.tie()
