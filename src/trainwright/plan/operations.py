"""What a layer, the embedding and the head are made of: kinds of operations, and the piece that lists them.

FLOPs, memory traffic, bytes saved for backward and collectives of everything that the planner predicts come
from these lists and from nowhere else; the same lists are what the trainer's program is held against.

All figures are of one microbatch on one rank. The counting of saved bytes follows what each operation's
backward reads (Korthikanti et al., arXiv:2205.05198 s4, gives the GPT layer's), each tensor once, where it is
first read. What recompute does is written on the operations: `again` are the marks (`table.marks`) under which one
runs again in backward, `dropped_by` those under which a saved tensor is not kept.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.table import FULL, Floats, Ints
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.layout import Axis

BACKWARD_ATTENTION = 2.5
"""Backward over forward FLOPs of flash attention: five matmuls instead of two (arXiv:2307.08691 s4.1)."""


def floats(values: NDArray[Any]) -> Floats:
    """Whole numbers among them, too, as what the planner computes with."""
    return values.astype(np.float64)


class Saved(NamedTuple):
    """A tensor that is kept from forward to backward."""

    bytes: Floats
    dropped_by: int = 0
    is_statistic: bool = False
    """A number per row, such as a norm's: not counted in the papers' formulas."""
    only_under: int = 0
    """Not kept unless one of these marks is recomputed: the input of what runs again."""
    is_quantized: bool = False
    """What a low-precision matmul's weight gradient reads, and its scales."""
    of_vocabulary: bool = False
    """In proportion to the rank's part of the vocabulary, which is taken to be the largest."""

    def is_kept(self, marks: int) -> bool:
        """Whether it is where the operations of `marks` are recomputed."""
        return not self.dropped_by & marks and (not self.only_under or bool(self.only_under & marks))


@dataclass(frozen=True)
class Matmul:
    """`groups` products of (m, k) by (k, n). Backward does two of the same size: input and weight gradient."""

    name: str
    m: Floats
    k: Floats
    n: Floats
    saved: tuple[Saved, ...] = ()
    again: int = 0
    groups: Floats | None = None
    """Experts on the rank, each with m tokens; None: a plain matmul."""
    in_low_precision: bool = True
    """False for what fp8 recipes leave in bf16: output head, router."""
    is_sequential: bool = False
    """Each of the groups is a kernel of its own."""
    has_bias: bool = False
    shares_input: bool = False
    """Reads what another matmul reads too, and keeps."""
    ends_under: int = 0
    """The marks under which nothing that is recomputed comes after it. The trainer's recomputation ends before it,
    unless it makes the graph anew; that of other programs runs it again, and so it is timed."""
    again_anew: int = 0
    """More marks under which it runs again, where the graph is made anew."""
    gradients_in_forward: bool = False
    """Its gradients are made right after it."""

    @property
    def weights(self) -> Floats:
        """Of all groups."""
        return self.k * self.n * (1.0 if self.groups is None else self.groups)

    @cached_property
    def forward_flops(self) -> Floats:
        return 2.0 * self.m * self.k * self.n * (1.0 if self.groups is None else self.groups)

    @property
    def launches(self) -> tuple[Floats | int, Floats | int]:
        """Kernels forward and backward."""
        kernels = 1 if self.groups is None or not self.is_sequential else self.groups
        return kernels, 2 * kernels


@dataclass(frozen=True)
class AttentionCore:
    """softmax(q k) v under the causal mask. Flash attention's backward computes the scores again: 2.5 times
    forward; without it (`is_fused` false) backward is twice forward, and masked keys are computed too."""

    name: str
    forward_flops: Floats
    head_width: float
    """Mean of the widths that scores and values sum over."""
    saved: tuple[Saved, ...] = ()
    again: int = 0
    window: int | None = None
    """Under which ranks of cp see different numbers of keys; None where all see as many."""
    is_fused: bool = True
    scores_flops: Floats | float = 0.0
    """Of `forward_flops`, those of scores: what a recomputed core that isn't fused makes again, unless it makes
    the graph anew. The product with values is what comes last."""
    always_again: bool = False
    """That core is recomputed whatever else is, some queries at a time."""

    @property
    def backward_flops(self) -> Floats:
        if self.is_fused:
            return BACKWARD_ATTENTION * self.forward_flops
        return 2 * self.forward_flops + self.always_again * self.scores_flops

    @property
    def launches(self) -> tuple[int, int]:
        return (1, 1) if self.is_fused else (2, 4)


@dataclass(frozen=True)
class Elementwise:
    """Operations bound by memory traffic: norms, activations, residuals, rotary embedding, loss, casts."""

    name: str
    forward_bytes: Floats
    backward_bytes: Floats
    saved: tuple[Saved, ...] = ()
    again: int = 0
    kernels: int = 1
    streams: bool = False
    """One long pass over contiguous memory, as over gradients, and not over many small rows."""
    quantizes: bool = False
    """A cast to fp8 or fp4."""
    of_weights: bool = False
    """Its backward belongs to the weight gradient."""

    @property
    def launches(self) -> tuple[int, int]:
        return self.kernels, 2 * self.kernels


@dataclass(frozen=True)
class Collective:
    """Communication that the layer waits for. `message_bytes` is the whole tensor's."""

    name: str
    axis: Axis
    forward: tuple[CollectiveOp, ...]
    backward: tuple[CollectiveOp, ...]
    message_bytes: Floats
    again: int = 0
    over_experts: bool = False
    """Among the etp ranks that share an expert, which stand where tp ranks do."""
    absent: int = 0
    """The marks under which it isn't there."""
    core: int = 0
    """The marks under which attention's core, and so what a ring brings it, runs again."""
    parts: Ints | int = 1
    """Messages of that size."""
    is_precise: bool = False
    """In fp32 at least, as statistics are."""
    goes_round: bool = False
    """In parts, from rank to rank, beside the matmuls that it feeds or that feed it."""
    ends_under: int = 0
    again_anew: int = 0
    """As of `Matmul`."""

    saved = ()
    launches = (0, 0)  # its latency is all of it


