"""The whole model on one page: embedding, layers, norm, head.

A `Transformer` may be a piece: a run of layers, with the embedding only at the front and norm and head only at
the back. All pieces of a model name their parameters as the whole one does, so that a parameter's name means the
same everywhere (initial weights, checkpoints, tests).
"""

from collections.abc import Callable

import torch
from torch import nn

from trainwright.spec.model import ModelSpec
from trainwright.train.model.layers import Layer, Norm
from trainwright.train.model.rotary import Rotary


class Transformer(nn.Module):
    """Layers `layers` of a decoder-only transformer; all of them, with both ends, unless told otherwise.

    Takes tokens (B, S) where it has the embedding, else activations (B, S, D); gives logits (B, S, V) where it
    has the head, else activations.
    """

    def __init__(
        self, spec: ModelSpec, layers: range | None = None, *, first: bool | None = None, last: bool | None = None
    ) -> None:
        """first, last: whether it has the embedding and the head; by its layers, unless told otherwise, as a piece
        without layers must be."""
        super().__init__()
        layers = range(spec.num_layers) if layers is None else layers
        self.spec = spec
        self.is_first = layers.start == 0 if first is None else first
        self.is_last = layers.stop == spec.num_layers if last is None else last
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model) if self.is_first else None
        self.layers = nn.ModuleDict({str(number): Layer(spec, spec.layers[number]) for number in layers})
        self.norm = Norm(spec, spec.d_model) if self.is_last else None
        self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=spec.head_bias) if self.is_last else None
        self.rotary = None if spec.rope is None else Rotary(spec.rope)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one tensor where the model says so and both are here. To be called again after
        anything that replaces parameters."""
        if self.spec.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self, x: torch.Tensor, loss: Callable[[nn.Linear, torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """With `loss`, what it makes of the head and its input, in place of logits."""
        x_BSD = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, self.rotary)
        if self.norm is None or self.head is None:
            return x_BSD
        return self.head(self.norm(x_BSD)) if loss is None else loss(self.head, self.norm(x_BSD))
