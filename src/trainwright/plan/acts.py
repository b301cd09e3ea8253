"""Seconds of a piece's forward act, and of the two halves of its backward act, by cause.

Backward is the gradient of the input, then that of the weights, which schedules may put off. What recompute does
again stands before it. Communication is what stays exposed: the recipe's switches say what may hide, the cluster's
rates how much does. Where launching takes the host longer than the device computes, the device waits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trainwright.plan import agreement, geometry, rates
from trainwright.plan.collectives import collective, dispatch_s
from trainwright.plan.operations import (
    Agreement,
    AttentionCore,
    Collective,
    Dispatch,
    Elementwise,
    Matmul,
    Operation,
    Piece,
)
from trainwright.plan.table import SCHEDULE, Floats, Table
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.layout import Axis
from trainwright.spec.ledger import SecondsCause
from trainwright.spec.model import MoeMlp

Seconds = dict[SecondsCause, Floats]
PAIRED = ("dualpipe", "dualpipe_v")
"""Schedules that overlap acts in pairs."""

EXPOSED: tuple[SecondsCause, ...] = ("tp", "cp", "ep")


@dataclass
class Acts:
    """Seconds by cause, each (rows,): forward, input gradient (with what is recomputed), weight gradient."""

    forward: Seconds = field(default_factory=dict)
    input: Seconds = field(default_factory=dict)
    weight: Seconds = field(default_factory=dict)
    flops_again: Floats | float = 0.0
    """Recomputed FLOPs; attention's with all keys, as model FLOPs count it (`predict.CONVENTION`)."""


class _Timed(NamedTuple):
    """One operation's seconds, exposed or not."""

    each: Operation
    cause: SecondsCause
    forward: Floats
    input: Floats
    weight: Floats


