"""Codes in the place of weights in what FSDP2 gathers.

FSDP2 asks a shard for what to gather, and hands over what has arrived, where the shard has methods for it
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`; torchao's fp8 all-gather has a subclass of tensors for them). Here
they are attributes of the plain shard, so that optimizer, clipping and checkpoints see nothing of it. What travels
is bytes, as gloo has no fp8.

What the module then has as its parameter has the weight's shape and its gradient, but no values: products of few
bits read the codes (`precision/shared.py`), and nothing else reads these weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainwright.train.precision.gathered import GatheredWeight, Shard


def gather_codes(module: nn.Module, weights: Mapping[tuple[nn.Module, str], GatheredWeight]) -> None:
    """Of a unit that was just sharded, gather as codes what is among `weights`, by module and parameter."""
    assert isinstance(module, FSDPModule)
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            weight = weights.get((each._module_info.module, each._module_info.param_name))
            if weight is None:
                continue
            values: Any = each._sharded_local_tensor
            cut, padded, compute = (
                each.fsdp_placement.dim,
                each.padded_sharded_param_size,
                each.mp_policy.param_dtype,
            )
            assert compute is not None
            start = each.shard_mesh.get_local_rank() * padded[cut]
            weight.place(Shard(values, each._orig_size, cut, start, padded, compute))
            travelling = _Travelling(weight, compute)
            values.fsdp_pre_all_gather = travelling.sent
            values.fsdp_post_all_gather = travelling.arrived
            each._init_extensions()


class _Travelling:
    """A weight's two methods, with FSDP2's arguments and results."""

    def __init__(self, weight: GatheredWeight, compute: torch.dtype) -> None:
        self._weight, self._compute = weight, compute

    def sent(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self._weight.codes(),), None

    def arrived(
        self, outputs: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple["_WithoutValues", tuple[torch.Tensor, ...]] | None:
        (codes,) = outputs
        self._weight.arrived(codes)
        if out is not None:
            return None
        return _WithoutValues(codes.new_zeros((), dtype=self._compute)), ()


class _WithoutValues:
    """What FSDP2 takes a view of (`torch.as_strided`) to make its parameter: one number, in every place."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        assert function is torch.as_strided
        whole, shape = args[:2]
        return whole._number.expand(shape)
