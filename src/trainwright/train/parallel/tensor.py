"""Tensor parallelism (Megatron-LM, arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198).

Each layer is two blocks: heads and MLP width are cut by columns going in and by rows coming out, so a block needs
one crossing in and one out (`parallel/crossing.py`). With sequence parallelism norms and residuals work on a part
of the positions. Embedding and head are cut along the vocabulary, and logits stay cut into the loss.

Where there are fewer key/value heads than ranks, their projections are whole on every rank, each of which computes
the one head that its query heads read.

Parameters are DTensors, so that data parallelism, clipping and checkpoints know what each rank has of the whole.
What computes are their local parts, as plain tensors: on DTensors every operation would pay a dispatch in Python.
A gradient that is a sum over a part of positions or heads comes back marked as a partial sum.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from trainwright.train.model.experts import MixtureOfExperts
from trainwright.train.model.latent import Latent
from trainwright.train.model.later_tokens import LaterToken
from trainwright.train.model.layers import Attention, Layer, Mlp
from trainwright.train.model.linear import Linear
from trainwright.train.model.norm import Norm
from trainwright.train.model.transformer import Positions, Transformer
from trainwright.train.parallel.crossing import Crossing, Reader
from trainwright.train.parallel.over_ranks import OverRanks

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()
"""How a (out, in) weight is cut."""


def apply_tensor_parallel(piece: Transformer, mesh: DeviceMesh, crossing: Crossing, recomputed: Set[str]) -> None:
    """Cut a piece, some of whose blocks (such as `3.mlp`) are recomputed whole, over the one-dimensional `mesh`,
    in place. Parameters may be on the meta device."""
    # Outside the blocks each rank has its positions, or all ranks have all of them.
    outside = Partial() if crossing.sequence_parallel else Replicate()
    for name, layer in piece.layers.items():
        assert isinstance(layer, Layer)
        edges = {
            block: replace(crossing, gather_again=f"{name}.{block}" not in recomputed)
            for block in ("attention", "mlp")
        }
        _cut_layer(layer, mesh, edges, outside)
    for module in piece.later.values():
        assert isinstance(module, LaterToken)
        for norm in (module.hidden_norm, module.token_norm, module.norm):
            _keep(norm, mesh, WHOLE, outside)
        _keep_whole(module.join, mesh, outside)
        _cut_layer(module.layer, mesh, {"attention": crossing, "mlp": crossing}, outside)
    if piece.embedding is not None:
        _cut_embedding(piece.embedding, mesh, crossing)
    if piece.positions is not None:
        _keep_positions(piece.positions, mesh, crossing, outside)
    if piece.norm is not None and piece.head is not None:
        _keep(piece.norm, mesh, WHOLE, outside)
        _between(piece.head, crossing, [_cut_columns(piece.head, mesh)])


def vocabulary_start(vocab_size: int, mesh: DeviceMesh) -> int:
    """The first token of this rank's part of the vocabulary."""
    return min(vocab_size, math.ceil(vocab_size / mesh.size()) * mesh.get_local_rank())


def _cut_layer(layer: Layer, mesh: DeviceMesh, edges: dict[str, Crossing], outside: Placement) -> None:
    """`edges` are those of its blocks."""
    for norm in (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm):
        if norm is not None:
            _keep(norm, mesh, WHOLE, outside)
    if isinstance(layer.attention, Latent):
        _cut_latent(layer.attention, mesh, edges["attention"], outside)
    else:
        _cut_attention(layer.attention, mesh, edges["attention"], outside)
    if isinstance(layer.mlp, MixtureOfExperts):
        _cut_around_experts(layer.mlp, mesh, edges["mlp"], outside)
    else:
        assert isinstance(layer.mlp, Mlp)
        _cut_mlp(layer.mlp, mesh, edges["mlp"], outside)


