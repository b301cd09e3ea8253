"""One transformer layer: attention and MLP, each beside a residual, with norms before them, behind, or both.

Heads are counted from the width of the projections' outputs, so the same code runs on a shard of the heads. The
attention core is one function of queries, keys and values, which recomputation can wrap by itself.
"""

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.spec.model import DenseMlp, GroupedQueryAttention, LayerSpec, ModelSpec, MoeMlp
from trainwright.train.model.banded import banded_attention, has_kernel, same, seen
from trainwright.train.model.experts import MixtureOfExperts
from trainwright.train.model.functions import ACTIVATIONS, clamped_swiglu, gated
from trainwright.train.model.latent import Latent
from trainwright.train.model.linear import Linear
from trainwright.train.model.norm import Norm
from trainwright.train.model.rotary import Rotary
from trainwright.train.model.scores import attention_with_sinks, capped_attention


class Sinks(nn.Module):
    """A learned logit per head that stands in the softmax's denominator beside the scores (gpt-oss)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def forward(self) -> torch.Tensor:
        return self.weight


def attention_core(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention; query head n uses key head n // (N / K). A window counts the query's own position. Tokens
    see those of their document alone, where their documents' numbers are given."""
    if softcap is not None:
        return capped_attention(
            query_BNSH, key_BKSH, value_BKSH, sliding_window, scale, documents_BS, softcap, sinks_N
        )
    seq_len = query_BNSH.shape[2]
    window = seq_len if sliding_window is None else sliding_window
    is_causal = window >= seq_len and documents_BS is None
    if not (is_causal and sinks_N is None) and has_kernel(query_BNSH, value_BKSH):
        return banded_attention(query_BNSH, key_BKSH, value_BKSH, sliding_window, scale, documents_BS, sinks_N)
    if sinks_N is not None:
        return attention_with_sinks(query_BNSH, key_BKSH, value_BKSH, sliding_window, scale, documents_BS, sinks_N)
    if is_causal:
        return F.scaled_dot_product_attention(
            query_BNSH, key_BKSH, value_BKSH, is_causal=True, scale=scale, enable_gqa=True
        )
    seen_SS = seen(seq_len, seq_len, 0, window, query_BNSH)
    if documents_BS is not None:
        seen_SS = seen_SS & same(documents_BS, documents_BS)
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
        self.softcap = attention.logit_softcap
        self.query = Linear(spec.d_model, heads * d_head, bias=attention.qkv_bias)
        self.key = Linear(spec.d_model, kv_heads * d_head, bias=attention.qkv_bias)
        self.value = Linear(spec.d_model, kv_heads * d_head, bias=attention.qkv_bias)
        self.out = Linear(heads * d_head, spec.d_model, bias=attention.out_bias)
        self.normed_over = attention.qk_norm
        whole = attention.qk_norm == "all_heads"
        self.query_norm = self.key_norm = None
        if attention.qk_norm != "none":
            self.query_norm = Norm(spec, heads * d_head if whole else d_head, may_have_bias=False)
            self.key_norm = Norm(spec, kv_heads * d_head if whole else d_head, may_have_bias=False)
        self.sinks = Sinks(heads) if attention.sinks else None
        self.core = attention_core

    def forward(
        self, x_BSD: torch.Tensor, rotary: Rotary | None, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        query_BNSH = self._heads(self.query(x_BSD), self.query_norm)
        key_BKSH = self._heads(self.key(x_BSD), self.key_norm)
        value_BKSH = self._heads(self.value(x_BSD), None)
        if rotary is not None:
            query_BNSH, key_BKSH = rotary(query_BNSH), rotary(key_BKSH)
        sinks_N = None if self.sinks is None else self.sinks()
        mixed_BNSH = self.core(
            query_BNSH, key_BKSH, value_BKSH, self.sliding_window, self.scale, documents_BS, self.softcap, sinks_N
        )
        return self.out(mixed_BNSH.transpose(1, 2).flatten(2))

    def _heads(self, projected: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """A projection's output by heads, normed over all of them at once or over each."""
        if norm is not None and self.normed_over == "all_heads":
            projected = norm(projected)
        heads = projected.unflatten(-1, (-1, self.d_head))
        if norm is not None and self.normed_over == "per_head":
            heads = norm(heads)
        return heads.transpose(1, 2)


class Mlp(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) (SwiGLU and kin, arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, mlp: DenseMlp) -> None:
        super().__init__()
        self.activation = mlp.activation
        self.gate = Linear(spec.d_model, mlp.d_ff, bias=mlp.bias) if mlp.gated else None
        self.up = Linear(spec.d_model, mlp.d_ff, bias=mlp.bias)
        self.down = Linear(mlp.d_ff, spec.d_model, bias=mlp.bias)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.contract(*self.expand(x_BSD))

    def expand(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The ways up: up, and gate where there is one."""
        return (self.up(x_BSD),) if self.gate is None else (self.up(x_BSD), self.gate(x_BSD))

    def contract(self, up_BSF: torch.Tensor, gate_BSF: torch.Tensor | None = None) -> torch.Tensor:
        """The activation and the way down, which recomputation can wrap by themselves."""
        if gate_BSF is None:
            return self.down(ACTIVATIONS[self.activation](up_BSF))
        if self.activation == "swiglu_clamped":
            return self.down(clamped_swiglu(gate_BSF, up_BSF))
        return self.down(gated(gate_BSF, up_BSF, ACTIVATIONS[self.activation]))


def mlp_of(spec: ModelSpec, mlp: DenseMlp | MoeMlp) -> nn.Module:
    """Dense, or experts, of which the shared ones are a dense MLP together."""
    if isinstance(mlp, DenseMlp):
        return Mlp(spec, mlp)
    return MixtureOfExperts(spec, mlp, Mlp(spec, mlp.shared()) if mlp.d_ff_shared else None)


class Layer(nn.Module):
    """Attention, residual; MLP, residual; and the norms: `attention_norm` and `mlp_norm` of what a branch reads,
    `attention_out_norm` and `mlp_out_norm` of what it gives."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        before, after = spec.norm_placement != "post", spec.norm_placement != "pre"
        self.is_parallel = spec.parallel_residual
        self.attention_norm = Norm(spec, spec.d_model) if before else None
        if isinstance(layer.attention, GroupedQueryAttention):
            self.attention: Attention | Latent = Attention(spec, layer.attention)
        else:
            self.attention = Latent(spec, layer.attention, attention_core)
        self.attention_out_norm = Norm(spec, spec.d_model) if after else None
        self.mlp_norm = Norm(spec, spec.d_model) if before else None
        self.mlp = mlp_of(spec, layer.mlp)
        self.mlp_out_norm = Norm(spec, spec.d_model) if after else None

    def forward(
        self, x_BSD: torch.Tensor, rotary: Rotary | None, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        attended_BSD = self.attention(_normed(self.attention_norm, x_BSD), rotary, documents_BS)
        y_BSD = x_BSD + _normed(self.attention_out_norm, attended_BSD)
        read_BSD = x_BSD if self.is_parallel else y_BSD
        return y_BSD + _normed(self.mlp_out_norm, self.mlp(_normed(self.mlp_norm, read_BSD)))


def _normed(norm: Norm | None, x_BSD: torch.Tensor) -> torch.Tensor:
    return x_BSD if norm is None else norm(x_BSD)