class Clock:
    """Times the pieces of a table: each operation once, whatever is recomputed."""

    def __init__(self, table: Table) -> None:
        self.table = table
        paired = np.array([name in PAIRED for name in SCHEDULE])
        self._paired = paired[table.columns.schedule]
        self._none = np.zeros(len(table.columns))
        rates_ = table.cluster.rates.overlap
        taken = min(rates_.communication_sms / table.cluster.device.num_sms, 1.0)
        self.price = np.where(self._paired, 1 + rates_.ep * taken, 1.0)
        """Seconds of paired dispatch with the compute that its multiprocessors cost, over those without."""
        self._groups = {
            axis: (geometry.degree(table, axis), geometry.members(table, axis)) for axis in ("tp", "cp")
        }
        ep, etp = table.columns.ep, table.columns.etp
        self._experts = (ep, geometry.expert_members(table, etp, ep))
        self._expert_tp = (etp, geometry.expert_members(table, np.ones_like(etp), etp))
        self._collectives: dict[tuple[str, bool, str], Callable[[Floats], Floats]] = {}
        """By axis, whether over experts, and operation: seconds as a function of the message."""

    def timed(self, piece: Piece, mlp: MoeMlp | None = None) -> list[_Timed]:
        """The piece's operations with their seconds. mlp: the experts that it dispatches to."""
        matmuls = [each for each in piece.operations if isinstance(each, Matmul)]
        matmuls_s = iter(rates.matmuls_s(self.table, matmuls))
        timed = [self._time(each, matmuls_s, mlp) for each in piece.operations]
        return self._overlapped(timed)

    def acts(self, piece: Piece, timed: list[_Timed], marks: int, uncut: float = 1.0) -> Acts:
        """The acts of a piece of which the operations of `marks` are recomputed.

        uncut: attention FLOPs with all keys over those with the keys that its mask leaves.
        """
        acts = Acts()
        launches: list[Floats | float] = [0.0, 0.0]
        launches_s: list[Floats | float] = [0.0, 0.0]
        launch_s = self.table.cluster.rates.launch_s * rates.slowdown(self.table, "launch")
        for one in timed:
            if isinstance(one.each, Collective) and one.each.absent & marks:
                continue
            if isinstance(one.each, Agreement):
                asked_s = agreement.seconds_of(self.table, one.each, one.forward, marks)
                for into, seconds in zip((acts.forward, acts.input, acts.weight), asked_s, strict=True):
                    _add(into, one.cause, seconds)
                continue
            _add(acts.forward, one.cause, one.forward)
            _add(acts.input, one.cause, one.input)
            if one.weight is not self._none:
                _add(acts.weight, one.cause, one.weight)
            forward, backward = one.each.launches
            again = bool(one.each.again & marks)
            if again:
                _add(acts.input, one.cause if one.cause in EXPOSED else "recompute", one.forward)
                _add(acts.input, "recompute", self._none + forward * launch_s)
                acts.flops_again = acts.flops_again + _flops(one.each, uncut)
            launches[0] = launches[0] + forward
            launches[1] = launches[1] + backward + forward * again
            launches_s[0] = launches_s[0] + forward * launch_s
            launches_s[1] = launches_s[1] + backward * launch_s
            acts.forward["launch"] = acts.input["launch"] = self._none  # its place among the causes
        if timed:
            acts.forward["launch"], acts.input["launch"] = (self._none + each for each in launches_s)
        self._wait_for_host(piece, acts, launches)
        return acts

    def _wait_for_host(self, piece: Piece, acts: Acts, launches: list[Floats | float]) -> None:
        rates_, recipe = self.table.cluster.rates, self.table.recipe
        kept = {"none": 1.0, "partial": 1.0 - rates_.graphs_remove, "full": 0.0}[recipe.cuda_graphs]
        per_launch_s = rates_.host_launch_s * kept
        waits = rates_.host_sync_s if piece.is_routed and recipe.cuda_graphs != "full" else 0.0
        if not per_launch_s and not waits:
            return
        device_s = (_total(acts.forward), _total(acts.input) + _total(acts.weight))
        for into, busy, count in zip((acts.forward, acts.input), device_s, launches, strict=True):
            _add(into, "host", np.maximum(count * per_launch_s - busy, 0.0) + waits)

    def _time(self, each: Operation, matmuls_s: Iterator[Floats], mlp: MoeMlp | None) -> _Timed:
        none = self._none
        match each:
            case Matmul():
                seconds = next(matmuls_s)
                return _Timed(each, "matmul", seconds, seconds, seconds)
            case AttentionCore():
                forward, backward = rates.attention_s(self.table, each)
                return _Timed(each, "attention", forward, backward, none)
            case Elementwise():
                forward, backward = rates.elementwise_s(self.table, each)
                cause = "quantize" if each.quantizes else "elementwise"
                halves = (none, backward) if each.of_weights else (backward, none)
                return _Timed(each, cause, forward, *halves)
            case Collective():
                forward = sum((self._collective(each, op) for op in each.forward), none)
                backward = sum((self._collective(each, op) for op in each.backward), none)
                return _Timed(each, "ep" if each.over_experts else _exposed(each.axis), forward, backward, none)
            case Dispatch():
                assert mlp is not None, "only a layer with experts dispatches"
                forward, backward = (
                    dispatch_s(self.table, each, size, mlp, *self._experts)
                    for size in (each.forward_bytes, each.backward_bytes)
                )
                return _Timed(each, "ep", forward, backward, none)
            case Agreement():
                one_s = self._collective_s(each, "all_reduce", none + agreement.NUMBER_BYTES)
                return _Timed(each, "ep" if each.over_experts else _exposed(each.axis), one_s, none, none)

    def _collective(self, each: Collective, op: CollectiveOp) -> Floats:
        return each.parts * self._collective_s(each, op, each.message_bytes)

    def _collective_s(self, each: Collective | Agreement, op: CollectiveOp, message_bytes: Floats) -> Floats:
        key = (each.axis, each.over_experts, op)
        if key not in self._collectives:
            size, members = self._expert_tp if each.over_experts else self._groups[each.axis]
            self._collectives[key] = collective(self.table.cluster, op, size, members, self.table.at_work)
        return self._collectives[key](message_bytes)

    def _overlapped(self, timed: list[_Timed]) -> list[_Timed]:
        """The same with the communication that hides left out."""
        recipe, overlap = self.table.recipe, self.table.cluster.rates.overlap
        attention = [one for one in timed if isinstance(one.each, AttentionCore)]
        core = (attention[0].forward, attention[0].input) if attention else (self._none, self._none)
        hidden = overlap.ep if recipe.overlap.ep else overlap.ep_unasked
        # Kernels of hidden dispatch take multiprocessors from the compute that they run beside.
        sms, taken = self.table.cluster.device.num_sms, overlap.communication_sms
        price = min(taken / sms, 1.0)
        stays = 1 - hidden + (hidden * price if recipe.overlap.ep else 0.0)
        # Paired acts hide one another's dispatch when they are played, and none by themselves.
        stays = np.where(self._paired, self.price, stays)
        shown = []
        for one in timed:
            forward, backward = one.forward, one.input
            if isinstance(one.each, Agreement):
                pass  # Nothing can go on without the answer.
            elif one.cause == "tp" and recipe.overlap.tp:
                forward, backward = forward * (1 - overlap.tp), backward * (1 - overlap.tp)
            elif one.cause == "cp" and recipe.cp_method == "ring":
                forward = np.maximum(forward - overlap.cp * core[0], forward * (1 - overlap.cp))
                backward = np.maximum(backward - overlap.cp * core[1], backward * (1 - overlap.cp))
            elif one.cause == "ep":
                forward, backward = forward * stays, backward * stays
            else:
                shown.append(one)
                continue
            shown.append(one._replace(forward=forward, input=backward))
        return shown


def _exposed(axis: Axis) -> SecondsCause:
    return axis


def _flops(each: Operation, uncut: float) -> Floats | float:
    if isinstance(each, Matmul):
        return each.forward_flops
    if isinstance(each, AttentionCore):
        return each.forward_flops * (uncut if each.is_fused else 1.0)
    return 0.0


def _add(into: Seconds, cause: SecondsCause, seconds: Floats) -> None:
    into[cause] = into[cause] + seconds if cause in into else seconds + 0.0


def _total(seconds: Seconds) -> Floats:
    return sum(seconds.values(), np.zeros(1))
