"""Bytes of a rank by cause, over the pipeline's ranks: what each holds when it holds most.

Per parameter (P of them on a rank, s ranks in its shard group, sizes for bf16 with fp32 masters; the 16 bytes
of arXiv:1910.02054 s3.1, with gradients kept in fp32):

    zero   compute copy   master    gradients   moments
    0      2P             4P        4P          8P
    1      2P             4P/s      4P          8P/s
    2      2P             4P/s      4P/s        8P/s
    3      gathered       4P/s      4P/s        8P/s

fp32 has no separate compute copy unless the masters are sharded. What is gathered for a while (zero 3: two
layers; zero 2: one layer's whole gradient) counts as communication. Activations are the saved bytes of every
layer for every microbatch that the schedule holds; full recompute holds each layer's input. On top of them comes
the larger of the loss's working set and one layer's (with full recompute, its saved bytes too).
"""

from dataclasses import dataclass

import numpy as np

from trainwright.plan.operations import Piece
from trainwright.plan.table import RECOMPUTE, Floats, Table
from trainwright.spec.ledger import BytesCause

GATHERED_LAYERS = 2
"""FSDP holds the layer that computes and the one that is prefetched."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes by cause, each of shape (candidates, pp)."""

    bytes: dict[BytesCause, Floats]

    @property
    def total(self) -> Floats:
        return sum(self.bytes.values(), np.zeros(1))


@dataclass(frozen=True)
class Holding:
    """What a group of candidates with equal pp, vpp and schedule holds: arrays over (pp, kinds of layer)."""

    layer_kinds: tuple[Piece, ...]
    embedding: Piece
    head: Piece
    layers: Floats
    """Layers of each kind on each rank, (pp, kinds)."""
    held_layers: Floats
    """Layers times the microbatches held of each, (candidates, pp, kinds)."""
    held_inputs: Floats
    """Microbatches held at the embedding by the first and at the head by the last rank, (candidates, 2)."""


def rank_memory(table: Table, holding: Holding) -> RankMemory:
    """Bytes of every rank of the pipeline at its peak."""
    recipe, shards = table.recipe, table.shards[:, None]
    zero = table.columns.zero[:, None]
    params = _params(table, holding)
    master, size = recipe.master_bytes, recipe.compute_bytes
    sharded = (zero >= 1) & (shards > 1)
    copy = np.where(zero == 3, 0, size) * (sharded | (size < master))
    # Without anything to shard, zero 3 keeps the compute copy too: gathering from one rank is a cast.
    copy = np.where((zero == 3) & (shards == 1) & (size < master), size, copy)
    largest_layer = np.max([piece.params + 0 * shards[:, 0] for piece in holding.layer_kinds], axis=0)[:, None]
    gathered = np.where((zero == 3) & (shards > 1), GATHERED_LAYERS * size, 0)
    reduced = np.where((zero >= 2) & (shards > 1), master, 0)
    activations, logits = _activations(table, holding)
    send_bytes = table.residual_tokens * table.model.d_model * size * (table.columns.pp > 1)
    gather_bytes = table.tokens * table.model.d_model * size * (table.columns.tp > 1)
    # Embedding, norm and head are one unit around the layers: gathered all the time under zero 3, and reduced at
    # the end of backward, when the layers' activations are gone.
    root = _root_params(table, holding)
    at_the_end = np.maximum(root * np.where(reduced > 0, size + master, 0) - activations - logits, 0.0)
    sharded_units = root * np.where(gathered > 0, size, 0) + np.maximum(
        largest_layer * (gathered + reduced), at_the_end
    )
    communication = sharded_units + 2 * send_bytes[:, None] + gather_bytes[:, None]
    by_cause: dict[BytesCause, Floats] = {
        "parameters": params * (copy + master / np.where(zero >= 1, shards, 1)),
        "gradients": params * master / np.where(zero >= 2, shards, 1),
        "optimizer": params * 2 * master / np.where(zero >= 1, shards, 1),
        "activations": activations,
        "logits": logits,
        "communication": communication,
        "framework": np.full_like(params, table.cluster.framework_bytes),
    }
    return RankMemory({cause: np.broadcast_to(value, params.shape) for cause, value in by_cause.items()})


def rank_params(table: Table, holding: Holding) -> Floats:
    """Parameters of each pipeline rank after tensor parallelism, before sharding, (candidates, pp)."""
    return _params(table, holding)


def _params(table: Table, holding: Holding) -> Floats:
    rows = len(table.columns)
    per_kind = np.stack([piece.params + np.zeros(rows) for piece in holding.layer_kinds], axis=1)
    params = np.einsum("nk,rk->nr", per_kind, holding.layers)
    params[:, 0] += holding.embedding.params
    params[:, -1] += holding.head.params
    if table.model.tied_embeddings and params.shape[1] > 1:
        params[:, -1] += holding.embedding.params  # the head's stage holds its own copy of the table
    return params


def _root_params(table: Table, holding: Holding) -> Floats:
    """Parameters around the layers on each pipeline rank, (candidates, pp)."""
    root = np.zeros((len(table.columns), len(holding.layers)))
    root[:, 0] += holding.embedding.params
    root[:, -1] += holding.head.params
    return root


def _activations(table: Table, holding: Holding) -> tuple[Floats, Floats]:
    rows = len(table.columns)
    recompute = table.columns.recompute
    full = recompute == RECOMPUTE.index("full")
    selective = recompute == RECOMPUTE.index("selective")
    kept, working = [], []
    for piece in holding.layer_kinds:
        saved = piece.saved_bytes + np.zeros(rows)
        kept.append(np.where(full, piece.input_bytes, saved - selective * piece.statistics_bytes))
        # The layer whose backward runs has all its saved tensors, whatever was kept of the others.
        working.append(piece.working_bytes + np.where(full, saved - piece.input_bytes, 0.0))
    activations = np.einsum("nk,nrk->nr", np.stack(kept, axis=1), holding.held_layers)
    layer_working = np.broadcast_to(np.max(working, axis=0)[:, None], activations.shape).copy()
    logits = np.zeros_like(activations)
    logits[:, -1] = holding.held_inputs[:, 1] * holding.head.working_bytes
    # The loss's backward is over before the first layer's begins: the larger of the two is the peak.
    at_the_loss = logits >= layer_working
    activations += np.where(at_the_loss, 0.0, layer_working)
    logits = np.where(at_the_loss, logits, 0.0)
    activations[:, 0] += holding.held_inputs[:, 0] * holding.embedding.saved_bytes
    # The head's backward follows its forward at once: its saved input is held for one microbatch.
    activations[:, -1] += holding.held_inputs[:, 1] * holding.head.saved_bytes
    return activations, logits
