"""What a rank holds for a while, at the times of a backward at which it may be most (`plan/memory.py`).

Derived from the trainer's program, FSDP2's units among it: a layer's gradients are made in the format of its
weights, copied into what leaves in the format of gradients, and kept until the next layer's take their place.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.assembly import Moments, Shape
from trainwright.plan.sharding import BUCKET_BYTES
from trainwright.plan.table import Floats, Ints, Table
from trainwright.spec.ledger import BytesCause

GATHERED_LAYERS = 2
"""FSDP2 holds the layer that computes and, on its way, the next."""

ROUNDS = ("interleaved_1f1b", "breadth_first")
"""Schedules in which zero 2 holds one chunk's whole gradients for a round of microbatches."""

LOSS, LAYER, LAYER_END, END = range(4)

NEVER_BYTES = -1e30
"""Of a time that a moment doesn't have."""

Time = dict[BytesCause, Floats]
"""Activations, logits and communication, each (moments, rows)."""


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
    low_params: Floats
    low_expert_params: Floats
    inside: Ints
    """Of each row the place of its inside, (rows,)."""

    def of_rows(self, values: Floats) -> Floats:
        """What insides have, (..., insides), as rows have it."""
        return values.take(self.inside, axis=-1)


def times_of(table: Table, shape: Shape, at: Moments, held: Held) -> list[Time]:
    """What is held at each of the four times of each moment."""
    of, layers = held.of_rows, 2 * shape.num_kinds
    kept, logits = at.whole @ held.kept_bytes, at.whole @ held.logits_bytes
    if at.weight_only.any():
        kept = kept + at.weight_only @ held.weight_bytes
    kept, logits = of(kept), of(logits)
    gone, freed = of(at.running @ held.logits_bytes), of(at.running @ held.kept_bytes)
    layer = of(_largest(held.working_bytes[:layers], at.running[:, :layers]))
    loss = of(_largest(held.working_bytes[layers:], at.running[:, layers:]))
    loss = np.where(at.running[:, [shape.head]] > 0, loss, NEVER_BYTES)
    passing = Passing(table, shape, at, held)
    stays = passing.buffers() + passing.gathered_around()
    leaving, head = passing.leaving_bytes(), passing.head_bytes()
    # Whole gradients leave in the step's last backward, beside which nothing is held.
    replicated, rest = passing.is_replicated, kept - freed
    return [
        _time(kept, logits + loss, stays + passing.gathered_beside_loss() + passing.round_bytes()),
        _time(kept + layer, logits - gone, stays + passing.gathered_layers() + leaving + head),
        _time(
            np.where(replicated, freed, kept),
            np.where(replicated, 0.0, logits - gone),
            stays + passing.gathered_layers() + passing.layer_end_bytes() + head,
        ),
        _time(
            np.where(replicated, 0.0, rest),
            np.where(replicated, 0.0, logits - gone),
            stays + passing.end_bytes(),
        ),
    ]


def _time(activations: Floats, logits: Floats, communication: Floats) -> Time:
    return {"activations": activations, "logits": logits, "communication": communication}


