"""Figures of every piece of a model for every different inside of a candidate: totals of seconds and bytes.

What a layer costs depends on tp, cp, ep, etp, the micro-batch, on where expert groups stand, on whether acts are
paired, on what is recomputed, where ranks of a node slow one another down on how many they are, and on nothing
else. So a table of a million candidates has some hundreds of different insides: each is worked out once, and
candidates look theirs up.

The pieces of a model, in this order: each kind of layer as it is where nothing is recomputed; each kind as it is
under the candidate's policy; embedding; head; a module of multi-token prediction, where there is one; the head's
copy of a tied embedding, where that is shared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainwright.plan import agreement, geometry
from trainwright.plan.acts import PAIRED, Acts, Clock, Seconds
from trainwright.plan.operations import Matmul, Piece
from trainwright.plan.pieces import embedding_piece, head_piece, layer_piece, mtp_piece, table_copy_piece
from trainwright.plan.table import SCHEDULE, Floats, Ints, Table, combined, distinct
from trainwright.spec.ledger import SecondsCause
from trainwright.spec.model import LayerSpec, MoeMlp, mean_keys, seen_keys
from trainwright.spec.schedule import SCHEDULES

T = TypeVar("T")

WORK: tuple[SecondsCause, ...] = ("matmul", "attention", "elementwise", "quantize", "launch", "recompute", "host")
"""What wants a core. Ranks of a collective run in step, so while they communicate no core comes free."""


@dataclass(frozen=True)
class Figures:
    """Each of shape (pieces, policies * insides), policies first, or (pieces, insides) for what no policy
    changes."""

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    forward_ep_s: Floats
    """Of forward, what is expert dispatch."""
    backward_ep_s: Floats
    work_s: Floats
    """Of all three, what wants a core."""
    kept_bytes: Floats
    logits_bytes: Floats
    """Logits that are kept for backward."""
    weight_bytes: Floats
    """What the weight gradient alone reads: inputs of matmuls and gradients of their outputs."""
    working_bytes: Floats
    experts_left_bytes: Floats
    """What is left of a layer when its experts' gradients leave, over what it kept."""
    params: Floats
    expert_params: Floats
    low_params: Floats
    """Of `params`, those that low-precision matmuls read."""
    low_expert_params: Floats


def kinds_of(table: Table) -> list[LayerSpec]:
    """The different layers of the model, in order of first occurrence."""
    return list(table.model.layer_counts())


def num_pieces(table: Table) -> int:
    return 2 * len(kinds_of(table)) + 2 + bool(table.model.mtp_depth) + table.model.embeds_last


def insides(table: Table) -> tuple[Ints, Ints]:
    """Rows with different insides, the first of each, and for every row which of them its own is."""
    firsts, placement = table.placements
    placed = table.take(firsts)
    members = geometry.expert_members(placed, placed.columns.etp, placed.columns.ep)[placement]
    c, paired = table.columns, np.array([name in PAIRED for name in SCHEDULE], dtype=np.int64)
    beside = table.at_work if _depends_on_others(table) else np.zeros_like(c.tp)
    columns = [c.tp, c.cp, c.ep, c.etp, c.micro_batch, members, paired[c.schedule], beside]
    if agreement.asks(table):
        split = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE], dtype=np.int64)
        by_use = (agreement.is_cast_by_use(table, of_experts) for of_experts in (False, True))
        columns += [split[c.schedule], *by_use, table.num_microbatches]
    return distinct(combined(*columns))


def _depends_on_others(table: Table) -> bool:
    """Whether the cluster says what the other ranks of a node cost."""
    rates = table.cluster.rates
    return bool(rates.at_work) or any(each.at_work for each in rates.collectives)


