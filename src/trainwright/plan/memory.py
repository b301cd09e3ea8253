"""Bytes of a rank by cause, at the moments of the schedule at which it may hold most.

Per parameter (P of them on a rank, s ranks in its shard group; w bytes of a weight as layers read it, g of a
gradient, u of all moments; for bf16 with fp32 masters 2, 4 and 8, the 16 bytes of arXiv:1910.02054 s3.1 with
gradients kept in fp32):

    zero   compute copy   master    gradients   moments
    0      wP             4P        gP          uP
    1      wP             4P/s      gP          uP/s
    2      wP             4P/s      gP/s        uP/s
    3      gathered       4P/s      gP/s        uP/s

Experts have their own s: the ranks that hold the same ones. fp32 has no separate compute copy unless the masters
are sharded. Recipes with fewer bits keep cast copies beside the compute copy, in both orientations, or instead of
it where `gather_fp8`. What is gathered for a while (zero 3: two layers, or all where nothing is resharded; zero 2:
one layer's whole gradient, or one chunk's where the schedule works in rounds) counts as communication. Offloaded
states lie in host memory and count nothing. Activations are what every layer keeps for every microbatch that the
schedule holds. On top of them comes the larger of the loss's working set and one layer's.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.assembly import Moments, Shape, assembly
from trainwright.plan.table import Floats, Ints, Table
from trainwright.spec.ledger import BytesCause

ROUNDS = ("interleaved_1f1b", "breadth_first")
"""Schedules in which zero 2 holds one chunk's whole gradients for a round of microbatches."""

GATHERED_LAYERS = 2
"""FSDP holds the layer that computes and the one that is prefetched."""


@dataclass(frozen=True)
class Held:
    """Figures of pieces for every different inside of a table's rows, (pieces, insides)."""

    kept_bytes: Floats
    logits_bytes: Floats
    """Kept like them, and counted apart."""
    weight_bytes: Floats
    working_bytes: Floats
    params: Floats
    expert_params: Floats
    inside: Ints
    """Of each row the place of its inside, (rows,)."""

    def of_rows(self, values: Floats) -> Floats:
        """What insides have, (..., insides), as rows have it."""
        return values.take(self.inside, axis=-1)


def moment_bytes(table: Table, shape: Shape, at: Moments, held: Held) -> dict[BytesCause, Floats]:
    """Bytes by cause, each (moments, rows)."""
    activations, logits = map(held.of_rows, _activations(shape, at, held))
    params = held.of_rows(at.params @ held.params)
    layers = 2 * shape.num_kinds
    around = held.of_rows(at.params[:, layers:] @ held.params[layers:])
    tensors = _states(table, params, table.shards, around)
    if table.model.is_moe:
        experts = held.of_rows(at.params @ held.expert_params)
        for cause, value in _states(table, experts, table.expert_shards, np.zeros(1)).items():
            tensors[cause] = tensors[cause] + value
    communication = _communication(table, shape, at, held, around, activations + logits)
    tensors |= {"activations": activations, "logits": logits, "communication": communication}
    cluster = table.cluster
    framework = np.full_like(activations, cluster.framework_bytes)
    if cluster.allocator_fraction:
        framework += cluster.allocator_fraction * sum(tensors.values(), np.zeros(1))
    return {**tensors, "framework": framework}


def _weight_bytes(table: Table) -> float:
    """Bytes of a weight as it is gathered."""
    recipe = table.recipe
    return 2 * recipe.matmul_bytes if recipe.gather_fp8 else recipe.compute_bytes


def _states(table: Table, params: Floats, shards: Ints, around: Floats) -> dict[BytesCause, Floats]:
    """Bytes of the states of `params` parameters, (moments, rows), that are cut over `shards` ranks; `around` of
    them stand around the layers."""
    recipe, zero = table.recipe, table.columns.zero
    master, size = recipe.master_bytes, recipe.compute_bytes
    cast = 2 * recipe.matmul_bytes if recipe.is_low_precision else 0.0
    held = cast if recipe.gather_fp8 else size + cast
    away = recipe.optimizer.offload
    needs_copy = ((zero >= 1) & (shards > 1)) | (size < master) | away
    # Without anything to shard, zero 3 keeps the compute copy too: gathering from one rank is a cast. Where
    # masters are away, it keeps its shard of the copy.
    kept = np.where(shards == 1, held * ((size < master) | away), held / shards if away else 0.0)
    copy = np.where(zero == 3, kept, held * needs_copy)
    cut = np.where(zero >= 1, shards, 1)
    moments: Floats | float = 2 * recipe.moment_bytes
    if recipe.optimizer.name == "muon":
        # One momentum for matrices; what stands around the layers has AdamW's two.
        share = np.divide(around, params, out=np.zeros_like(params), where=params > 0)
        moments = recipe.moment_bytes * (1 + np.clip(share, 0, 1))
    on_device = 0 if away else 1
    return {
        "parameters": params * (copy + on_device * master / cut),
        "gradients": params * (recipe.gradient_bytes / np.where(zero >= 2, shards, 1)),
        "optimizer": params * (on_device / cut) * moments,
    }


