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

ROUNDS = ("interleaved_1f1b", "breadth_first")
"""Schedules in which zero 2 holds one chunk's whole gradients for a round of microbatches."""

LOSS, LAYER, LAYER_END, END, LAST_LAYER = range(5)
"""Times; more may follow. The last layer's is of those that have one microbatch."""

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
    experts_left_bytes: Floats
    """What is left of a layer when its experts' gradients leave, over what it kept."""
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
    """What is held at each time of each moment (`plan/memory.py`)."""
    of, layers = held.of_rows, 2 * shape.num_kinds
    kept, logits = at.whole @ held.kept_bytes, at.whole @ held.logits_bytes
    if at.weight_only.any():
        kept = kept + at.weight_only @ held.weight_bytes
    kept, logits = of(kept), of(logits)
    gone, freed = of(at.running @ held.logits_bytes), of(at.running @ held.kept_bytes)
    layer = of(largest(held.working_bytes[:layers], at.running[:, :layers]))
    loss = of(largest(held.working_bytes[layers:], at.running[:, layers:]))
    loss = np.where(at.running[:, [shape.head]] > 0, loss, NEVER_BYTES)
    passing = Passing(table, shape, at, held)
    buffers, around = passing.buffers(), passing.gathered_around()
    stays, head = buffers + around, passing.head_bytes()
    # Whole gradients leave in the step's last backward, beside which nothing is held.
    replicated, rest, left = passing.is_replicated, kept - freed, logits - gone
    times = [
        _time(kept, logits + loss, stays + passing.gathered_beside_loss() + passing.round_bytes()),
        _time(kept + layer, left, stays + passing.gathered_layers() + passing.on_the_way() + head),
        _time(
            np.where(replicated, freed, kept),
            np.where(replicated, 0.0, left),
            stays + passing.gathered_at_end() + passing.layer_end_bytes() + head,
        ),
        _time(np.where(replicated, 0.0, rest), np.where(replicated, 0.0, left), buffers + passing.end_bytes()),
    ]
    if (table.num_microbatches == 1).any():
        one = of(largest(held.working_bytes[:layers] + held.kept_bytes[:layers], at.running[:, :layers]))
        times.append(_time(rest + one, left, stays + passing.gathered_layers() + head))
    if passing.gathers.any():
        way = passing.gathered_before_end() + passing.on_the_way()
        times.append(_time(kept, left, stays + way + passing.made_bytes() + head))
    if table.model.is_moe and passing.is_cut.any():
        way = passing.gathered_at_experts_end()
        times.append(_time(kept, left, stays + way + passing.experts_end_bytes() + head))
    if at.alone.any() and passing.is_cut.any():
        alone = kept - of(at.alone @ held.weight_bytes)
        times.append(_time(alone, left, buffers + passing.alone_bytes()))
    return times


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
    def is_cut(self) -> NDArray[np.bool_]:
        """Rows whose states FSDP2 has, (rows,)."""
        return (self.table.columns.zero >= 1) & (self.table.shards > 1)

    @property
    def gathers(self) -> NDArray[np.bool_]:
        """Rows that gather weights where they are wanted, (rows,)."""
        return self.is_cut & (self.table.columns.zero == 3)

    @property
    def is_replicated(self) -> NDArray[np.bool_]:
        """Rows whose whole gradients are summed over ranks, (rows,)."""
        return (self.table.columns.dp * self.table.columns.cp > 1) & ~self.is_cut

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
        if not self.gathers.any():
            return np.zeros(1)
        held, layers = self.held, self._layers
        each = gathered_bytes(self.table, held.params[layers:], held.low_params[layers:])
        return np.where(self.gathers, held.of_rows(self.at.there[:, layers:] @ each), 0.0)

    def _gathered(self) -> tuple[Floats, Floats]:
        """A layer and its experts, each a unit by itself, (pieces, rows)."""
        held, layers = self.held, self._layers
        layer = gathered_bytes(self.table, held.params[:layers], held.low_params[:layers])
        experts = gathered_bytes(self.table, held.expert_params[:layers], held.low_expert_params[:layers])
        return held.of_rows(layer), held.of_rows(experts)

    @property
    def _running(self) -> Floats:
        return self.at.running[:, : self._layers]

    def _stays(self, gone: Floats) -> Floats:
        """All that is gathered less what a layer has given back, (moments, rows), where layers stay gathered."""
        layer, experts = self._gathered()
        return self.at.there[:, : self._layers] @ (layer + experts) - gone

    def gathered_layers(self) -> Floats:
        """The layer that computes, with its experts."""
        return self._of_layer(experts=True, itself=True)

    def gathered_before_end(self) -> Floats:
        """The layer when its experts are through."""
        return self._of_layer(experts=False, itself=True)

    def gathered_at_experts_end(self) -> Floats:
        """The layer, whose experts have been given back, and the next."""
        if not self.gathers.any():
            return np.zeros(1)
        return self.gathered_before_end() + self._next() * (self._count > 1)

    def gathered_at_end(self) -> Floats:
        """What is gathered when a layer has been given back: the next one."""
        if not self.gathers.any():
            return np.zeros(1)
        return self._of_layer(experts=False, itself=False) + self._next() * (self._count > 1)

    def _of_layer(self, *, experts: bool, itself: bool) -> Floats:
        """What is gathered of a layer, (moments, rows); of all where they stay gathered."""
        if not self.gathers.any():
            return np.zeros(1)
        layer, of_experts = self._gathered()
        here, gone = layer * itself + of_experts * experts, layer * (not itself) + of_experts * (not experts)
        stays = self._stays(largest(gone, self._running))
        found = np.where(self.table.columns.reshard == 0, stays, largest(here, self._running))
        return np.where(self.gathers, found, 0.0)

    @property
    def _count(self) -> Floats:
        """Layers whose backward is one act, (moments, 1)."""
        return self._running.sum(axis=1)[:, None]

    def _next(self) -> Floats:
        """The layer that is on its way while another computes, without its experts, (moments, rows)."""
        gathers = self.gathers & (self.table.columns.reshard != 0)
        return np.where(gathers, largest(self._gathered()[0], self._running), 0.0)

    def on_the_way(self) -> Floats:
        """Of a chunk's first layer the next one's weights; of others also gradients of the one before, which has
        given its weights back; of the last these alone, (moments, rows)."""
        leaving = self.leaving_bytes()
        if not self.gathers.any():
            return leaving
        layer, experts = self._gathered()
        given = np.where(
            self.gathers & (self.table.columns.reshard == 0), largest(layer + experts, self._running), 0.0
        )
        later = leaving - given * (self._count > 1) + self._next() * (self._count > 2)
        return np.maximum(self._next() * (self._count > 1), later)

    def gathered_beside_loss(self) -> Floats:
        """What the last unit was gathered into, which FSDP2 keeps for the next; and all layers where they are
        not given back. Of a step's first microbatch alone where weights stay for the step."""
        columns = self.table.columns
        if not self.is_cut.any():
            return np.zeros(1)
        layer, experts = self._gathered()
        # One rank's part is copied to where it is used.
        last = largest(np.maximum(layer, np.where(self.table.expert_shards > 1, experts, 0.0)), self._running)
        is_first = self.at.grown[:, [self.shape.head]] == 0
        last = np.where(self.is_cut & ((columns.zero == 3) | is_first), last, 0.0)
        stays = self.gathers & (columns.reshard == 0)
        return last + (np.where(stays, self._stays(np.zeros(1)), 0.0) if stays.any() else 0.0)

    def _reduced(self) -> Floats:
        """Bytes of whole gradients that leave, of a parameter, (rows,)."""
        return np.where((self.table.columns.zero >= 2) & self.is_cut, self.table.recipe.gradient_bytes, 0.0)

    @property
    def _made(self) -> Floats:
        """Bytes of a gradient as it was made, (rows,): where it leaves in another format."""
        return np.where(self.is_cut & ~self._works_in_rounds, self.table.recipe.compute_bytes, 0.0)

    def round_bytes(self) -> Floats:
        """Whole gradients of the chunk whose round is under way."""
        rounds = self._works_in_rounds
        if not rounds.any():
            return np.zeros(1)
        pieces = self.at.running * (self.at.grown > 0)
        found = self.held.of_rows(pieces @ (self.held.params + self.held.expert_params)) * self._reduced()
        return np.where(rounds, found, 0.0)

    def leaving_bytes(self) -> Floats:
        """The whole gradients of the layer before, which leave while one computes, less what it kept, (moments,
        rows): not below zero, as the first has none before it. Or those of a round."""
        whole = self._reduced()
        if not whole.any():
            return np.zeros(1)
        of, layers = self.held.of_rows, self._layers
        leaving = of(self.held.params[:layers]) * whole - of(self.held.kept_bytes[:layers])
        found = largest(leaving, self._running) * (self._count > 1)
        return np.where(self._works_in_rounds, 0.0, found) + self.round_bytes()

    def made_bytes(self) -> Floats:
        """A layer's gradients as they were made, less what it kept; of one with experts theirs have left last."""
        of, layers = self.held.of_rows, self._layers
        params, experts, kept = (
            of(each[:layers]) for each in (self.held.params, self.held.expert_params, self.held.kept_bytes)
        )
        return largest(params * self._made - kept + experts * self._reduced(), self._running)

    def experts_end_bytes(self) -> Floats:
        """Gradients of a layer's experts as they were made and whole as they leave, less what they kept. Those
        that no other rank has are copied twice more on their way."""
        of, layers, whole = self.held.of_rows, self._layers, self._reduced()
        size, zero = self.table.recipe.gradient_bytes, self.table.columns.zero
        # In place of whole gradients, and of weights, where they leave once a step.
        alone = np.where(zero >= 2, 3 * size, 2 * size - self.table.recipe.compute_bytes)
        copies = self._made + whole
        copies = np.where(self.table.expert_shards == 1, np.maximum(copies, alone), copies)
        gradients = of(self.held.expert_params[:layers]) * np.where(self._works_in_rounds, 0.0, copies)
        return largest(gradients + of(self.held.experts_left_bytes[:layers]), self._running) + self.round_bytes()

    def layer_end_bytes(self) -> Floats:
        """A layer's gradients as they were made and whole as they leave, less what the layer kept, (moments,
        rows): not below zero."""
        if not self.is_cut.any():
            return np.zeros(1)
        of, layers = self.held.of_rows, self._layers
        less = of(self.held.params[:layers]) * (self._made + self._reduced()) - of(self.held.kept_bytes[:layers])
        return largest(less, self._running) + self.round_bytes()

    def alone_bytes(self) -> Floats:
        """Of a weight gradient that runs by itself: a chunk's gradients as they were made, while those around the
        layers leave, or a layer's; they have been added up before, and a shard of the sum is made."""
        of, layers, whole = self.held.of_rows, self._layers, self._reduced()
        params = self.held.params + self.held.expert_params
        made = of(self.at.alone[:, :layers] @ params[:layers]) * self._made
        around = of(self.at.alone[:, layers:] @ params[layers:])
        one = largest(of(self.held.params[:layers]), self.at.alone[:, :layers])
        leaving = whole * (1 + 1 / self.table.shards)
        return made + around * whole + np.maximum(around, one) * leaving

    def head_bytes(self) -> Floats:
        """The head's gradients as they were made: they leave with the embedding's at the end. Replicated ones
        leave first of all, in a bucket of their own."""
        replicated = self.is_replicated
        if not (self.is_cut | replicated).any():
            return np.zeros(1)
        running, pieces, recipe = self.at.running, self.held.params, self.table.recipe
        embedding, head = self.shape.head - 1, self.shape.head
        if self.table.model.tied_embeddings:
            # Its matrix is the table, or the rank's copy of it, which stands last.
            runs = running[:, [head]] * np.maximum(running[:, [embedding]], running[:, [-1]] * self.shape.has_copy)
            found = runs @ pieces[[embedding]]
        else:
            found = running[:, [head]] @ pieces[[head]]
        made = np.where(self.is_cut, recipe.compute_bytes, 0.0)
        return self.held.of_rows(found) * np.where(replicated, recipe.gradient_bytes, made)

    def end_bytes(self) -> Floats:
        """Gradients of what stands around the layers, as they were made and as they leave; of replicated ones a
        bucket, which is there twice."""
        of, layers, size = self.held.of_rows, self._layers, self.table.recipe.gradient_bytes
        running = self.at.running[:, layers:].copy()
        if self.shape.mtp_depth:
            running[:, 2] = 0.0
        around = of(running @ self.held.params[layers:])
        found = around * (self._made + self._reduced() * np.where(self._works_in_rounds, 2, 1))
        if self.is_replicated.any():
            most = np.maximum(of(largest(self.held.params[layers:], running)) * size, BUCKET_BYTES)
            bucket = np.minimum(of(self.at.running @ self.held.params) * size, most)
            found = found + np.where(self.is_replicated, bucket, 0.0)
        return found


def gathered_bytes(table: Table, params: Floats, low: Floats) -> Floats:
    """Bytes of weights as they are gathered, `low` of which low-precision matmuls read."""
    recipe = table.recipe
    if not recipe.gather_fp8:
        return params * recipe.compute_bytes
    return (params - low) * recipe.compute_bytes + low * recipe.code_bytes


def largest(values: Floats, counts: Floats) -> Floats:
    """The largest of the pieces' values, (pieces, ...), of which each moment has some, (moments, pieces); not
    below zero."""
    found = np.zeros((len(counts), values.shape[1]))
    for value, has in zip(values, (counts > 0).T, strict=True):
        np.maximum(found, has[:, None] * value, out=found)
    return found
