"""One transformer layer: attention and MLP, each behind a norm and beside a residual.

Heads are counted from the width of the projections' outputs, so the same code runs on a shard of the heads. The
attention core is one function of queries, keys and values, which recomputation can wrap by itself.
"""

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.spec.model import DenseMlp, GroupedQueryAttention, LayerSpec, ModelSpec, MoeMlp
from trainwright.train.model.experts import MixtureOfExperts
from trainwright.train.model.functions import ACTIVATIONS, gated, rms_norm
from trainwright.train.model.rotary import Rotary


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.kind, self.epsilon = spec.norm, spec.norm_epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if spec.norm == "layernorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalize(x, self.weight, self.bias)

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The norm with these parameters, which are this module's or a rank's plain view of them."""
        if self.kind == "rmsnorm":
            return rms_norm(x, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


def attention_core(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention; query head n uses key head n // (N / K). A window counts the query's own position."""
    seq_len = query_BNSH.shape[2]
    if sliding_window is None or sliding_window >= seq_len:
        return F.scaled_dot_product_attention(
            query_BNSH, key_BKSH, value_BKSH, is_causal=True, scale=scale, enable_gqa=True
        )
    position = torch.arange(seq_len, device=query_BNSH.device)
    distance_SS = position[:, None] - position[None, :]
    seen_SS = (distance_SS >= 0) & (distance_SS < sliding_window)
    return F.scaled_dot_product_attention(
        query_BNSH, key_BKSH, value_BKSH, attn_mask=seen_SS, scale=scale, enable_gqa=True
    )


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245); multi-head and multi-query are its ends."""

    def __init__(self, spec: ModelSpec, attention: GroupedQueryAttention) -> None:
        super().__init__()
        heads, kv_heads, d_head = attention.num_heads, attention.num_kv_heads, attention.d_head
        self.d_head = d_head
        self.sliding_window = attention.sliding_window
        self.scale = attention.query_scale
        self.query = nn.Linear(spec.d_model, heads * d_head, bias=attention.qkv_bias)
        self.key = nn.Linear(spec.d_model, kv_heads * d_head, bias=attention.qkv_bias)
        self.value = nn.Linear(spec.d_model, kv_heads * d_head, bias=attention.qkv_bias)
        self.out = nn.Linear(heads * d_head, spec.d_model, bias=attention.out_bias)
        per_head = attention.qk_norm == "per_head"
        self.query_norm = Norm(spec, d_head) if per_head else None
        self.key_norm = Norm(spec, d_head) if per_head else None
        self.core = attention_core

    def forward(self, x_BSD: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        query_BSNH = self.query(x_BSD).unflatten(-1, (-1, self.d_head))
        key_BSKH = self.key(x_BSD).unflatten(-1, (-1, self.d_head))
        value_BKSH = self.value(x_BSD).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query_BSNH, key_BSKH = self.query_norm(query_BSNH), self.key_norm(key_BSKH)
        query_BNSH, key_BKSH = query_BSNH.transpose(1, 2), key_BSKH.transpose(1, 2)
        if rotary is not None:
            query_BNSH, key_BKSH = rotary(query_BNSH), rotary(key_BKSH)
        mixed_BNSH = self.core(query_BNSH, key_BKSH, value_BKSH, self.sliding_window, self.scale)
        return self.out(mixed_BNSH.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) (SwiGLU and kin, arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, mlp: DenseMlp) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[mlp.activation]
        self.gate = nn.Linear(spec.d_model, mlp.d_ff, bias=mlp.bias) if mlp.gated else None
        self.up = nn.Linear(spec.d_model, mlp.d_ff, bias=mlp.bias)
        self.down = nn.Linear(mlp.d_ff, spec.d_model, bias=mlp.bias)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_BSD)))
        return self.down(gated(self.gate(x_BSD), self.up(x_BSD), self.activation))


def mlp_of(spec: ModelSpec, mlp: DenseMlp | MoeMlp) -> nn.Module:
    """Dense, or experts, of which the shared ones are a dense MLP together."""
    if isinstance(mlp, DenseMlp):
        return Mlp(spec, mlp)
    return MixtureOfExperts(spec, mlp, Mlp(spec, mlp.shared()) if mlp.d_ff_shared else None)


class Layer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        assert isinstance(layer.attention, GroupedQueryAttention)
        self.attention_norm = Norm(spec, spec.d_model)
        self.attention = Attention(spec, layer.attention)
        self.mlp_norm = Norm(spec, spec.d_model)
        self.mlp = mlp_of(spec, layer.mlp)

    def forward(self, x_BSD: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))
