"""The parameters of a rank, tensor by tensor: name, local shape, and how its gradient comes about.

Their order is that in which the program registers them, which decides what travels together in a bucket.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from trainwright.plan.exact.standing import Chunk, Standing, multiplied_in_turn
from trainwright.spec.layout import Layout
from trainwright.spec.model import Attention, GroupedQueryAttention, LayerSpec, ModelSpec, MoeMlp
from trainwright.spec.run import Run


class Tensor(NamedTuple):
    """A parameter as this rank has it before anything is sharded over dp."""

    name: str
    shape: tuple[int, ...]
    is_partial: bool = False
    """Its gradient is a sum over tp of parts."""
    of_experts: bool = False
    is_matrix: bool = False
    waits: bool = False
    """Its gradient is made in the weight-gradient act, where backward is split: of matmuls with plain weights."""
    is_low: bool = False
    """Low-precision products read it, where the recipe has such."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Unit(NamedTuple):
    """What sharded data parallelism gathers and reduces together."""

    tensors: tuple[Tensor, ...]
    of_experts: bool = False


def chunk_units(standing: Standing, chunk: Chunk) -> list[Unit]:
    """The units of a chunk: each layer, its experts apart, and what is around the layers (last)."""
    tensors = list(chunk_tensors(standing, chunk))
    units: list[Unit] = []
    prefixes = [f"layers.{number}." for number in chunk.layers]
    if chunk.is_last:
        prefixes += [f"later.{number}." for number in range(standing.run.model.mtp_depth)]
    for prefix in prefixes:
        inside = [each for each in tensors if each.name.startswith(prefix)]
        experts = tuple(each for each in inside if each.of_experts)
        if experts:
            units.append(Unit(experts, of_experts=True))
        units.append(Unit(tuple(each for each in inside if not each.of_experts)))
    units.append(Unit(tuple(each for each in tensors if not each.name.startswith(("layers.", "later.")))))
    return units


def chunk_tensors(standing: Standing, chunk: Chunk) -> Iterator[Tensor]:
    """In the order of `Transformer.named_parameters`."""
    run, rank = standing.run, standing.at.tp
    model, layout = run.model, run.layout
    partial = layout.tp > 1 and run.recipe.sequence_parallel
    d_model, rows = model.d_model, cut_rows(model.vocab_size, layout.tp, rank)
    if chunk.is_first or (chunk.is_last and model.mtp_depth):
        yield Tensor("embedding.weight", (rows, d_model), is_matrix=True)
    if chunk.is_first and model.learned_positions:
        yield Tensor("positions.weight", (model.learned_positions, d_model), partial, is_matrix=True)
    for number in chunk.layers:
        yield from layer_tensors(standing, model.layers[number], f"layers.{number}.")
    if not chunk.is_last:
        return
    yield from norm_tensors(model, "norm.", d_model, partial)
    in_one = run.recipe.loss_chunks == 1
    if not (model.tied_embeddings and (chunk.is_first or model.mtp_depth)):
        yield Tensor("head.weight", (rows, d_model), is_matrix=True, waits=in_one)
    if model.head_bias:
        yield Tensor("head.bias", (rows,), waits=in_one)
    for number in range(model.mtp_depth):
        prefix = f"later.{number}."
        for norm in ("hidden_norm.", "token_norm."):
            yield from norm_tensors(model, prefix + norm, d_model, partial)
        yield from _linear(f"{prefix}join", d_model, 2 * d_model, False, partial)
        yield from layer_tensors(standing, model.layers[-1], f"{prefix}layer.")
        yield from norm_tensors(model, f"{prefix}norm.", d_model, partial)


