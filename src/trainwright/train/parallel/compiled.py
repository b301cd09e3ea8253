"""Layers as compiled graphs (torch.compile, one layer at a time, as torchtitan does it).

Elementwise operations of a layer are fused. A layer keeps the same for backward as it does without: the compiler
makes again what `model/functions.py` doesn't keep either. What a graph can't hold runs as it is, between two
graphs: communication, experts (whose numbers of tokens are different every time), masks of dropout, and what
selective recompute wraps.

Imported only where a recipe says `compile`, as PyTorch's tracer takes two seconds to import.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._dynamo import disable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from trainwright.spec.recipe import Recipe
from trainwright.train.model.dropout import Dropping
from trainwright.train.model.experts import MixtureOfExperts
from trainwright.train.model.latent import Latent
from trainwright.train.model.layers import Attention, Layer, Mlp
from trainwright.train.model.norm import Norm
from trainwright.train.model.rotary import Rotary
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.crossing import Crossing, Reader, Result

P = ParamSpec("P")
R = TypeVar("R")


def outside(function: Callable[P, R]) -> Callable[P, R]:
    """The function in no graph, nor what it calls."""
    return cast(Callable[P, R], disable(function))


def in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The function compiled when it first runs. Under a dispatch mode it runs as it is: one that counts live bytes
    or lists collectives would see nothing of a graph, and PyTorch's tracer gives a function up for good that it
    meets there."""
    graphs = torch.compile(function, dynamic=False)

    def run(*inputs: P.args, **named: P.kwargs) -> R:
        return (function if is_in_torch_dispatch_mode() else graphs)(*inputs, **named)

    return run


_leave, _summed = outside(Crossing.leave), outside(Crossing.summed)


@dataclass(frozen=True)
class CrossingBetweenGraphs(Crossing):
    """A crossing in no graph; the block that it stands around is one of its own."""

    graphs: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    """Of every block."""

    def leave(self, summand_BSD: torch.Tensor) -> torch.Tensor:
        return _leave(self, summand_BSD)

    def summed(self, summand_BSD: torch.Tensor) -> torch.Tensor:
        return _summed(self, summand_BSD)

    def around(
        self, readers: Sequence[Reader], block: Callable[..., Result], part_BSD: torch.Tensor, *others: Any
    ) -> Result:
        return _around(self, readers, block, part_BSD, *others)


@outside
def _around(
    crossing: CrossingBetweenGraphs,
    readers: Sequence[Reader],
    block: Callable[..., Result],
    part_BSD: torch.Tensor,
    *others: Any,
) -> Result:
    # The head is no layer's block. Nor could it be in a graph: a vocabulary may be cut unevenly, and a graph wants
    # a DTensor's part as large on every rank (PyTorch 2.13 refuses others). What is in layers is cut evenly.
    if isinstance(getattr(block, "__self__", None), (Attention, Latent, Mlp)):
        if block not in crossing.graphs:
            crossing.graphs[block] = in_graphs(block)
        block = crossing.graphs[block]
    return Crossing.around(crossing, readers, block, part_BSD, *others)


def apply_compile(piece: Transformer, *, position_cut: int) -> None:
    """Compile the layers of a piece when they first run, in place. What is changed inside of a layer until then is
    compiled with it; what wraps a layer stays around. position_cut: of how many parts a layer has one, outside its
    blocks."""
    for layer in piece.layers.values():
        assert isinstance(layer, Layer)
        graphs = in_graphs(layer.forward)
        setattr(layer, "forward", partial(_with_tables, graphs, layer.attention, position_cut))  # noqa: B010


def _with_tables(
    graphs: Callable[..., torch.Tensor],
    attention: Attention | Latent,
    position_cut: int,
    x_BSD: torch.Tensor,
    rotary: Rotary | None,
    *others: Any,
) -> torch.Tensor:
    """Make the rotary's tables before a graph wants them: a graph that made them would be another one than that of
    the next call, and so what recomputes it would find other tensors."""
    if rotary is not None:
        width = attention.d_rope if isinstance(attention, Latent) else attention.d_head
        rotary.tables(x_BSD.shape[1] * position_cut, width, x_BSD)
    return graphs(x_BSD, rotary, *others)


def keep_out_of_graphs(piece: Transformer, recipe: Recipe, *, cp: int) -> None:
    """Let parts of compiled layers run as they are, in place, when all that wraps them has."""
    again = recipe.recompute_ops if recipe.recompute == "selective" else ()
    for layer in piece.layers.values():
        assert isinstance(layer, Layer)
        attention, mlp = layer.attention, layer.mlp
        if isinstance(mlp, MixtureOfExperts):
            _keep_out(mlp, "forward")
        if cp > 1 or recipe.dropout:
            _keep_out(attention, "core")
        for operation, module, name in (
            ("attention", attention, "core"),
            ("latent_up", attention, "attended"),
            ("activation", mlp, "contract"),
            ("mlp", mlp, "forward"),
        ):
            if operation in again and hasattr(module, name):
                _keep_out(module, name)
        for norm in layer.children():
            if "norm" in again and isinstance(norm, Norm):
                _keep_out(norm, "forward")


def keep_masks_out(piece: Transformer, dropping: Dropping) -> None:
    """Let dropout's masks be drawn as they are, in place. What a block is told of its place, a number of its own,
    would make a graph for each layer: it stands outside, and the block in a graph of its own."""
    setattr(dropping, "branch", outside(dropping.branch))  # noqa: B010
    for layer in piece.layers.values():
        assert isinstance(layer, Layer)
        for block in (layer.attention, layer.mlp):
            if isinstance(block.forward, partial):
                disable(block.forward.func, recursive=False)


def _keep_out(module: Any, name: str) -> None:
    function: Callable[..., torch.Tensor] = getattr(module, name)
    setattr(module, name, outside(partial(_as_it_is, function)))


def _as_it_is(function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    return function(*inputs)
