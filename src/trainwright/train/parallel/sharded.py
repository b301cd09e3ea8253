"""Data parallelism where each rank holds a shard of the piece (ZeRO, arXiv:1910.02054), by PyTorch's FSDP2.

The stage says when shards are gathered and gradients are scattered:

    zero 1  parameters are gathered once and gradients scattered once per step
    zero 2  gradients are scattered after each microbatch's backward, so no rank keeps whole ones; of a rank with
            several chunks, when a round of microbatches has gone through one, so that one chunk's are whole
    zero 3  parameters are given back after each use too, layer by layer; or only after backward, where they stay
            gathered after forward

Optimizer state is sharded in all three. With dp_replicate above 1 (HSDP) shards are kept within groups, and
gradients are then summed across them, once per step. FSDP2 would divide by the ranks; here gradients are summed.

Experts are a unit of their own inside their layer: they are cut over the ranks that hold the same ones (edp).
Weights that low-precision products read may be gathered as codes (`gathered_codes.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import mixtures
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.gathered_codes import gather_codes
from trainwright.train.parallel.local import bytes_of, local_of
from trainwright.train.precision.gathered import GatheredWeight

Fill = Callable[[Transformer, nn.Module, str], None]
"""Gives the parameters of a module, which has this prefix in its piece, their values."""


class Sharded:
    """See the file's first paragraph. `fill` is called on each part before it is cut, so that no more than one
    layer is ever whole. `reshard` gives parameters back after forward. `in_few_bits`: by module and parameter,
    what is gathered as codes; those that stay are held by whoever reads them."""

    def __init__(
        self,
        pieces: list[Transformer],
        mesh: Mesh,
        zero: int,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        fill: Fill,
        *,
        reshard: bool,
        splits_backward: bool,
        in_few_bits: Mapping[tuple[nn.Module, str], GatheredWeight],
    ) -> None:
        self._mesh, self._zero = mesh, zero
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=gradient_dtype, cast_forward_inputs=False
        )
        self._whole_values = sum(local_of(each).numel() for piece in pieces for each in piece.parameters())
        codes = sum(local_of(getattr(module, name)).numel() for module, name in in_few_bits)
        self._gathered_values = self._whole_values - codes
        self._compute_bytes, self._gradient_bytes = compute_dtype.itemsize, gradient_dtype.itemsize
        axes = ("dp_replicate", "dp_shard") if mesh.dp_replicate > 1 else ("dp_shard",)
        submesh, expert_submesh = mesh.submesh(*axes), mesh.expert_submesh(*(f"e{axis}" for axis in axes))

        def shard(piece: Transformer, module: nn.Module, prefix: str, over: DeviceMesh) -> nn.Module:
            fill(piece, module, prefix)
            fully_shard(
                module,
                mesh=over,
                reshard_after_forward=reshard,
                shard_placement_fn=partial(_even_cut, ranks=over.size(over.ndim - 1)),
                mp_policy=policy,
            )
            gather_codes(module, in_few_bits)
            return module

        for piece in pieces:
            units: list[nn.Module] = []
            parts = {
                **{f"layers.{name}.": layer for name, layer in piece.layers.items()},
                **{f"later.{name}.": module for name, module in piece.later.items()},
            }
            for prefix, part in parts.items():
                for place, mixture in mixtures(part):
                    units.append(shard(piece, mixture.experts, f"{prefix}{place}.experts.", expert_submesh))
                units.append(shard(piece, part, prefix, submesh))
            shard(piece, piece, "", submesh)
            _gather_ahead(piece, units)
            for module in _sharded_modules(piece):
                module.set_gradient_divide_factor(1.0)
                # gloo and NCCL can add but not add and divide in one.
                module.set_force_sum_reduction_for_comms(True)
                if splits_backward:
                    _sum_alike(module, is_replicated=mesh.dp_replicate > 1)
                if mesh.dp_replicate > 1:
                    # Norms have their gradients before weights do, and may have left with an earlier microbatch's:
                    # HSDP keeps the sums of a layer end to end, and needs each of them every time.
                    module.set_reduce_scatter_unused_params(True)
        self._pieces = pieces

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for piece in self._pieces:
            yield from piece.named_parameters()

    def copies(self, parameter: nn.Parameter) -> int:
        return 1  # The parameters are DTensors over dp, whose placements say it.

    def held_bytes(self) -> dict[str, float]:
        shards = sum(bytes_of(parameter) for _, parameter in self.parameters())
        gathered = 0 if self._zero == 3 else self._gathered_values * self._compute_bytes
        gradients = self._whole_values * self._gradient_bytes if self._zero == 1 else shards
        return {"parameters": float(shards + gathered), "gradients": float(gradients)}

    def before_act(self) -> None:
        # FSDP2 keeps what it reduced last, one unit's whole gradients in each piece, until the piece reduces again
        # or the step ends. An act later they have left.
        for piece in self._pieces:
            assert isinstance(piece, FSDPModule)
            state = piece._get_fsdp_state()
            for event in _reductions_let_go(state._comm_ctx):
                torch.accelerator.current_stream().wait_event(event)

    def before_backward(self, piece: int, *, is_last: bool, ends_round: bool) -> None:
        reduces = is_last or self._zero == 3 or (self._zero == 2 and ends_round)
        self._ask(piece, is_last=is_last, reduces=reduces, reshards=is_last or self._zero == 3)

    def before_input_gradient(self, piece: int) -> None:
        # Parameters are of no more use to this microbatch; its gradients are not whole yet.
        self._ask(piece, is_last=False, reduces=False, reshards=self._zero == 3)

    def after_weight_gradient(self, piece: int, *, is_last: bool, ends_round: bool) -> None:
        reduces = is_last or self._zero == 3 or (self._zero == 2 and ends_round)
        self._ask(piece, is_last=is_last, reduces=reduces, reshards=is_last)
        # FSDP2's hooks are those of a backward through the layers, which this was not. What it does at a
        # backward's end for layers without a hook is what is wanted for all: PyTorch's pipelines call it as well.
        root = self._pieces[piece]
        assert isinstance(root, FSDPModule)
        root._get_fsdp_state()._root_post_backward_final_callback()

    def _ask(self, piece: int, *, is_last: bool, reduces: bool, reshards: bool) -> None:
        """Tell FSDP2 what to do with a piece's gradients and parameters from now on."""
        root = self._pieces[piece]
        assert isinstance(root, FSDPModule)
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(reduces)
        root.set_requires_all_reduce(is_last)
        root.set_reshard_after_backward(reshards)

    def reduce(self) -> None:
        """Nothing is left to do: FSDP2 has reduced each layer's gradients inside the last backward."""

    def after_update(self) -> None:
        for _, parameter in self.parameters():
            parameter.grad = None


