"""Activation recomputation (arXiv:1604.06174): drop what a layer would keep for backward, and compute it again.

    full        a layer keeps its input alone
    selective   a layer drops what the operations in `recompute_ops` make (arXiv:2205.05198 s5, Megatron-Core's
                recompute_modules); `OPERATIONS` says how

PyTorch's checkpoint runs a function again in backward up to the last tensor that something in it has saved. So it
can stand around an operation together with the matmul that reads its result, which isn't run again: the matmul's
input is what is wanted. A norm is read by several matmuls, and where sequences are cut by their gather too; its
result is emptied where the layer ends, and filled again when the gradient of the layer's output is there
(Megatron-Core's CheckpointWithoutOutput). The norm's statistic, a number per token, is kept. Queries, keys and
values of latent attention are read by the core alone, which isn't run again: `parallel/made_again.py`.

Where a schedule puts weight gradients off, what is computed again for the input gradients stays until the weight
gradients, which read it, are done. PyTorch's non-reentrant form would compute it again for each of the two; its
reentrant form makes the graph anew, once, inside the first.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from trainwright.spec.recipe import Recipe, RecomputeOp
from trainwright.spec.schedule import SCHEDULES
from trainwright.train.model.experts import Experts, MixtureOfExperts
from trainwright.train.model.latent import Latent
from trainwright.train.model.layers import Layer, Mlp
from trainwright.train.model.norm import Norm
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.made_again import attended_again

# What is random in a layer is a function of its place in the run, so no generator's state is kept and set back.
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recomputed_layers(piece: Transformer, recipe: Recipe) -> frozenset[str]:
    """Names of the layers that are recomputed whole: the piece's first ones, or all."""
    return frozenset([*piece.layers][: recipe.recompute_layers] if recipe.recompute == "full" else [])


def recomputed_blocks(piece: Transformer, recipe: Recipe) -> frozenset[str]:
    """Blocks, such as `3.mlp`, whose input nothing keeps as they are recomputed whole."""
    whole = recomputed_layers(piece, recipe)
    blocks = {f"{name}.{block}" for name in whole for block in ("attention", "mlp")}
    if recipe.recompute == "selective" and "mlp" in recipe.recompute_ops:
        blocks |= {f"{name}.mlp" for name, layer in piece.layers.items() if isinstance(layer.mlp, Mlp)}
    return frozenset(blocks)


def apply_recompute(piece: Transformer, recipe: Recipe) -> None:
    """Wrap what is recomputed, in place; hooks that stand around a layer stay around it."""
    whole = recomputed_layers(piece, recipe)
    recomputed = partial(_recomputed, use_reentrant=SCHEDULES[recipe.schedule].splits_backward)
    for name, layer in piece.layers.items():
        assert isinstance(layer, Layer)
        if name in whole:
            layer.forward = partial(recomputed, layer.forward)
        elif recipe.recompute == "selective":
            block = "moe" if isinstance(layer.mlp, MixtureOfExperts) else "mlp"
            # What is recomputed whole has its activation with it.
            chosen = {*recipe.recompute_ops} - ({"activation"} if block in recipe.recompute_ops else set())
            for operation, wrap in OPERATIONS.items():
                if operation in chosen:
                    wrap(layer, recomputed)


Recomputed = Callable[..., torch.Tensor]
"""Runs a function, and again in backward."""


def _attention(layer: Layer, recomputed: Recomputed) -> None:
    layer.attention.core = partial(recomputed, layer.attention.core)


def _latent_up(layer: Layer, _: Recomputed) -> None:
    """Queries, keys and values of all heads, from the latents."""
    if isinstance(layer.attention, Latent):
        setattr(layer.attention, "attended", partial(attended_again, layer.attention))  # noqa: B010


def _activation(layer: Layer, recomputed: Recomputed) -> None:
    """The product that a down projection reads, of experts too."""
    for module in layer.mlp.modules():
        if isinstance(module, Mlp):
            module.contract = partial(recomputed, module.contract)
        elif isinstance(module, Experts):
            setattr(module, "contract", partial(_contract_experts, recomputed, module.contract))  # noqa: B010


def _contract_experts(recomputed: Recomputed, contract: Recomputed, *inputs: torch.Tensor | None) -> torch.Tensor:
    """The last of the inputs are weights: they are no part of what is recomputed from, as PyTorch's reentrant form
    would cut them off from the parameter, whose gradient a split backward makes later."""
    *rows, down_XDF = inputs
    return recomputed(lambda *again: contract(*again, down_XDF), *rows)


def _mlp(layer: Layer, recomputed: Recomputed) -> None:
    """Up and gate projections with the activation: all but the block's input, and the down projection."""
    if isinstance(layer.mlp, Mlp):
        layer.mlp.forward = partial(recomputed, layer.mlp.forward)


def _moe(layer: Layer, recomputed: Recomputed) -> None:
    """Routing, dispatch and experts, shared ones too: all but the block's input."""
    if isinstance(layer.mlp, MixtureOfExperts):
        layer.mlp.forward = partial(recomputed, layer.mlp.forward)


def _norm(layer: Layer, _: Recomputed) -> None:
    """Results of the layer's norms, but for one that leaves the layer."""
    made: list[_Remade] = []
    for norm in layer.children():
        if isinstance(norm, Norm):
            norm.forward = partial(_make, norm.forward, made)
    plain: Callable[..., torch.Tensor] = layer.forward

    def forward(*inputs: object) -> torch.Tensor:
        made.clear()
        output = plain(*inputs)
        node = output.grad_fn
        if node is not None:
            for each in made:
                if each.storage._cdata != output.untyped_storage()._cdata:
                    each.empty()
                    # After the hooks on the tensor, one of which may gather the weights that the norms need.
                    node.register_prehook(each.fill)
        made.clear()
        return output

    setattr(layer, "forward", forward)  # noqa: B010


def _make(norm: Callable[[torch.Tensor], torch.Tensor], made: "list[_Remade]", x: torch.Tensor) -> torch.Tensor:
    output = norm(x)
    made.append(_Remade(norm, x, output))
    return output


class _Remade:
    """The result of a function of one tensor, whose storage can be emptied and filled again."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, output: torch.Tensor):
        self._function, self._x = function, x.detach()
        # Unlike detach(), data has a version of its own: filling is no change that autograd would object to.
        self._output = output.data
        self.storage = output.untyped_storage()
        self._num_bytes = self.storage.nbytes()

    def empty(self) -> None:
        self.storage.resize_(0)

    @torch.no_grad()
    def fill(self, _: tuple[torch.Tensor, ...]) -> None:
        if self.storage.nbytes() == 0:
            again = self._function(self._x)
            self.storage.resize_(self._num_bytes)
            self._output.copy_(again)


# In the order in which they wrap: norms last, around the whole layer.
OPERATIONS: dict[RecomputeOp, Callable[[Layer, Recomputed], None]] = {
    "attention": _attention,
    "latent_up": _latent_up,
    "activation": _activation,
    "mlp": _mlp,
    "moe": _moe,
    "norm": _norm,
}
"""How each operation is wrapped in a layer that has it."""