def _cut_attention(attention: Attention, mesh: DeviceMesh, crossing: Crossing, outside: Placement) -> None:
    kv_heads = attention.key.out_features // attention.d_head
    readers = [_cut_columns(attention.query, mesh)]
    for projection in (attention.key, attention.value):
        if kv_heads % mesh.size() == 0:
            readers.append(_cut_columns(projection, mesh))
        else:
            readers.append(_keep_one_head(projection, mesh, attention.d_head, kv_heads))
    if attention.query_norm is not None and attention.key_norm is not None:
        if attention.normed_over == "all_heads":
            _norm_over_ranks(attention.query_norm, mesh, crossing, attention.d_head)
            _norm_over_ranks(attention.key_norm, mesh, crossing, attention.d_head)
        else:
            for norm in (attention.query_norm, attention.key_norm):
                _keep(norm, mesh, WHOLE, Partial())  # one weight for all heads, of which a rank has some
    if attention.sinks is not None:
        sinks = attention.sinks
        _distribute(sinks, mesh, weight=Shard(0), bias=WHOLE)
        _replace(sinks, lambda: _part(sinks.weight))
    _cut_rows(attention.out, mesh, crossing, outside)
    _between(attention, crossing, readers)


def _cut_latent(attention: Latent, mesh: DeviceMesh, crossing: Crossing, outside: Placement) -> None:
    """Heads are cut; latents are narrow, and every rank makes them whole. As each has the gradient that comes
    through its own heads, those of what makes the latents are partial sums."""
    reader = _cut_columns(attention.query, mesh)
    if attention.query_down is not None and attention.query_norm is not None:
        reader = _keep_whole(attention.query_down, mesh, Partial())
        _keep(attention.query_norm, mesh, WHOLE, Partial())
    readers = [reader, _keep_whole(attention.latent, mesh, Partial())]
    _keep(attention.latent_norm, mesh, WHOLE, Partial())
    _cut_columns(attention.key_value, mesh)
    _cut_rows(attention.out, mesh, crossing, outside)
    _between(attention, crossing, readers)


def _cut_mlp(mlp: Mlp, mesh: DeviceMesh, crossing: Crossing, outside: Placement) -> None:
    readers = [_cut_columns(each, mesh) for each in (mlp.up, mlp.gate) if each is not None]
    _cut_rows(mlp.down, mesh, crossing, outside)
    # The way down reads nothing that has come in over the edge.
    setattr(mlp, "expand", partial(crossing.around, readers, mlp.expand))  # noqa: B010


def _cut_around_experts(
    mixture: MixtureOfExperts, mesh: DeviceMesh, crossing: Crossing, outside: Placement
) -> None:
    """Each rank routes its own positions (`parallel/choices.py`). Shared experts are a block; the routed ones are
    nobody's here (`parallel/dispatch.py`)."""
    for linear in (mixture.router, mixture.shared_gate):
        if linear is not None:
            _keep_whole(linear, mesh, outside)
    if mixture.shared is not None:
        assert isinstance(mixture.shared, Mlp)
        _cut_mlp(mixture.shared, mesh, crossing, outside)


def _between(block: nn.Module, crossing: Crossing, readers: Sequence[Reader]) -> None:
    """Let a block's input, which `readers` read, come in over the edge."""
    plain: Callable[..., torch.Tensor] = block.forward
    _replace(block, lambda x_BSD, *others: crossing.around(readers, plain, x_BSD, *others))


def _cut_columns(linear: Linear, mesh: DeviceMesh) -> Reader:
    _distribute(linear, mesh, weight=COLUMNS, bias=Shard(0))
    return _read(linear, lambda: (_part(linear.weight), _part_or_none(linear.bias)))