@dataclass(frozen=True)
class Parts:
    """A table's pieces, timed: what figures sum up, and what a prediction shows by cause."""

    table: Table
    pieces: list[Piece]
    """Without the second half of the layers: kinds, embedding, head, and so on."""
    clock: Clock
    acts: list[list[Acts]]
    """By policy and piece, layers twice as `Figures` has them."""

    @staticmethod
    def of(table: Table) -> "Parts":
        """Pieces of a table whose rows have different insides."""
        kinds = kinds_of(table)
        clock = Clock(table)
        pieces = [layer_piece(table, kind) for kind in kinds] + [embedding_piece(table), head_piece(table)]
        layers: list[LayerSpec | None] = [*kinds, None, None]
        if table.model.mtp_depth:
            pieces.append(mtp_piece(table))
            layers.append(table.model.layers[-1])
        if table.model.embeds_last:
            pieces.append(table_copy_piece(table))
            layers.append(None)
        mlps = [layer.mlp if layer and isinstance(layer.mlp, MoeMlp) else None for layer in layers]
        timed = [clock.timed(piece, mlp) for piece, mlp in zip(pieces, mlps, strict=True)]
        uncut = [_uncut(table, layer) for layer in layers]
        split = len(kinds)
        # A layer is plain where a policy recomputes only some layers, or none.
        plain = [clock.acts(pieces[at], timed[at], 0) for at in range(split)] if _needs_plain(table) else []
        around = [clock.acts(pieces[at], timed[at], 0) for at in range(split, len(pieces))]
        acts = []
        for policy in table.policies:
            again = plain
            if policy.marks or not plain:
                again = [clock.acts(pieces[at], timed[at], policy.marks, uncut[at]) for at in range(split)]
            acts.append([*(plain or again), *again, *around])
        return Parts(table, pieces, clock, acts)

    def low_matmuls(self) -> Ints:
        """Of each piece its low-precision matmuls, (pieces,)."""
        counts = [
            sum(isinstance(each, Matmul) and each.in_low_precision for each in piece.operations)
            for piece in self.pieces
        ]
        return np.array(_twice(counts, len(kinds_of(self.table))))

    def figures(self) -> Figures:
        """Totals over causes."""
        rows, split = len(self.table.columns), len(kinds_of(self.table))

        def seconds(choose: Callable[[Acts], Floats]) -> Floats:
            values = [[choose(acts) + np.zeros(rows) for acts in policy] for policy in self.acts]
            return np.concatenate([np.array(policy) for policy in values], axis=1)

        pieces = _twice(self.pieces, split)
        # The layer whose backward runs has all its saved tensors, whatever was kept of the others.
        again = _twice([piece.working_bytes + piece.saved_bytes for piece in self.pieces], split)
        left = _twice([piece.saved_before_dispatch for piece in self.pieces], split)
        kept, working, experts_left = [], [], []
        for policy in self.table.policies:
            marks = [0] * split + [policy.marks] * split + [0] * (len(pieces) - 2 * split)
            own = [piece.kept_bytes(mark) + np.zeros(rows) for piece, mark in zip(pieces, marks, strict=True)]
            kept.append(np.array(own))
            inputs = [piece.inputs_bytes(mark) for piece, mark in zip(pieces, marks, strict=True)]
            working.append(
                np.array([one + read - mine for one, read, mine in zip(again, inputs, own, strict=True)])
            )
            experts_left.append(np.array([each - mine for each, mine in zip(left, own, strict=True)]))

        def of_pieces(values: Iterable[Floats | float]) -> Floats:
            return np.array(_twice([value + np.zeros(rows) for value in values], split))

        return Figures(
            forward_s=seconds(lambda acts: _sum(acts.forward)),
            input_s=seconds(lambda acts: _sum(acts.input)),
            weight_s=seconds(lambda acts: _sum(acts.weight)),
            forward_ep_s=seconds(lambda acts: acts.forward.get("ep", np.zeros(1)) / self.clock.price),
            backward_ep_s=seconds(lambda acts: acts.input.get("ep", np.zeros(1)) / self.clock.price),
            work_s=seconds(_work_s),
            kept_bytes=np.concatenate(kept, axis=1),
            logits_bytes=of_pieces(piece.logits_bytes for piece in self.pieces),
            weight_bytes=of_pieces(_weight_bytes(self.table, piece) for piece in self.pieces),
            working_bytes=np.concatenate(working, axis=1),
            experts_left_bytes=np.concatenate(experts_left, axis=1),
            params=of_pieces(piece.params for piece in self.pieces),
            expert_params=of_pieces(piece.expert_params for piece in self.pieces),
            low_params=of_pieces(self._low_params(of_experts=False)),
            low_expert_params=of_pieces(self._low_params(of_experts=True)),
        )

    def _low_params(self, *, of_experts: bool) -> list[Floats | float]:
        if not self.table.recipe.is_low_precision:
            return [0.0] * len(self.pieces)
        return [piece.low_params(of_experts) for piece in self.pieces]


def _twice(values: list[T], kinds: int) -> list[T]:
    """What pieces have, with layers twice, as `Figures` has them."""
    return [*values[:kinds], *values]


def _needs_plain(table: Table) -> bool:
    return any(policy.layers is not None for policy in table.policies)


def _sum(seconds: Seconds) -> Floats:
    return sum(seconds.values(), np.zeros(1))


def _work_s(acts: Acts) -> Floats:
    halves = (acts.forward, acts.input, acts.weight)
    return sum((half[cause] for half in halves for cause in WORK if cause in half), np.zeros(1))


def _uncut(table: Table, layer: LayerSpec | None) -> float:
    """Keys that a query meets with all keys, as MFU counts them, over those that the core computes."""
    if layer is None:
        return 1.0
    window, length = layer.attention.sliding_window, table.recipe.seq_len
    computed = length if table.recipe.attention_kernel == "unfused" else seen_keys(length, window)
    return mean_keys(length, window, causal=False) / computed


def _weight_bytes(table: Table, piece: Piece) -> Floats:
    """Bytes that the weight gradients of a piece read: every matmul's input once, in the format that it reads, and
    its output's gradient, which is cast when it is read (before it waits, where activations wait in the low
    format)."""
    recipe, total = table.recipe, np.zeros(1)
    for each in piece.operations:
        if not isinstance(each, Matmul):
            continue
        size = recipe.matmul_bytes if each.in_low_precision else recipe.compute_bytes
        groups = 1.0 if each.groups is None else each.groups
        inputs = 0.0 if each.shares_input else each.m * each.k * groups * size
        if each.saved and not each.shares_input:
            kept = each.saved if each.in_low_precision else each.saved[:1]
            inputs = sum((saved.bytes for saved in kept if not saved.only_under), np.zeros(1))
        gradient = size if recipe.activations_fp8 else recipe.compute_bytes
        total = total + inputs + each.m * each.n * groups * gradient
    return total
