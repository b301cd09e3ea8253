"""What a rank's forwards keep for backward, all microbatches of a step together, from the lists of operations."""

from collections import Counter

from trainwright.plan.exact.standing import Standing, whole
from trainwright.plan.operations import Agreement, AttentionCore, Elementwise, Matmul, Operation, Piece, Saved
from trainwright.plan.table import FULL
from trainwright.spec.counts import SavedCount, Tensors
from trainwright.spec.model import Attention, GroupedQueryAttention, MoeMlp


def is_counted(standing: Standing) -> bool:
    """Whether kept bytes are counted to the last one: `spec.left_out.NOT_YET` says of which runs."""
    recipe, model = standing.run.recipe, standing.run.model
    plain = all(
        layer.mlp.activation != "swiglu_clamped"
        and not (isinstance(layer.mlp, MoeMlp) and layer.mlp.bias)
        and layer.attention.sliding_window is None
        and _is_plain(layer.attention, standing.run.layout.tp)
        for layer in model.layer_counts()
    )
    chosen = recipe.attention_kernel != "unfused" and not recipe.dropout and not recipe.balance_loss
    # In bf16 a CPU's LayerNorm keeps its statistics in bf16, where the planner has fp32.
    precise = model.norm == "rmsnorm" or recipe.activation_format != "bf16"
    shaped = precise and not (recipe.loss_chunks > 1 and model.head_bias)
    usual = model.norm_placement == "pre" and not model.scaled_embedding and not model.learned_positions
    return plain and chosen and shaped and usual and not model.parallel_residual and model.logit_softcap is None


def _is_plain(attention: Attention, tp: int) -> bool:
    if not isinstance(attention, GroupedQueryAttention):
        # Values that aren't padded are a view of the up-projection's whole output, which is kept for them.
        is_padded = attention.d_value < attention.d_nope + attention.d_rope
        # With one head there is nothing to reorder, and a copy less.
        return attention.q_lora_rank is not None and is_padded and attention.num_heads > tp
    return attention.qk_norm == "none" and not attention.sinks and attention.logit_softcap is None


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
                found[_tensors(each, place, saved)] += size * passes
        found["logits"] += _own_logits(standing, piece) * passes
    return tuple(SavedCount(tensors=name, bytes=size) for name, size in sorted(found.items()) if size)


def _own_logits(standing: Standing, piece: Piece) -> int:
    return whole(piece.logits_bytes) * standing.own_vocabulary // standing.most_vocabulary


def _tensors(each: Operation, place: int, saved: Saved) -> Tensors:
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
        if each.name == "activation":
            return "up and gate" if place == 0 else "product"
        if each.name == "embedding":
            return "numbers of tokens"
        if each.name == "scaled shared experts":
            return "shared experts" if place == 0 else "numbers of tokens"
    if each.name == "router" and place == 1:
        return "scores of experts"
    return "rows of experts" if each.name == "expert up" else "normed"
