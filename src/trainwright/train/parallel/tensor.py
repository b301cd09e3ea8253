"""Tensor parallelism (Megatron-LM, arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198), by DTensor.

Each layer is two cuts: heads and MLP width are cut by columns going in and by rows coming out, so a block needs
one collective in and one out. With sequence parallelism these are an all-gather and a reduce-scatter, and norms
and residuals work on a part of the positions; without it they are all-reduces. Embedding and head are cut along
the vocabulary, and logits stay cut into the loss.

Where there are fewer key/value heads than ranks, their projections are whole on every rank, each of which keeps
the one head that its query heads read.

The residual stream is made of plain tensors; DTensors live inside the blocks.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainwright.train.model.layers import Attention, Layer, Mlp
from trainwright.train.model.transformer import Transformer


def apply_tensor_parallel(piece: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a piece over the one-dimensional `mesh`, in place. Parameters may be on the meta device."""
    residual: Placement = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence_parallel else Whole()
    plan: dict[str, ParallelStyle] = {}
    if piece.embedding is not None:
        plan["embedding"] = VocabularyCut(residual)
    if piece.head is not None:
        plan["norm"] = norm
        plan["head"] = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
    if plan:
        parallelize_module(piece, mesh, plan)
    for layer in piece.layers.values():
        assert isinstance(layer, Layer)
        parallelize_module(layer, mesh, _layer_plan(layer, mesh, residual, norm))


def _layer_plan(
    layer: Layer, mesh: DeviceMesh, residual: Placement, norm: ParallelStyle
) -> dict[str, ParallelStyle]:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    kv_heads = attention.key.out_features // attention.d_head
    key_value = ColwiseParallel() if kv_heads % mesh.size() == 0 else OneHead(attention.d_head, kv_heads)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm,
        "attention": _gathered(residual, other_inputs=1),
        "attention.query": ColwiseParallel(),
        "attention.key": key_value,
        "attention.value": key_value,
        "attention.out": RowwiseParallel(output_layouts=residual),
        "mlp_norm": norm,
        "mlp": _gathered(residual),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=residual),
    }
    if attention.query_norm is not None:
        # One weight for all heads, which are cut: as for a sequence, but along dim 2.
        plan["attention.query_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["attention.key_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if mlp.gate is not None:
        plan["mlp.gate"] = ColwiseParallel()
    return plan


def _gathered(residual: Placement, other_inputs: int = 0) -> ParallelStyle:
    """The block's first input made whole; its other inputs are no tensors."""
    others = (None,) * other_inputs
    return PrepareModuleInput(input_layouts=(residual, *others), desired_input_layouts=(Replicate(), *others))


class Whole(ParallelStyle):
    """A module that every rank runs in full, with parameters that are DTensors like all others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _as_whole, _as_local)


def _as_whole(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    x = inputs[0]
    assert isinstance(x, torch.Tensor)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    return (x, *inputs[1:])


def _as_local(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


class VocabularyCut(ParallelStyle):
    """An embedding whose rows are cut over the ranks: each looks up the tokens that it has, the others give zero.

    DTensor's own cut embedding makes a gradient of the whole table on every rank; this one makes a gradient of
    the rank's rows.
    """

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight_VD = distribute_tensor(module.weight, device_mesh, (Shard(0),), src_data_rank=None)
        module.weight = nn.Parameter(weight_VD)
        rows_per_rank = math.ceil(module.num_embeddings / device_mesh.size())

        def forward(input: torch.Tensor) -> torch.Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            row_BS = input - device_mesh.get_local_rank() * rows_per_rank
            rows = weight.to_local()
            elsewhere_BS = (row_BS < 0) | (row_BS >= rows.shape[0])
            x_BSD = F.embedding(row_BS.masked_fill(elsewhere_BS, 0), rows)
            x_BSD = x_BSD.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0)
            summand = DTensor.from_local(x_BSD, device_mesh, (Partial(),), run_check=False)
            return summand.redistribute(placements=(self.output,)).to_local()

        module.forward = forward
        return module


class OneHead(ParallelStyle):
    """A key or value projection with fewer heads than ranks: computed whole, then this rank's head is kept.

    The gradient that comes back is of one head and one rank's queries, so over the ranks it is a partial sum.
    """

    def __init__(self, d_head: int, num_heads: int) -> None:
        super().__init__()
        self.d_head = d_head
        self.num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _as_whole, self._keep)

    def _keep(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        whole_BSE = output.to_local(grad_placements=(Partial(),))
        head = mesh.get_local_rank() * self.num_heads // mesh.size()
        return whole_BSE.narrow(-1, head * self.d_head, self.d_head)
