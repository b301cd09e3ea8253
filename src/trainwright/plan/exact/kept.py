"""What a rank's forwards keep for backward, all microbatches of a step together, from the lists of operations."""

from collections import Counter

from trainwright.plan.exact.standing import Standing, whole
from trainwright.plan.linear import is_gathered_again
from trainwright.plan.operations import Agreement, AttentionCore, Elementwise, Matmul, Operation, Piece, Saved
from trainwright.plan.table import FULL
from trainwright.spec.counts import SavedCount, Tensors


def kept(standing: Standing) -> tuple[SavedCount, ...]:
    """By tensors."""
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
    found["residual stream"] += _unread_inputs(standing)
    return tuple(SavedCount(tensors=name, bytes=size) for name, size in sorted(found.items()) if size)


def _unread_inputs(standing: Standing) -> int:
    """What came from the stage before is held until its gradient is there, though no operation keeps it: where no
    norm and no plain matmul reads it, and nothing gathers it once more."""
    run, policy = standing.run, standing.table.policies[0]
    if run.model.norm_placement != "post" or not run.recipe.is_low_precision or policy.marks & FULL:
        return 0
    if is_gathered_again(standing.table).any():
        return 0
    passes = sum(chunk.passes for chunk in standing.chunks if not chunk.is_first)
    return passes * whole(standing.piece_of(run.model.layers[0]).input_bytes)


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
