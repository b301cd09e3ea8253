"""Activation recomputation (arXiv:1604.06174): keep a layer's input, or the attention core's, and compute the
rest again in backward. `selective` is that of Korthikanti et al. (arXiv:2205.05198 s5): the attention core alone,
whose scores are large and cheap."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from trainwright.spec.recipe import Recompute
from trainwright.train.model.layers import Layer
from trainwright.train.model.transformer import Transformer

# Nothing random runs in a layer, so the state of the generators need not be kept and set back.
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def apply_recompute(piece: Transformer, policy: Recompute) -> None:
    """Wrap what `policy` names, in place; hooks that stand around a layer stay around it."""
    for layer in piece.layers.values():
        assert isinstance(layer, Layer)
        if policy == "full":
            layer.forward = partial(_recomputed, layer.forward)
        elif policy == "selective":
            layer.attention.core = partial(_recomputed, layer.attention.core)