@dataclass(frozen=True)
class Dispatch:
    """Tokens on their way to their experts, or back: an all-to-all over the ep group."""

    name: str
    tokens: Floats
    """That the rank sends, each to `copies` experts."""
    copies: float
    forward_bytes: float
    """Of one copy of one token."""
    backward_bytes: float
    again: int = 0
    num_experts: int = 0
    """Whose numbers of rows travel first."""

    saved = ()
    launches = (1, 1)


class Questions(NamedTuple):
    """How often an `Agreement` asks in an act, (rows,): forward; backward, what runs again in it included; and the
    weight gradient's act, where that is one of its own."""

    forward: Floats
    input: Floats
    weight: Floats


@dataclass(frozen=True)
class Agreement:
    """Ranks of an axis that have parts of what a low-precision matmul reads ask one another for the largest
    magnitude, of which scales of whole tensors are made: an all-reduce of a number, for which the rank waits."""

    matmul: Matmul
    axis: Axis
    over_experts: bool
    """As of `Collective`."""
    input: Ints
    """1 where ranks of the axis have parts of the input, and the matmul is the first to read it; (rows,)."""
    gradient: Ints
    weight: Ints
    ways: int
    """Questions about a tensor that is quantized along either dim: 2 where its values differ (a transform)."""
    is_there: NDArray[np.bool_]
    """Rows in which backward has the input again, and quantizes it there for the weight gradient."""
    there_under: int
    """The marks under which it has it too,"""
    not_under: int
    """and those under which it never has."""
    in_two_acts: NDArray[np.bool_]
    """Rows whose schedule puts the weight gradient off."""
    without_graph: int
    """Marks under which the input is cast again for its values alone."""

    saved = ()
    launches = (0, 0)

    def tensors(self, marks: int, casts_again: int) -> Questions:
        """About input and gradient, where the operations of `marks` are recomputed and that casts the input so
        many times again."""
        is_there = (self.is_there | bool(self.there_under & marks)) & (not self.not_under & marks)
        first = np.where(is_there, 1, self.ways)
        forward, again = first, casts_again * first
        # Neither what is made again for values alone, nor any but the last of what makes a graph anew, has copies
        # for the weight gradient.
        if self.without_graph & marks:
            again = casts_again + 0 * first
        elif casts_again:
            forward = np.where(self.in_two_acts, 1, first)
            again = np.where(self.in_two_acts, casts_again - 1 + first, again)
        backward = self.input * again + self.gradient * np.where(self.in_two_acts, 1, self.ways)
        later = self.input * is_there
        return Questions(
            floats(self.input * forward),
            floats(backward + np.where(self.in_two_acts, 0, later)),
            floats(np.where(self.in_two_acts, later + self.gradient, 0)),
        )

    def weights(self, products_again: int) -> Questions:
        """About the weight, where it is cast at each use, and that multiplies so many times again."""
        return Questions(floats(self.weight), floats(self.weight * (1 + products_again)), floats(0 * self.weight))


Operation = Matmul | AttentionCore | Elementwise | Collective | Dispatch | Agreement


@dataclass(frozen=True)
class Piece:
    """A layer, the embedding or the head: its operations, its parameters on one rank, and its working set."""

    operations: tuple[Operation, ...]
    params: Floats
    """Without those of routed experts."""
    input_bytes: Floats
    """The piece's input, the only thing that full recompute saves."""
    working_bytes: Floats
    """Live beside the saved tensors while its backward runs: gradients of activations, the loss's copies."""
    expert_params: Floats | float = 0.0
    logits_bytes: Floats | float = 0.0
    """Logits, which are kept for backward and counted apart."""
    is_routed: bool = False
    """Whether the host must learn how many tokens each expert has."""

    def low_params(self, of_experts: bool) -> Floats:
        """Weights of its low-precision matmuls: those of experts, or all others."""
        matmuls = (each for each in self.operations if isinstance(each, Matmul) and each.in_low_precision)
        return sum((each.weights for each in matmuls if (each.groups is not None) == of_experts), np.zeros(1))

    @property
    def all_params(self) -> Floats:
        return self.params + self.expert_params

    def _saved(self) -> Iterator[Saved]:
        return (saved for each in self.operations for saved in each.saved)

    @property
    def saved_bytes(self) -> Floats:
        """Kept where nothing is recomputed."""
        return self._sum(saved for saved in self._saved() if not saved.only_under)

    @property
    def saved_before_dispatch(self) -> Floats:
        """What a layer saves before it dispatches to experts: what is left when their backward is over."""
        before = takewhile(lambda each: not isinstance(each, Dispatch), self.operations)
        return self._sum(saved for each in before for saved in each.saved if not saved.only_under)

    @property
    def tensor_bytes(self) -> Floats:
        """The same without statistics, as the papers count."""
        return self._sum(saved for saved in self._saved() if not saved.is_statistic and not saved.only_under)

    def inputs_bytes(self, marks: int) -> Floats:
        """Kept beside them for what of `marks` runs again."""
        return self._sum(saved for saved in self._saved() if saved.only_under and saved.is_kept(marks))

    @staticmethod
    def _sum(saved: Iterable[Saved]) -> Floats:
        return sum((each.bytes for each in saved), np.zeros(1))

    def kept_bytes(self, marks: int) -> Floats:
        """Kept where the operations of `marks` are recomputed."""
        if marks & FULL:
            return self.input_bytes
        return self._sum(saved for saved in self._saved() if saved.is_kept(marks))
