"""Activation recomputation (arXiv:1604.06174): keep a layer's input, or the attention core's, and compute the
rest again in backward. `selective` is that of Korthikanti et al. (arXiv:2205.05198 s5): the attention core alone,
whose scores are large and cheap."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from trainwright.spec.recipe import Recipe
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
    for name, layer in piece.layers.items():
        assert isinstance(layer, Layer)
        if name in whole:
            layer.forward = partial(_recomputed, layer.forward)
        elif recipe.recompute == "selective":
            layer.attention.core = partial(_recomputed, layer.attention.core)
