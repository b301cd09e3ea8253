"""Activation recomputation (arXiv:1604.06174): keep a layer's input, or the attention core's, and compute the
rest again in backward. `selective` is that of Korthikanti et al. (arXiv:2205.05198 s5): the attention core alone,
whose scores are large and cheap.

Where a schedule puts weight gradients off, a layer is computed again for its input gradient, and what its weight
gradients read then stays until they are done. PyTorch's non-reentrant form would compute it again for each of the
two; its reentrant form makes the layer's graph anew, once, inside the first.
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

from trainwright.spec.recipe import Recipe
from trainwright.spec.schedule import SCHEDULES
from trainwright.train.model.layers import Layer
from trainwright.train.model.transformer import Transformer

# Nothing random runs in a layer, so the state of the generators need not be kept and set back.
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recomputed_layers(piece: Transformer, recipe: Recipe) -> frozenset[str]:
    """Names of the layers that are recomputed whole: the piece's first ones, or all."""
    return frozenset([*piece.layers][: recipe.recompute_layers] if recipe.recompute == "full" else [])


def apply_recompute(piece: Transformer, recipe: Recipe) -> None:
    """Wrap what is recomputed, in place; hooks that stand around a layer stay around it."""
    whole = recomputed_layers(piece, recipe)
    recomputed = partial(_recomputed, use_reentrant=SCHEDULES[recipe.schedule].splits_backward)
    for name, layer in piece.layers.items():
        assert isinstance(layer, Layer)
        if name in whole:
            layer.forward = partial(recomputed, layer.forward)
        elif recipe.recompute == "selective":
            layer.attention.core = partial(recomputed, layer.attention.core)