@dataclass(frozen=True)
class Passing:
    """Weights that are gathered and gradients that are on their way, (moments, rows)."""

    table: Table
    shape: Shape
    at: Moments
    held: Held

    @property
    def _layers(self) -> int:
        return 2 * self.shape.num_kinds

    @property
    def _is_cut(self) -> NDArray[np.bool_]:
        """Rows whose states FSDP2 has, (rows,)."""
        return (self.table.columns.zero >= 1) & (self.table.shards > 1)

    @property
    def is_replicated(self) -> NDArray[np.bool_]:
        """Rows whose whole gradients are summed over ranks, (rows,)."""
        return (self.table.columns.dp * self.table.columns.cp > 1) & ~self._is_cut

    @property
    def _works_in_rounds(self) -> NDArray[np.bool_]:
        """Rows whose gradients leave when a round of microbatches has gone through a chunk, (rows,)."""
        has_rounds = self.shape.vpp > 1 and self.shape.schedule in ROUNDS
        return (self.table.columns.zero == 2) & has_rounds

    def buffers(self) -> Floats:
        """Of sends between stages, of tensor parallelism, and what the software sets aside, (rows,)."""
        table, columns = self.table, self.table.columns
        size = table.model.d_model * table.recipe.compute_bytes
        send = table.residual_tokens * size * (columns.pp > 1)
        gather = table.tokens * size * (columns.tp > 1)
        return 2 * send + gather + table.cluster.buffer_bytes

    def gathered_around(self) -> Floats:
        """Embedding, norm and head, which stay gathered while a microbatch is under way."""
        gathers = (self.table.columns.zero == 3) & (self.table.shards > 1)
        if not gathers.any():
            return np.zeros(1)
        held, layers = self.held, self._layers
        each = weight_bytes(self.table, held.params[layers:], held.low_params[layers:])
        return held.of_rows(self.at.params[:, layers:] @ each) * np.where(gathers, 1.0, 0.0)

    def _gathered(self, rows: NDArray[np.bool_]) -> Floats:
        """The layers where some rows gather them, (pieces, rows)."""
        held, layers, table = self.held, self._layers, self.table
        dense = weight_bytes(table, held.params[:layers], held.low_params[:layers])
        each = held.of_rows(dense) * (rows & (table.shards > 1))
        if table.model.is_moe:
            experts = weight_bytes(table, held.expert_params[:layers], held.low_expert_params[:layers])
            each = each + held.of_rows(experts) * (rows & (table.expert_shards > 1))
        return each

    def gathered_layers(self) -> Floats:
        """The one that computes and the next, or all of the rank's where they are not given back."""
        columns, layers = self.table.columns, self._layers
        if not (columns.zero == 3).any():
            return np.zeros(1)
        each, running = self._gathered(columns.zero == 3), self.at.running[:, :layers]
        found = np.minimum(running.sum(axis=1), GATHERED_LAYERS)[:, None] * _largest(each, running)
        return np.where(columns.reshard == 0, self.at.params[:, :layers] @ each, found)

    def gathered_beside_loss(self) -> Floats:
        """What the last layer was gathered into, which FSDP2 keeps for the next; and all layers where they are
        not given back. Of a step's first microbatch alone where weights stay for the step."""
        columns, layers = self.table.columns, self._layers
        if not self._is_cut.any():
            return np.zeros(1)
        last = _largest(self._gathered(self._is_cut), self.at.running[:, :layers])
        is_first = self.at.grown[:, [self.shape.head]] == 0
        last = np.where((columns.zero == 3) | is_first, last, 0.0)
        stays = (columns.zero == 3) & (columns.reshard == 0)
        if not stays.any():
            return last
        return last + self.at.params[:, :layers] @ self._gathered(stays)

    def _reduced(self) -> tuple[Floats, Floats]:
        """Bytes of whole gradients that leave, of a parameter of a piece and of one of its experts, (rows,)."""
        columns, size = self.table.columns, self.table.recipe.gradient_bytes
        dense = np.where((columns.zero >= 2) & (self.table.shards > 1), size, 0.0)
        experts = np.where((columns.zero >= 2) & (self.table.expert_shards > 1), size, 0.0)
        return dense, experts

    def round_bytes(self) -> Floats:
        """Whole gradients of the chunk whose round is under way."""
        rounds = self._works_in_rounds
        if not rounds.any():
            return np.zeros(1)
        (dense, experts), of = self._reduced(), self.held.of_rows
        pieces = self.at.running * (self.at.grown > 0)
        found = of(pieces @ self.held.params) * dense
        if self.table.model.is_moe:
            found = found + of(pieces @ self.held.expert_params) * experts
        return np.where(rounds, found, 0.0)

    def leaving_bytes(self) -> Floats:
        """The whole gradients of the layer before, which leave while one computes, less what it kept, (moments,
        rows): not below zero, as the first has none before it. Or those of a round."""
        dense, _ = self._reduced()
        if not dense.any():
            return np.zeros(1)
        running, of, layers = self.at.running[:, : self._layers], self.held.of_rows, self._layers
        leaving = of(self.held.params[:layers]) * dense - of(self.held.kept_bytes[:layers])
        found = _largest(leaving, running) * (running.sum(axis=1)[:, None] > 1)
        return np.where(self._works_in_rounds, 0.0, found) + self.round_bytes()

    def layer_end_bytes(self) -> Floats:
        """A layer's gradients as they were made and whole as they leave, less what the layer kept, (moments,
        rows): not below zero."""
        if not self._is_cut.any():
            return np.zeros(1)
        (dense, experts), of, layers = self._reduced(), self.held.of_rows, self._layers
        made = np.where(self._is_cut & ~self._works_in_rounds, self.table.recipe.compute_bytes, 0.0)
        gradients = of(self.held.params[:layers]) * (made + dense)
        if self.table.model.is_moe:
            # They have left before the rest of the layer's do.
            made = np.where(self.table.expert_shards > 1, made, 0.0)
            gradients = np.maximum(gradients, of(self.held.expert_params[:layers]) * (made + experts))
        less = gradients - of(self.held.kept_bytes[:layers])
        return _largest(less, self.at.running[:, :layers]) + self.round_bytes()

    def head_bytes(self) -> Floats:
        """The head's gradients as they were made: they leave with the embedding's at the end. Replicated ones
        leave first of all, in a bucket of their own."""
        replicated = self.is_replicated
        if not (self._is_cut | replicated).any():
            return np.zeros(1)
        running, pieces, recipe = self.at.running, self.held.params, self.table.recipe
        embedding, head = self.shape.head - 1, self.shape.head
        if self.table.model.tied_embeddings:
            # Its matrix is the table, or the rank's copy of it, which stands last.
            runs = running[:, [head]] * np.maximum(running[:, [embedding]], running[:, [-1]] * self.shape.has_copy)
            found = runs @ pieces[[embedding]]
        else:
            found = running[:, [head]] @ pieces[[head]]
        made = np.where(self._is_cut, recipe.compute_bytes, 0.0)
        return self.held.of_rows(found) * np.where(replicated, recipe.gradient_bytes, made)

    def end_bytes(self) -> Floats:
        """Gradients of what stands around the layers, as they were made and as they leave; of replicated ones a
        bucket, which is there twice."""
        of, layers, size = self.held.of_rows, self._layers, self.table.recipe.gradient_bytes
        running = self.at.running[:, layers:].copy()
        if self.shape.mtp_depth:
            running[:, 2] = 0.0
        around = of(running @ self.held.params[layers:])
        dense, _ = self._reduced()
        made = np.where(self._is_cut & ~self._works_in_rounds, self.table.recipe.compute_bytes, 0.0)
        found = around * (made + dense * np.where(self._works_in_rounds, 2, 1))
        if self.is_replicated.any():
            largest = np.maximum(of(_largest(self.held.params[layers:], running)) * size, BUCKET_BYTES)
            bucket = np.minimum(of(self.at.running @ self.held.params) * size, largest)
            found = found + np.where(self.is_replicated, bucket, 0.0)
        return found


def weight_bytes(table: Table, params: Floats, low: Floats) -> Floats:
    """Bytes of gathered weights, `low` of which low-precision matmuls read: those in both orientations where they
    are gathered cast."""
    recipe = table.recipe
    if not recipe.gather_fp8:
        return params * recipe.compute_bytes
    return (params - low) * recipe.compute_bytes + 2 * low * recipe.weight_bytes


def _largest(values: Floats, counts: Floats) -> Floats:
    """The largest of the pieces' values, (pieces, ...), of which each moment has some, (moments, pieces); not
    below zero."""
    largest = np.zeros((len(counts), values.shape[1]))
    for value, has in zip(values, (counts > 0).T, strict=True):
        np.maximum(largest, has[:, None] * value, out=largest)
    return largest