def _gather_ahead(piece: Transformer, units: list[nn.Module]) -> None:
    """Let each unit's backward gather the one that comes next. FSDP2 would take the one that went forward before:
    of a pipeline's first layer that is the last layer, for a microbatch whose backward isn't near."""
    for before, unit in zip([piece, *units], [*units, piece], strict=True):
        assert isinstance(unit, FSDPModule)
        assert isinstance(before, FSDPModule)
        unit.set_modules_to_backward_prefetch([before])


def _even_cut(parameter: nn.Parameter, *, ranks: int) -> Shard | None:
    """Where stacked experts are fewer than ranks or don't go evenly, another dim than the first may; None: the
    first."""
    shape = local_of(parameter).shape
    if len(shape) < 3 or shape[0] % ranks == 0:
        return None
    return next((Shard(dim) for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def _sum_alike(module: FSDPModule, *, is_replicated: bool) -> None:
    """Keep a unit's gradients in the format of sums from the first on. Where backward is split, those of norms are
    older than those of weights when both leave, and FSDP2 takes gradients of one format alone."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            add = partial(
                _add_in_format_of_sums, group, each, each.accumulate_unsharded_grad_if_needed, is_replicated
            )
            each.accumulate_unsharded_grad_if_needed = add


def _add_in_format_of_sums(group: Any, each: Any, add: Callable[[], None], is_replicated: bool) -> None:
    add()
    if not hasattr(each, "_unsharded_param"):
        return
    each.to_accumulated_grad_if_needed()
    unsharded = each._unsharded_param
    has_none = unsharded.grad is None and each.unsharded_accumulated_grad is None
    if is_replicated and group.reduce_grads and has_none and each.reduce_dtype is not None:
        each.unsharded_accumulated_grad = torch.zeros_like(unsharded, dtype=each.reduce_dtype)


def _reductions_let_go(context: Any) -> list[Any]:
    """Drop the inputs of reductions that are under way; events that memory must wait for, on a device that has
    them."""
    # A list since torch 2.13, at most one before; neither is there before the first forward.
    states = getattr(context, "reduce_scatter_states", [])
    before = getattr(context, "reduce_scatter_state", None)
    if before is not None:
        states, context.reduce_scatter_state = [before], None
    events = [each.event for each in states if each.event is not None]
    states.clear()
    return events


def _sharded_modules(piece: nn.Module) -> Iterator[FSDPModule]:
    for module in piece.modules():
        if isinstance(module, FSDPModule):
            yield module