def _read(linear: Linear, here: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> Reader:
    reader = Reader(linear, here)
    _replace(linear, reader)
    return reader


def _cut_rows(linear: Linear, mesh: DeviceMesh, crossing: Crossing, outside: Placement) -> None:
    _distribute(linear, mesh, weight=ROWS, bias=WHOLE)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y_BSD = crossing.multiplied_out(linear, x, _part(linear.weight))
        bias_D = _part_or_none(linear.bias, outside)
        return y_BSD if bias_D is None else y_BSD + bias_D

    _replace(linear, forward)


def _keep_whole(linear: Linear, mesh: DeviceMesh, gradient: Placement) -> Reader:
    """A projection that every rank has whole."""
    _distribute(linear, mesh, weight=WHOLE, bias=WHOLE)
    return _read(linear, lambda: (_part(linear.weight, gradient), _part_or_none(linear.bias, gradient)))


def _keep_one_head(linear: Linear, mesh: DeviceMesh, d_head: int, num_heads: int) -> Reader:
    """A key or value projection with fewer heads than ranks."""
    _distribute(linear, mesh, weight=WHOLE, bias=WHOLE)
    first = mesh.get_local_rank() * num_heads // mesh.size() * d_head

    def here() -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = _part(linear.weight, Partial()), _part_or_none(linear.bias, Partial())
        own = slice(first, first + d_head)
        return weight[own], None if bias is None else bias[own]

    return _read(linear, here)


def _keep(norm: Norm, mesh: DeviceMesh, placement: Placement, gradient: Placement) -> None:
    """A norm that every rank has whole, and whose gradients are `gradient` over the ranks."""
    _distribute(norm, mesh, weight=placement, bias=placement)
    _replace(norm, lambda x: norm.normalize(x, _part(norm.weight, gradient), _part_or_none(norm.bias, gradient)))


def _norm_over_ranks(norm: Norm, mesh: DeviceMesh, crossing: Crossing, d_head: int) -> None:
    """A norm over all heads, of which every rank has some, or one that others have too."""
    (width,), ranks = norm.weight.shape, mesh.size()
    heads = width // d_head
    is_cut = heads % ranks == 0
    _distribute(norm, mesh, weight=Shard(0) if is_cut else WHOLE, bias=WHOLE)
    first = 0 if is_cut else mesh.get_local_rank() * heads // ranks * d_head
    over_ranks = OverRanks(crossing, width, copies=1 if is_cut else ranks // heads)

    def forward(x_BSH: torch.Tensor) -> torch.Tensor:
        weight = _part(norm.weight) if is_cut else _part(norm.weight, Partial())
        scale = norm.scale(weight[first : first + x_BSH.shape[-1]])
        return over_ranks.normalized(x_BSH, scale, norm.epsilon, is_centered=norm.kind != "rmsnorm")

    _replace(norm, forward)


def _keep_positions(positions: Positions, mesh: DeviceMesh, crossing: Crossing, outside: Placement) -> None:
    """The table of positions is whole on every rank, which adds the rows of its own ones."""
    _distribute(positions, mesh, weight=WHOLE, bias=WHOLE)

    def forward(x_BSD: torch.Tensor) -> torch.Tensor:
        own = x_BSD.shape[1]
        first = mesh.get_local_rank() * own if crossing.sequence_parallel else 0
        return x_BSD + positions.rows(_part(positions.weight, outside), first, own)

    _replace(positions, forward)


def _cut_embedding(embedding: nn.Embedding, mesh: DeviceMesh, crossing: Crossing) -> None:
    """Each rank looks up the tokens that it has, the others give zero, and the sum leaves the block."""
    _distribute(embedding, mesh, weight=Shard(0), bias=Shard(0))
    first = vocabulary_start(embedding.num_embeddings, mesh)

    def forward(tokens_BS: torch.Tensor) -> torch.Tensor:
        rows = _part(embedding.weight)
        row_BS = tokens_BS - first
        elsewhere_BS = (row_BS < 0) | (row_BS >= rows.shape[0])
        x_BSD = F.embedding(row_BS.masked_fill(elsewhere_BS, 0), rows)
        return crossing.leave(x_BSD.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0))

    _replace(embedding, forward)


def _distribute(module: nn.Module, mesh: DeviceMesh, *, weight: Placement, bias: Placement) -> None:
    """Make the module's own parameters DTensors."""
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(module, name, None)
        if parameter is not None:
            distributed = distribute_tensor(parameter, mesh, (placement,), src_data_rank=None)
            setattr(module, name, nn.Parameter(distributed))


def _replace(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    module.forward = forward


def _part(parameter: torch.Tensor, gradient: Placement | None = None) -> torch.Tensor:
    """What this rank has of a parameter; its gradient comes back cut as the parameter, or as `gradient`."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=None if gradient is None else (gradient,))


def _part_or_none(parameter: torch.Tensor | None, gradient: Placement | None = None) -> torch.Tensor | None:
    return None if parameter is None else _part(parameter, gradient)
