"""The whole model on one page: embedding, layers, norm, head, and what predicts later tokens.

A `Transformer` may be a piece: a run of layers, with the embedding only at the front and norm and head only at
the back; where there is multi-token prediction, the back has the embedding too. All pieces of a model name their
parameters as the whole one does, so that a parameter's name means the same everywhere (initial weights,
checkpoints, tests).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.spec.model import ModelSpec
from trainwright.train.model.functions import softcapped
from trainwright.train.model.later_tokens import LaterToken
from trainwright.train.model.layers import Layer, Norm
from trainwright.train.model.linear import Linear
from trainwright.train.model.rotary import Rotary


class Positions(nn.Module):
    """A learned vector for each position, added to the tokens' (GPT-2, Radford et al. 2019).

    `held` are the positions of a sequence's tokens, where they aren't the first ones."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(spec.learned_positions, spec.d_model))
        self.held: torch.Tensor | None = None

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD + self.rows(self.weight, 0, x_BSD.shape[1])

    def rows(self, weight: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The vectors of `count` tokens of a sequence from `first` on."""
        return weight[first : first + count] if self.held is None else weight[self.held[first : first + count]]


class Transformer(nn.Module):
    """Layers `layers` of a decoder-only transformer; all of them, with both ends, unless told otherwise.

    Takes tokens (B, S) where it is first, else activations (B, S, D); gives logits (B, S, V) where it is last,
    else activations. With multi-token prediction the last piece takes later tokens too, and gives the logits of
    the next token and those of each later one.
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
        embeds = self.is_first or (self.is_last and spec.mtp_depth > 0)
        self.embedding = nn.Embedding(spec.vocab_size, spec.d_model) if embeds else None
        self.positions = Positions(spec) if self.is_first and spec.learned_positions else None
        self.layers = nn.ModuleDict({str(number): Layer(spec, spec.layers[number]) for number in layers})
        self.norm = Norm(spec, spec.d_model) if self.is_last else None
        self.head = Linear(spec.d_model, spec.vocab_size, bias=spec.head_bias) if self.is_last else None
        depth = spec.mtp_depth if self.is_last else 0
        self.later = nn.ModuleDict({str(number): LaterToken(spec) for number in range(depth)})
        self.rotary = None if spec.rope is None else Rotary(spec.rope)
        self.local_rotary = None
        if spec.rope is not None and spec.rope.local_theta is not None:
            self.local_rotary = Rotary(spec.rope.changed(theta=spec.rope.local_theta, scaling=None))
        self.tie()

    def numbered_layers(self) -> Iterator[tuple[int, Layer]]:
        """Its layers with their numbers; those that predict later tokens are counted on behind the model's
        last."""
        for name, layer in self.layers.items():
            assert isinstance(layer, Layer)
            yield int(name), layer
        for name, module in self.later.items():
            assert isinstance(module, LaterToken)
            yield self.spec.num_layers + int(name), module.layer

    def tie(self) -> None:
        """Make head and embedding one tensor where the model says so and both are here. To be called again after
        anything that replaces parameters."""
        if self.spec.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        x: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
        later_BS: Sequence[torch.Tensor] = (),
        loss: Callable[[Linear, list[torch.Tensor]], Any] | None = None,
    ) -> Any:
        """documents_BS: the number of each token's document, where tokens see their own alone. later_BS: for each
        module of multi-token prediction the token that stands so much further on (`later_tokens.shifted`). With
        `loss`, what it makes of the head and what the head reads, in place of logits."""
        x_BSD = self._embedded(x) if self.is_first else x
        if self.positions is not None:
            x_BSD = self.positions(x_BSD)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, self._rotary_of(layer), documents_BS)
        if self.norm is None or self.head is None:
            return x_BSD
        read = [self.norm(x_BSD)]
        for module, tokens_BS in zip(self.later.values(), later_BS, strict=True):
            assert isinstance(module, LaterToken)
            token_BSD = self._embedded(tokens_BS)
            x_BSD, normed_BSD = module(x_BSD, token_BSD, self._rotary_of(module.layer), documents_BS)
            read.append(normed_BSD)
        if loss is not None:
            return loss(self.head, read)
        logits = tuple(self._logits(each_BSD) for each_BSD in read)
        return logits if self.later else logits[0]

    def _embedded(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None
        x_BSD = self.embedding(tokens_BS)
        return x_BSD * math.sqrt(self.spec.d_model) if self.spec.scaled_embedding else x_BSD

    def _logits(self, normed_BSD: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        logits_BSV = self.head(normed_BSD)
        return logits_BSV if self.spec.logit_softcap is None else softcapped(logits_BSV, self.spec.logit_softcap)

    def _rotary_of(self, layer: nn.Module) -> Rotary | None:
        """Layers with a sliding window may turn by frequencies of their own (Gemma 3)."""
        assert isinstance(layer, Layer)
        has_window = layer.attention.sliding_window is not None
        return self.local_rotary if has_window and self.local_rotary is not None else self.rotary
