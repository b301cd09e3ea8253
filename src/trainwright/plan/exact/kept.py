"""What a rank's forwards keep for backward, all microbatches of a step together, from the lists of operations."""

from collections import Counter

from trainwright.plan.exact.standing import Standing, whole
from trainwright.plan.operations import Agreement, AttentionCore, Elementwise, Matmul, Operation, Piece, Saved
from trainwright.plan.table import FULL
from trainwright.spec.counts import SavedCount, Tensors
from trainwright.spec.model import Attention, GroupedQueryAttention, MoeMlp


def is_counted(standing: Standing) -> bool:
    """Whether kept bytes are counted to the last one: `spec.left_out.NOT_YET` says of which runs."""
    model = standing.run.model
    plain = all(
        layer.mlp.activation != "swiglu_clamped"
        and not (isinstance(layer.mlp, MoeMlp) and layer.mlp.bias)
        and layer.attention.sliding_window is None
        and _is_plain(layer.attention, standing.run.layout.tp)
        for layer in model.layer_counts()
    )
    return plain and not model.scaled_embedding and model.logit_softcap is None


def _is_plain(attention: Attention, tp: int) -> bool:
    if not isinstance(attention, GroupedQueryAttention):
        # Values that aren't padded are a view of the up-projection's whole output, which is kept for them.
        is_padded = attention.d_value < attention.d_nope + attention.d_rope
        # With one head there is nothing to reorder, and a copy less.
        return is_padded and attention.num_heads > tp
    return not attention.sinks and attention.logit_softcap is None


def kept(standing: Standing) -> tuple[SavedCount, ...]:
    """By tensors; nothing where they aren't counted to the last byte."""
    if not is_counted(standing):
        return ()
    found: Counter[Tensors] = Counter()
    for piece, marks, passes in standing.pieces():
        if marks & FULL:
            found["residual stream"] += whole(piece.input_bytes) * passes
            continue
        for each in piece.operations:
            for place, saved in enumerate(each.saved):
                if not saved.is_kept(marks):
                    continue
                size = whole(saved.bytes)
                if saved.of_vocabulary:
                    size = size * standing.own_vocabulary // standing.most_vocabulary
                found[_tensors(each, place, saved, standing)] += size * passes
        found["logits"] += _own_logits(standing, piece) * passes
    return tuple(SavedCount(tensors=name, bytes=size) for name, size in sorted(found.items()) if size)


def _own_logits(standing: Standing, piece: Piece) -> int:
    return whole(piece.logits_bytes) * standing.own_vocabulary // standing.most_vocabulary


def _centers_heads(standing: Standing) -> bool:
    """Whether ranks take the mean off queries and keys together, and keep what is left of them in their place."""
    return (
        standing.run.layout.tp > 1
        and standing.run.model.norm == "layernorm"
        and any(getattr(layer.attention, "qk_norm", "none") == "all_heads" for layer in standing.run.model.layers)
    )


STREAM_READERS = ("query", "q", "q_down", "up", "router")
"""Matmuls that read the residual stream as it is where no norm stands before them."""


def _tensors(each: Operation, place: int, saved: Saved, standing: Standing) -> Tensors:
    assert not isinstance(each, Agreement)  # It keeps nothing.
    if saved.is_quantized:
        return "quantized"
    if isinstance(each, AttentionCore):
        return "attention's core"
    if isinstance(each, Matmul) and each.gradients_in_forward:
        return "gradients of the loss"
    if isinstance(each, Elementwise):
        if each.name == "norm":
            return "normed" if saved.is_statistic else "residual stream"
        if each.name == "latent norm":
            return "latents" if place == 0 else "normed"
        if each.name == "head norm":
            return "normed" if saved.is_statistic or _centers_heads(standing) else "attention's core"
        if each.name == "softmax":
            return "attention's core" if place == 0 else "dropout's masks"
        if each.name == "residual":
            return "dropout's masks"
        if each.name == "activation":
            return "up and gate" if place == 0 else "product"
        if each.name == "embedding":
            return "numbers of tokens"
        if each.name == "scaled shared experts":
            return "shared experts" if place == 0 else "numbers of tokens"
    if each.name == "router" and place == 1:
        return "scores of experts"
    if each.name in STREAM_READERS and standing.run.model.norm_placement == "post":
        return "residual stream"
    return "rows of experts" if each.name == "expert up" else "normed"
