"""What is trained: the architecture, and every count that follows from it.

Layers come as repeated groups, each a short pattern of layers: DeepSeek-V3 is `3 x (dense)` then
`58 x (moe)`; gpt-oss is `18 x (sliding, full)`. A layer is an attention and an MLP; both say how many
parameters they have and how many of them multiply one token, so that no count is derived twice.

Shape letters, used as suffixes of tensor names in the whole project (a suffix names the logical dims):

    B  sequences of a microbatch     D  d_model             V  vocabulary
    S  positions of a sequence       N  attention heads     F  d_ff, width inside the MLP
    T  tokens (B and S flattened)    K  key/value heads     X  experts
    H  d_head, width of one head     G  query heads per key/value head
    C  top_k, choices of one token   R  rows: copies of tokens on their way through experts

FLOPs follow one rule: a matmul of (m, k) by (k, n) is 2*m*k*n, and backward is twice forward. What is
counted of attention is the convention, which always has a name (`FlopConvention`).
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Fraction, Natural, Noun, Positive, Sequence
from trainwright.spec.errors import reject

FlopConvention = Literal["full", "causal", "6n"]
"""What an MFU counts, forward and backward, recompute never included.

full    matmuls, and attention over all seq_len keys (PaLM, appendix B; Megatron's original formula)
causal  matmuls, and attention over the keys that a causal mask leaves: seq_len / 2 on average
6n      6 FLOPs for every active parameter, the embedding table included, attention left out
"""

CONVENTION_TEXT: dict[FlopConvention, str] = {
    "full": "model FLOPs, full attention (a query meets all seq_len keys, or its window), recompute not counted",
    "causal": "model FLOPs, causal attention (half of the keys), recompute not counted",
    "6n": "6 x active parameters (embedding included) per token, attention and recompute not counted",
}


class GroupedQueryAttention(Noun):
    """Heads that share keys and values in groups: MHA has num_kv_heads = num_heads, MQA has 1."""

    kind: Literal["gqa"] = "gqa"
    num_heads: Count
    num_kv_heads: Count
    d_head: Count
    sliding_window: Count | None = None
    """Positions that a query sees, itself included; None sees all earlier ones."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "per_head", "all_heads"] = "none"
    """Norm of queries and keys: one weight of d_head (Qwen3, Gemma 3), or over all heads (OLMo 2)."""
    sinks: bool = False
    """One learned logit per head in the softmax's denominator (gpt-oss)."""
    logit_softcap: Positive | None = None
    """c in c * tanh(score / c) (Gemma 2)."""
    query_scale: Positive | None = None
    """Scores are multiplied by it; None is 1 / sqrt(d_head)."""

    @model_validator(mode="after")
    def _check(self) -> "GroupedQueryAttention":
        if self.num_heads % self.num_kv_heads:
            reject("num_kv_heads", self.num_kv_heads, f"must divide num_heads={self.num_heads}")
        return self

    def matmul_params(self, d_model: int) -> int:
        """Weights of the projections q, k, v and out, without biases."""
        return d_model * self.d_head * 2 * (self.num_heads + self.num_kv_heads)

    def params(self, d_model: int) -> int:
        heads, kv_heads, d_head = self.num_heads, self.num_kv_heads, self.d_head
        bias = (heads + 2 * kv_heads) * d_head * self.qkv_bias + d_model * self.out_bias
        norm = {"none": 0, "per_head": 2 * d_head, "all_heads": (heads + kv_heads) * d_head}[self.qk_norm]
        return self.matmul_params(d_model) + bias + norm + heads * self.sinks

    @property
    def score_flops_per_key(self) -> int:
        """Forward FLOPs of one query token for each key that it meets: scores and values, all heads."""
        return 4 * self.num_heads * self.d_head


class LatentAttention(Noun):
    """Multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434 s2.1): keys and values come from one
    narrow latent per token; a part of each head's query and key carries the rotary position."""

    kind: Literal["mla"] = "mla"
    num_heads: Count
    q_lora_rank: Count | None = None
    """Width of the queries' latent; None projects queries from d_model directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: Count
    d_nope: Count
    """Width per head of queries and keys without position."""
    d_rope: Count
    """Width of the rotary part of queries (per head) and of the key (shared by all heads)."""
    d_value: Count
    sliding_window: Count | None = None

    def matmul_params(self, d_model: int) -> int:
        d_query = self.num_heads * (self.d_nope + self.d_rope)
        query = d_model * d_query if self.q_lora_rank is None else self.q_lora_rank * (d_model + d_query)
        down = d_model * (self.kv_lora_rank + self.d_rope)
        up = self.kv_lora_rank * self.num_heads * (self.d_nope + self.d_value)
        return query + down + up + self.num_heads * self.d_value * d_model

    def params(self, d_model: int) -> int:
        return self.matmul_params(d_model) + self.kv_lora_rank + (self.q_lora_rank or 0)

    @property
    def score_flops_per_key(self) -> int:
        return 2 * self.num_heads * (self.d_nope + self.d_rope + self.d_value)


Attention = Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped"]


class DenseMlp(Noun):
    """Two matmuls (up, down) around an activation, or three where a gate multiplies it (SwiGLU, GeGLU)."""

    kind: Literal["dense"] = "dense"
    d_ff: Count
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> "DenseMlp":
        if self.activation == "swiglu_clamped" and not self.gated:
            reject("activation", self.activation, "clamps a gate too, and gated is false; set gated=true")
        return self

    def matmul_params(self, d_model: int) -> int:
        return (3 if self.gated else 2) * d_model * self.d_ff

    def params(self, d_model: int) -> int:
        return self.matmul_params(d_model) + self.bias * ((1 + self.gated) * self.d_ff + d_model)

    active_matmul_params = matmul_params
    active_params = params


class MoeMlp(Noun):
    """A router sends each token to top_k of num_experts MLPs; shared experts see every token."""

    kind: Literal["moe"] = "moe"
    num_experts: Count
    top_k: Count
    d_ff: Count
    """Width of one routed expert."""
    d_ff_shared: Natural = 0
    """Width of all shared experts together; 0 where there is none."""
    shared_gate: bool = False
    """A learned gate scales the shared experts' output (Qwen2-MoE)."""
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    """The router's linear layer has a bias (gpt-oss)."""
    balance_bias: bool = False
    """A bias per expert, moved by the load and not by gradients, steers selection (DeepSeek-V3)."""
    normalize_top_k: bool = True
    """The chosen experts' weights are made to sum to one."""
    routed_scale: Positive = 1.0
    num_groups: Count = 1
    """Experts stand in groups (one per node); a token may use top_groups of them."""
    top_groups: Count = 1

    @model_validator(mode="after")
    def _check(self) -> "MoeMlp":
        if self.top_k > self.num_experts:
            reject("top_k", self.top_k, f"must be at most num_experts={self.num_experts}")
        if self.shared_gate and not self.d_ff_shared:
            reject(
                "shared_gate", self.shared_gate, "scales shared experts, of which there are none; set d_ff_shared"
            )
        if self.num_experts % self.num_groups:
            reject("num_groups", self.num_groups, f"must divide num_experts={self.num_experts}")
        if self.top_groups > self.num_groups:
            reject("top_groups", self.top_groups, f"must be at most num_groups={self.num_groups}")
        reached = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > reached:
            reject("top_k", self.top_k, f"must be at most the {reached} experts of top_groups={self.top_groups}")
        return self

    def expert(self) -> DenseMlp:
        """One routed expert as the MLP that it is."""
        return DenseMlp(d_ff=self.d_ff, gated=self.gated, activation=self.activation, bias=self.bias)

    def shared(self) -> DenseMlp:
        """All shared experts, where there are any, as the one MLP that they are together."""
        return DenseMlp(d_ff=self.d_ff_shared, gated=self.gated, activation=self.activation)

    def _around(self, d_model: int, *, matmul_only: bool) -> int:
        """Parameters beside the routed experts: router and shared experts."""
        matrices = 3 if self.gated else 2
        router = d_model * self.num_experts
        shared = matrices * d_model * self.d_ff_shared + d_model * self.shared_gate
        biases = self.num_experts * (self.router_bias + self.balance_bias)
        return router + shared + (0 if matmul_only else biases)

    def matmul_params(self, d_model: int) -> int:
        return self.num_experts * self.expert().matmul_params(d_model) + self._around(d_model, matmul_only=True)

    def params(self, d_model: int) -> int:
        return self.num_experts * self.expert().params(d_model) + self._around(d_model, matmul_only=False)

    def active_matmul_params(self, d_model: int) -> int:
        return self.top_k * self.expert().matmul_params(d_model) + self._around(d_model, matmul_only=True)

    def active_params(self, d_model: int) -> int:
        return self.top_k * self.expert().params(d_model) + self._around(d_model, matmul_only=False)


Mlp = Annotated[DenseMlp | MoeMlp, Field(discriminator="kind")]


class LayerSpec(Noun):
    """One transformer layer: an attention, then an MLP (or both side by side, `ModelSpec.parallel_residual`)."""

    attention: Attention
    mlp: Mlp


class LayerGroup(Noun):
    """`pattern` of layers, `repeat` times over."""

    repeat: Annotated[int, Field(ge=1, le=10_000)]
    pattern: Annotated[Sequence[LayerSpec], Field(min_length=1)]


class RopeScaling(Noun):
    """How rotary frequencies are stretched beyond the length that a model was first trained at.

    llama3: Llama 3.1's rule (low frequencies divided by factor, high ones kept, a ramp between);
    yarn: arXiv:2309.00071; linear: all divided by factor.
    """

    kind: Literal["llama3", "yarn", "linear"]
    factor: Positive
    original_max_positions: Count
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True
    """yarn: the ends of the ramp are rounded to whole frequencies; gpt-oss does not."""


class Rope(Noun):
    """Rotary position embedding (arXiv:2104.09864) on the first `fraction` of each head's width."""

    theta: Positive = 10000.0
    local_theta: Positive | None = None
    """Theta of layers with a sliding window where they have their own (Gemma 3)."""
    fraction: Fraction = 1.0
    scaling: RopeScaling | None = None


class ModelSpec(Noun):
    """An architecture. Counts are properties; `flops_per_token` names its convention."""

    name: str
    d_model: Count
    vocab_size: Count
    layer_groups: Annotated[Sequence[LayerGroup], Field(min_length=1)]
    tied_embeddings: bool = False
    head_bias: bool = False
    norm: Literal["rmsnorm", "layernorm", "layernorm_no_bias"] = "rmsnorm"
    norm_epsilon: Positive = 1e-5
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: before attention and MLP; post: on their outputs (OLMo 2); sandwich: both (Gemma 2)."""
    zero_centered_norm: bool = False
    """The norm multiplies by 1 + weight (Gemma)."""
    parallel_residual: bool = False
    """Attention and MLP read the same input (GPT-NeoX)."""
    rope: Rope | None = None
    """None, as where a file leaves it out: no rotary embedding."""
    learned_positions: Natural = 0
    """Rows of a learned position table (GPT-2); 0 where there is none."""
    max_positions: Count = 131072
    """The longest sequence that the model is meant for."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(d_model) (Gemma)."""
    logit_softcap: Positive | None = None
    mtp_depth: Natural = 0
    """Multi-token prediction modules (DeepSeek-V3); counted apart, in `mtp_params`."""
    source: str = ""
    """Where the architecture was read, and what the source says of its size."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str) -> "ModelSpec":
        """The architecture that a parsed Hugging Face config.json describes; see `spec/hf.py`."""
        from trainwright.spec.hf import model_from_hf  # here, as it imports this module

        return model_from_hf(config, name)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Every layer, in order."""
        return tuple(layer for group in self.layer_groups for _ in range(group.repeat) for layer in group.pattern)

    @property
    def num_layers(self) -> int:
        return sum(group.repeat * len(group.pattern) for group in self.layer_groups)

    def layer_counts(self) -> dict[LayerSpec, int]:
        """How often each different layer occurs, in order of first occurrence."""
        return self.counted_layers

    @cached_property
    def counted_layers(self) -> dict[LayerSpec, int]:
        """`layer_counts`, counted once."""
        counts: dict[LayerSpec, int] = {}
        for group in self.layer_groups:
            for layer in group.pattern:
                counts[layer] = counts.get(layer, 0) + group.repeat
        return counts

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """Of every layer, in order, its place among the different ones."""
        places = {layer: place for place, layer in enumerate(self.counted_layers)}
        kinds: list[int] = []
        for group in self.layer_groups:
            kinds += [places[layer] for layer in group.pattern] * group.repeat
        return tuple(kinds)

    @property
    def is_moe(self) -> bool:
        return any(isinstance(layer.mlp, MoeMlp) for layer in self.layer_counts())

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over d_model."""
        return self.d_model * (2 if self.norm == "layernorm" else 1)

    @property
    def embeds_last(self) -> bool:
        """The last stage reads the embedding's table: as its head, or for the tokens of multi-token prediction."""
        return self.tied_embeddings or self.mtp_depth > 0

    @property
    def norms_per_layer(self) -> int:
        return 4 if self.norm_placement == "sandwich" else 2

    def layer_params(self, layer: LayerSpec) -> int:
        d_model = self.d_model
        return (
            layer.attention.params(d_model) + layer.mlp.params(d_model) + self.norms_per_layer * self.norm_params
        )

    def _active_layer_params(self, layer: LayerSpec) -> int:
        d_model = self.d_model
        mlp = layer.mlp.active_params(d_model)
        return layer.attention.params(d_model) + mlp + self.norms_per_layer * self.norm_params

    @property
    def embedding_params(self) -> int:
        """The token table and, where there is one, the table of positions."""
        return (self.vocab_size + self.learned_positions) * self.d_model

    @property
    def head_params(self) -> int:
        """The output head's own parameters: none of the matrix where it is tied to the embedding."""
        return self.vocab_size * self.d_model * (not self.tied_embeddings) + self.vocab_size * self.head_bias

    @property
    def params(self) -> int:
        """All parameters, each tensor once, without multi-token prediction modules."""
        return sum(self.params_by_part.values())

    @property
    def params_by_part(self) -> dict[str, int]:
        """`params` by embedding, attention, mlp, norm and head."""
        counts = self.layer_counts().items()
        return {
            "embedding": self.embedding_params,
            "attention": sum(count * layer.attention.params(self.d_model) for layer, count in counts),
            "mlp": sum(count * layer.mlp.params(self.d_model) for layer, count in counts),
            "norm": (self.num_layers * self.norms_per_layer + 1) * self.norm_params,
            "head": self.head_params,
        }

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: embedding and head, and of routed experts top_k."""
        layers = sum(count * self._active_layer_params(layer) for layer, count in self.layer_counts().items())
        return self.embedding_params + layers + self.norm_params + self.head_params

    @property
    def mtp_params(self) -> int:
        """Parameters of the multi-token prediction modules (arXiv:2412.19437 s2.2): each a projection of
        2 * d_model to d_model, two norms in front of it, a layer like the last, and a norm before the head;
        embedding and head are shared with the main model."""
        module = 2 * self.d_model**2 + 3 * self.norm_params + self.layer_params(self.layers[-1])
        return self.mtp_depth * module

    @property
    def active_matmul_params(self) -> int:
        """Parameters that one token is multiplied by: the head among them, tied or not; a lookup isn't."""
        return self.vocab_size * self.d_model + sum(
            count * (layer.attention.matmul_params(self.d_model) + layer.mlp.active_matmul_params(self.d_model))
            for layer, count in self.layer_counts().items()
        )

    def flops_per_token(self, seq_len: int, convention: FlopConvention = "full") -> float:
        """FLOPs of one token's forward and backward pass, recompute left out, multi-token prediction too.

        `convention` says what of attention is counted; see `FlopConvention`.
        """
        if convention == "6n":
            return 6.0 * self.active_params
        attention = sum(
            count
            * layer.attention.score_flops_per_key
            * mean_keys(seq_len, layer.attention.sliding_window, causal=convention == "causal")
            for layer, count in self.layer_counts().items()
        )
        return 6.0 * self.active_matmul_params + 3.0 * attention


def mean_keys(seq_len: int, sliding_window: int | None, *, causal: bool) -> float:
    """Keys that a query meets, averaged over a sequence.

    Without the mask a query meets all of them (or its window); under it half of them, and with a window w
    the first w queries meet fewer: w - w^2 / (2 * seq_len), which is seq_len / 2 at w = seq_len.
    """
    window = min(sliding_window or seq_len, seq_len)
    return window - window**2 / (2 * seq_len) if causal else float(window)


def seen_keys(seq_len: int, sliding_window: int | None) -> float:
    """Keys that the causal mask leaves a query, averaged over a sequence: (s + 1) / 2 of s, its own among them.
    `mean_keys` is the convention of papers, s / 2; this is what a kernel computes."""
    window = min(sliding_window or seq_len, seq_len)
    return window - window * (window - 1) / (2 * seq_len)


QUERIES_AT_A_TIME = 256
"""Where attention is written out or masks are given to its kernel: enough for whole matmuls, little beside a long
sequence."""


def reaches(seq_len: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Of queries some at a time: which, and the keys that they can reach."""
    for first in range(0, seq_len, QUERIES_AT_A_TIME):
        last = min(first + QUERIES_AT_A_TIME, seq_len)
        yield slice(first, last), slice(max(0, first - window + 1), last)


def reached_keys(seq_len: int, sliding_window: int | None) -> float:
    """Keys that are computed for a query then, averaged over a sequence."""
    parts = reaches(seq_len, sliding_window or seq_len)
    pairs = sum((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in parts)
    return pairs / seq_len
