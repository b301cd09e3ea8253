"""Multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434 s2.1): keys and values of all heads come from
one narrow latent per token.

    latent, turned key = x W            latent normed; the key's rotary part is one for all heads
    key, value by head = latent W'      the key's other part
    query by head      = x W, or through a latent of its own; a part of it is turned

In training keys and values are made whole, and attention is that of as many key heads as query heads. What
inference gains by not doing so has no part here.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.spec.model import LatentAttention, ModelSpec
from trainwright.train.model.linear import Linear
from trainwright.train.model.norm import Norm
from trainwright.train.model.rotary import Rotary, sharpened

LATENT_NORM_EPSILON = 1e-6
"""DeepSeek's code has it there whatever the model's own (inference/model.py of DeepSeek-V3: RMSNorm)."""


class Latent(nn.Module):
    """MLA of one layer. Heads are counted from the width of the projections' outputs; `core` is attention itself
    (`layers.attention_core`)."""

    def __init__(self, spec: ModelSpec, attention: LatentAttention, core: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        heads, self.d_latent = attention.num_heads, attention.kv_lora_rank
        self.d_nope, self.d_rope, self.d_value = attention.d_nope, attention.d_rope, attention.d_value
        self.sliding_window = attention.sliding_window
        self.scale = 1 / math.sqrt(self.d_nope + self.d_rope) * sharpened(spec.rope.scaling if spec.rope else None)
        self.query_down = self.query_norm = None
        if attention.q_lora_rank is not None:
            self.query_down = Linear(spec.d_model, attention.q_lora_rank, bias=False)
            self.query_norm = latent_norm(spec, attention.q_lora_rank)
        d_query_in = attention.q_lora_rank or spec.d_model
        self.query = Linear(d_query_in, heads * (self.d_nope + self.d_rope), bias=False)
        self.latent = Linear(spec.d_model, self.d_latent + self.d_rope, bias=False)
        self.latent_norm = latent_norm(spec, self.d_latent)
        self.key_value = Linear(self.d_latent, heads * (self.d_nope + self.d_value), bias=False)
        self.out = Linear(heads * self.d_value, spec.d_model, bias=False)
        self.core = core

    def forward(
        self, x_BSD: torch.Tensor, rotary: Rotary | None, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        read_BSR = x_BSD
        if self.query_down is not None and self.query_norm is not None:
            read_BSR = self.query_norm(self.query_down(x_BSD))
        latent_BSR, turning_BSH = self.latent(x_BSD).split((self.d_latent, self.d_rope), dim=-1)
        mixed_BNSH = self.attended(read_BSR, self.latent_norm(latent_BSR), turning_BSH, rotary, documents_BS)
        return self.out(mixed_BNSH.transpose(1, 2).flatten(2))

    def attended(
        self,
        read_BSR: torch.Tensor,
        latent_BSR: torch.Tensor,
        turning_BSH: torch.Tensor,
        rotary: Rotary | None,
        documents_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        """From what queries are made of, the normed latent and the key's rotary part to what the output projection
        reads; recomputation can take it apart."""
        query_BNSH = self.queries(read_BSR, rotary)
        return self.mixed(query_BNSH, *self.keys_and_values(latent_BSR, turning_BSH, rotary), documents_BS)

    def queries(self, read_BSR: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """(B, N, S, H) of all heads, each with its turned part at the end."""
        both_BNSH = self.query(read_BSR).unflatten(-1, (-1, self.d_nope + self.d_rope)).transpose(1, 2)
        query_BNSH, turning_BNSH = both_BNSH.split((self.d_nope, self.d_rope), dim=-1)
        if rotary is not None:
            turning_BNSH = rotary(turning_BNSH)
        # Side by side in memory are the heads of a token: a core's output is laid out as its queries are.
        both_BSNH = torch.cat((query_BNSH.transpose(1, 2), turning_BNSH.transpose(1, 2)), dim=-1)
        return self._widened(both_BSNH).transpose(1, 2)

    def keys_and_values(
        self, latent_BSR: torch.Tensor, turning_BSH: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all heads, (B, N, S, H); values as wide as the core wants them."""
        turning_B1SH = turning_BSH.unsqueeze(1)
        if rotary is not None:
            turning_B1SH = rotary(turning_B1SH)
        both = self.key_value(latent_BSR).unflatten(-1, (-1, self.d_nope + self.d_value))
        key_BNSH, value_BNSH = both.transpose(1, 2).split((self.d_nope, self.d_value), dim=-1)
        key_BNSH = torch.cat((key_BNSH, turning_B1SH.expand(-1, key_BNSH.shape[1], -1, -1)), dim=-1)
        # A view of both would keep the part that keys have a copy of.
        return self._widened(key_BNSH), self._widened(value_BNSH).contiguous()

    def _widened(self, heads: torch.Tensor) -> torch.Tensor:
        """With zeros at the end of each head: on a CPU the fused kernel wants values as wide as keys; without it
        all scores would be kept."""
        more = 0 if heads.is_cuda else max(self.d_nope + self.d_rope, self.d_value) - heads.shape[-1]
        return F.pad(heads, (0, more)) if more else heads

    def mixed(
        self,
        query_BNSH: torch.Tensor,
        key_BNSH: torch.Tensor,
        wide_BNSH: torch.Tensor,
        documents_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        """The core's output, of the values' own width, as the next matmul reads it."""
        mixed_BNSH = self.core(query_BNSH, key_BNSH, wide_BNSH, self.sliding_window, self.scale, documents_BS)
        return mixed_BNSH.transpose(1, 2)[..., : self.d_value].contiguous().transpose(1, 2)


def latent_norm(spec: ModelSpec, width: int) -> Norm:
    """Of a latent: RMSNorm, whatever the model's norm is."""
    return Norm(spec.changed(norm="rmsnorm", norm_epsilon=LATENT_NORM_EPSILON), width)
