"""The ranks that aren't there, and the numbers that fake tensors don't have.

`fake_world` makes this process one rank of a world of any size, whose groups PyTorch's fake backend serves. Under
`Fabric` collectives and transfers are over at once: what would arrive has the right shape, type and size.

A program on fake tensors may still ask for numbers. Three rules answer it:

    a number read off      1, of the type that is asked for (the loss, the gradient's norm, ...)
    choices of experts     token t takes experts (t * top_k + c) mod X, c = 0 .. top_k - 1: as even as may be, and
                           the same on every rank (`even_choice`)
    what follows of it     lengths, orders, places, and what follows from positions alone (masks, tables), is
                           computed beside the fake tensors; what other ranks send of it is what this one sends
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from trainwright.spec.model import MoeMlp

MOST_KNOWN = 1 << 24
"""Values of a tensor that is computed beside a fake one, at the most."""
LIST_AND_WORK = ("allreduce_", "broadcast_", "allgather_", "reduce_scatter_", "alltoall_")
TENSOR_AND_WORK = ("_allgather_base_", "_reduce_scatter_base_")


@contextmanager
def fake_world(world: int, rank: int) -> Iterator[None]:
    """This process as `rank` of `world`."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers plans by what a mesh looks like, and with them groups that are gone.
        _gen_transform_infos.cache_clear()
        _clear_sharding_prop_cache()


def even_choice(scores_BSX: torch.Tensor, balance_bias_X: torch.Tensor | None, mlp: MoeMlp) -> torch.Tensor:
    """In the place of `routing.chosen_experts`: experts by a token's place alone, (B, S, C)."""
    size, positions, _ = scores_BSX.shape
    place = torch.arange(size * positions * mlp.top_k, device=scores_BSX.device)
    return (place % mlp.num_experts).view(size, positions, mlp.top_k)


class Fabric(TorchDispatchMode):
    """Answers in the place of other ranks, and of numbers, while it is on; above a `FakeTensorMode`."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented  # They turn it into operators on plain tensors, which come back here.
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return _answered(func, args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _number(args[0])
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped(*args, **kwargs)
        known = self._known(func, args, kwargs)
        if known is None:
            result = func(*args, **kwargs)
            if func._schema.is_mutable:
                _forget(result)
            return result
        if _has_own_shape(func, args):
            # The result's shape is a matter of values.
            return _remembered(self._fake.from_tensor(known), known)
        return _remembered(func(*args, **kwargs), known)

    def _known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result in numbers, where all that it is made of is known."""
        if func.namespace != "aten":
            return None
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if not tensors:
            if not _is_known_from_nothing(func._opname, leaves, kwargs):
                return None
            if func._opname == "arange" and max(filter(_is_number, leaves), default=0) > MOST_KNOWN:
                return None
        elif (
            not all(value_of(each) is not None for each in tensors)
            or max(each.numel() for each in tensors) > MOST_KNOWN
        ):
            return None
        if tensors and func._schema.is_mutable and func._opname == "copy_":
            return None
        with unset_fake_temporarily(), torch.no_grad():
            plain = tree_map_only(torch.Tensor, value_of, (args, kwargs))
            result = func(*plain[0], **plain[1])
        parts = result if isinstance(result, (tuple, list)) else (result,)
        is_small = all(isinstance(each, torch.Tensor) and each.numel() <= MOST_KNOWN for each in parts)
        return result if is_small else None


def _is_known_from_nothing(name: str, leaves: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that takes no tensors gives numbers that matter: positions, constants, and zeros and
    ones of whole numbers."""
    if name in ("arange", "scalar_tensor"):
        return all(_is_number(each) for each in leaves[:1])
    dtype = kwargs.get("dtype")
    return name in ("zeros", "ones") and dtype is not None and not dtype.is_floating_point


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_own_shape(func: Any, args: Any) -> bool:
    if func._opname in ("bincount", "nonzero", "masked_select", "repeat_interleave", "unique2"):
        return True
    return func._opname == "index" and any(
        each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
    )


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A fake tensor's numbers, where they are known."""
    return getattr(tensor, "_known", None) if isinstance(tensor, FakeTensor) else tensor


def _remembered(result: Any, known: Any) -> Any:
    if isinstance(result, (tuple, list)):
        for each, value in zip(result, known, strict=True):
            each._known = value
    else:
        result._known = known
    return result


def _forget(result: Any) -> None:
    for each in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(each, FakeTensor) and hasattr(each, "_known"):
            del each._known  # pyright: ignore[reportAttributeAccessIssue]


def _number(tensor: torch.Tensor) -> Any:
    value = value_of(tensor)
    if value is not None:
        with unset_fake_temporarily():
            return value.item()
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _grouped(one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """PyTorch multiplies groups in fp32 too, but knows the result's shape for bf16 alone."""
    if other.ndim == 2:
        return one.new_empty((offs.shape[0], one.shape[0], other.shape[1]))
    return one.new_empty((one.shape[0], other.shape[-1]))


def _answered(func: Any, args: Any) -> Any:
    """A collective or transfer that is over: what `c10d`'s operators give back."""
    name, work = func._opname, FakeWork().boxed()
    if name == "_allgather_base_":
        output, mine = args[0], value_of(args[1])
        if mine is not None:
            with unset_fake_temporarily():
                output._known = mine.flatten().repeat(output.numel() // mine.numel()).view(output.shape)
    if name == "alltoall_base_":
        output, mine = args[0], value_of(args[1])
        if mine is not None:
            group = dist.ProcessGroup.unbox(args[2])
            with unset_fake_temporarily():
                # Of every rank comes what this one sends itself.
                part = mine.view(group.size(), -1)[group.rank()]
                output._known = part.repeat(group.size()).view(output.shape)
    if name in LIST_AND_WORK:
        return args[0], work
    if name in TENSOR_AND_WORK:
        return args[0], work
    return work