def cut_rows(size: int, parts: int, part: int) -> int:
    """Rows of a part where `size` are cut as PyTorch cuts them: all as many but the last ones."""
    each = -(-size // parts)
    return max(0, min(each, size - part * each))


def norm_tensors(model: ModelSpec, name: str, width: int, partial: bool, bias: bool = True) -> Iterator[Tensor]:
    yield Tensor(f"{name}weight", (width,), partial)
    if model.norm == "layernorm" and bias:
        yield Tensor(f"{name}bias", (width,), partial)


def layer_tensors(standing: Standing, layer: LayerSpec, prefix: str) -> Iterator[Tensor]:
    run = standing.run
    model, layout = run.model, run.layout
    partial = layout.tp > 1 and run.recipe.sequence_parallel
    before, after = model.norm_placement != "post", model.norm_placement != "pre"
    if before:
        yield from norm_tensors(model, f"{prefix}attention_norm.", model.d_model, partial)
    yield from _attention_tensors(model, layer.attention, layout, f"{prefix}attention.", partial)
    if after:
        yield from norm_tensors(model, f"{prefix}attention_out_norm.", model.d_model, partial)
    if before:
        yield from norm_tensors(model, f"{prefix}mlp_norm.", model.d_model, partial)
    if isinstance(layer.mlp, MoeMlp):
        yield from _moe_tensors(run, layer.mlp, f"{prefix}mlp.", partial)
    else:
        mlp = layer.mlp
        yield from _mlp_tensors(model.d_model, mlp.d_ff, mlp.gated, mlp.bias, layout.tp, f"{prefix}mlp.", partial)
    if after:
        yield from norm_tensors(model, f"{prefix}mlp_out_norm.", model.d_model, partial)


def _linear(
    name: str, out: int, inner: int, bias: bool, partial: bool = False, *, is_low: bool = True
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (out, inner), partial, is_matrix=True, waits=True, is_low=is_low)
    if bias:
        yield Tensor(f"{name}.bias", (out,), partial, waits=True)


def _attention_tensors(
    model: ModelSpec, attention: Attention, layout: Layout, prefix: str, partial: bool
) -> Iterator[Tensor]:
    tp, d_model = layout.tp, model.d_model
    sequence_cut = tp > 1
    if not isinstance(attention, GroupedQueryAttention):
        heads = attention.num_heads // tp
        query, d_query = heads * (attention.d_nope + attention.d_rope), d_model
        if attention.q_lora_rank is not None:
            d_query = attention.q_lora_rank
            yield from _linear(f"{prefix}query_down", d_query, d_model, False, sequence_cut)
            yield Tensor(f"{prefix}query_norm.weight", (d_query,), sequence_cut)
        yield from _linear(f"{prefix}query", query, d_query, False)
        latent = attention.kv_lora_rank
        yield from _linear(f"{prefix}latent", latent + attention.d_rope, d_model, False, sequence_cut)
        yield Tensor(f"{prefix}latent_norm.weight", (latent,), sequence_cut)
        yield from _linear(f"{prefix}key_value", heads * (attention.d_nope + attention.d_value), latent, False)
        yield from _linear(f"{prefix}out", d_model, heads * attention.d_value, False)
        return
    width, kv_width = attention.num_heads * attention.d_head // tp, attention.num_kv_heads * attention.d_head
    is_cut = attention.num_kv_heads % tp == 0
    kv_width = kv_width // tp if is_cut else kv_width
    yield from _linear(f"{prefix}query", width, d_model, attention.qkv_bias)
    for name in ("key", "value"):
        yield from _linear(f"{prefix}{name}", kv_width, d_model, attention.qkv_bias, not is_cut)
    yield Tensor(f"{prefix}out.weight", (d_model, width), is_matrix=True, waits=True, is_low=True)
    if attention.out_bias:
        yield Tensor(f"{prefix}out.bias", (d_model,), partial, waits=tp == 1)
    if attention.qk_norm == "per_head":
        for name in ("query_norm", "key_norm"):
            yield Tensor(f"{prefix}{name}.weight", (attention.d_head,), sequence_cut)
    if attention.qk_norm == "all_heads":
        yield Tensor(f"{prefix}query_norm.weight", (width,))
        yield Tensor(f"{prefix}key_norm.weight", (kv_width,), not is_cut)
    if attention.sinks:
        yield Tensor(f"{prefix}sinks.weight", (attention.num_heads // tp,))


def _mlp_tensors(
    d_model: int, d_ff: int, gated: bool, bias: bool, tp: int, prefix: str, partial: bool
) -> Iterator[Tensor]:
    if gated:
        yield from _linear(f"{prefix}gate", d_ff // tp, d_model, bias)
    yield from _linear(f"{prefix}up", d_ff // tp, d_model, bias)
    yield Tensor(f"{prefix}down.weight", (d_model, d_ff // tp), is_matrix=True, waits=True, is_low=True)
    if bias:
        yield Tensor(f"{prefix}down.bias", (d_model,), partial, waits=tp == 1)


def _moe_tensors(run: Run, mlp: MoeMlp, prefix: str, partial: bool) -> Iterator[Tensor]:
    layout, in_turn = run.layout, multiplied_in_turn(run, mlp)
    d_model, width, experts = run.model.d_model, mlp.d_ff // layout.etp, mlp.num_experts // layout.ep
    yield from _linear(f"{prefix}router", mlp.num_experts, d_model, mlp.router_bias, partial, is_low=False)
    names: list[tuple[str, tuple[int, ...]]] = [
        ("up", (experts, width, d_model)),
        ("down", (experts, d_model, width)),
    ]
    if mlp.gated:
        names.append(("gate", (experts, width, d_model)))
    if mlp.bias:
        names += [("up_bias", (experts, width)), ("down_bias", (experts, d_model))]
        names += [("gate_bias", (experts, width))] * mlp.gated
    for name, shape in names:
        is_matrix = not name.endswith("bias")
        yield Tensor(
            f"{prefix}experts.{name}",
            shape,
            of_experts=True,
            is_matrix=is_matrix,
            waits=is_matrix and in_turn,
            is_low=is_matrix,
        )
    if mlp.d_ff_shared:
        shared = f"{prefix}shared."
        yield from _mlp_tensors(d_model, mlp.d_ff_shared, mlp.gated, False, layout.tp, shared, partial)
    if mlp.shared_gate and mlp.d_ff_shared:
        yield from _linear(f"{prefix}shared_gate", 1, d_model, False, partial, is_low=False)