def _communication(
    table: Table, shape: Shape, at: Moments, held: Held, around: Floats, activations: Floats
) -> Floats:
    """Buffers: of FSDP's gathers and reductions, of sends between stages and of tensor parallelism."""
    recipe, zero = table.recipe, table.columns.zero
    size, gradient = recipe.compute_bytes, recipe.gradient_bytes
    layers = 2 * shape.num_kinds
    send = table.residual_tokens * table.model.d_model * size * (table.columns.pp > 1)
    gather = table.tokens * table.model.d_model * size * (table.columns.tp > 1)
    buffers = np.broadcast_to(2 * send + gather + table.cluster.buffer_bytes, activations.shape)
    if not np.any(zero >= 2):
        return buffers

    def unit(params: Floats, shards: Ints) -> tuple[Floats, Floats]:
        """Bytes gathered, and bytes of whole gradients, of units of so many parameters."""
        gathers = np.where((zero == 3) & (shards > 1), _weight_bytes(table), 0.0)
        reduces = np.where((zero >= 2) & (shards > 1), gradient, 0.0)
        return gathers * params, reduces * params

    gathers, reduces = unit(held.of_rows(held.params[:layers]), table.shards)
    if table.model.is_moe:
        experts = unit(held.of_rows(held.expert_params[:layers]), table.expert_shards)
        gathers, reduces = gathers + experts[0], reduces + experts[1]
    # Layers that are not resharded stay gathered, all of the rank's.
    stays = (zero == 3) & (table.columns.reshard == 0)
    gathered_layers = GATHERED_LAYERS * gathers.max(axis=0)
    if stays.any():
        gathered_layers = np.where(stays, at.params[:, :layers] @ gathers, gathered_layers)
    largest = gathered_layers + reduces.max(axis=0)
    if shape.vpp > 1 and shape.schedule in ROUNDS:
        chunks, held_by = assembly(shape).chunks
        largest = np.where(zero == 2, _largest(chunks[:, :layers] @ reduces, held_by[at.rank]), largest)
    # Embedding, norm and head are one unit around the layers: gathered all the time under zero 3, and reduced at
    # the end of backward, when the layers' activations are gone.
    gathered, reduced = unit(around, table.shards)
    end = np.maximum(np.where(reduced > 0, around * (size + gradient), 0.0) - activations, 0.0)
    return gathered + np.maximum(largest, end) + buffers


def _activations(shape: Shape, at: Moments, held: Held) -> tuple[Floats, Floats]:
    """What is kept for backward with one layer's working set, and the logits with the loss's, (moments,
    insides)."""
    activations, logits = at.whole @ held.kept_bytes, at.whole @ held.logits_bytes
    if at.weight_only.any():
        activations += at.weight_only @ held.weight_bytes
    layers = 2 * shape.num_kinds
    layer_working = _largest(held.working_bytes[:layers], at.running[:, :layers])
    loss_working = _largest(held.working_bytes[layers:], at.running[:, layers:])
    # The loss's backward is over before the first layer's begins, and its logits are gone: the larger is the peak.
    gone = at.running @ held.logits_bytes
    at_the_loss = loss_working + gone >= layer_working
    return (
        activations + np.where(at_the_loss, 0.0, layer_working),
        logits + np.where(at_the_loss, loss_working, -gone),
    )


def _largest(values: Floats, counts: Floats | NDArray[np.bool_]) -> Floats:
    """The largest of the pieces' values, (pieces, ...), of which each moment has some, (moments, pieces)."""
    largest = np.zeros((len(counts), values.shape[1]))
    for value, has in zip(values, (counts > 0).T, strict=True):
        np.maximum(largest, has[:, None] * value, out=largest)
    return largest
