"""The executor of a step: one rank's row of acts, with a function for each kind of act.

The same rows that the planner plays with durations (`spec/schedule.py`) are run here with tensors. A pipeline of
one rank is the plain loop over microbatches. PyTorch's own pipeline runtime takes such rows too, but it scatters
gradients once per step whatever the ZeRO stage, and holds a receive buffer for every microbatch of the step from
its start; this one asks the data-parallel form before each backward, and allocates a buffer when its transfer is
due.

Two acts that are paired are run one after the other: what the first one sends leaves beside the second.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainwright.spec.schedule import Act, Placement, Rows, round_ends
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.head_loss import HeadLoss
from trainwright.train.mesh import Mesh
from trainwright.train.model.dropout import Dropping
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.gradients import DataParallel
from trainwright.train.parallel.transfers import Handover, Program, Transfer, programs
from trainwright.train.parallel.weight_gradients import WeightGradients
from trainwright.train.precision.arithmetic import UnderWay

Place = tuple[int, int]
"""(microbatch, chunk)."""

MOST_LEAVING = 2
"""Sends that are on their way at one time, as many as the planner counts buffers for. A send before them is waited
for: gloo doesn't say that one is over, however long it has been, until someone waits."""


@dataclass
class InFlight:
    """What a step holds between its acts."""

    loss_sum: torch.Tensor
    arriving: dict[tuple[str, int, int], tuple[torch.Tensor, dist.Work | None]] = field(default_factory=dict)
    """By (kind, microbatch, chunk); without work where it has arrived."""
    inputs: dict[Place, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Place, torch.Tensor | GradientEdge] = field(default_factory=dict)
    """Of what was sent only the place in the graph is left, which is all that backward needs: no operation has
    saved a stage's output."""
    gradients: dict[Place, torch.Tensor] = field(default_factory=dict)
    """Of the inputs, from a backward act until they are sent."""
    leaving: deque[tuple[torch.Tensor, dist.Work]] = field(default_factory=deque)
    """Sent last, the oldest first."""
    weight_gradients: dict[Place, WeightGradients] = field(default_factory=dict)
    """Of microbatches whose backward is split, from their forward to their weight-gradient act."""
    backwards: Counter[int] = field(default_factory=Counter)
    """Backwards that are whole or becoming so, by chunk."""


class Pipeline:
    """Runs `rows[pp_rank]` over `pieces`, chunk c being pieces[c] and stage placement[pp_rank][c].

    `activation_dtype` is what travels between stages, (micro_batch, positions of this rank, d_model);
    `loss` is what the last stage ends with; `told` are told which sequences are under way.
    """

    def __init__(
        self,
        pieces: list[Transformer],
        rows: Rows,
        placement: Placement,
        mesh: Mesh,
        data_parallel: DataParallel,
        clock: Clock,
        *,
        activation_dtype: torch.dtype,
        sequence_parallel: bool,
        overlap: bool,
        loss: HeadLoss,
        told: Sequence[Dropping | UnderWay],
    ) -> None:
        self._pieces, self._mesh, self._data_parallel, self._clock = pieces, mesh, data_parallel, clock
        own = mesh.coordinate.pp
        self._program: Program = programs(rows, placement)[own]
        self._round_ends = round_ends(rows[own])
        self._passes = Counter(act.chunk for act in rows[own] if act.kind == "F")
        self._num_microbatches = len({act.microbatch for act in chain(*rows)})
        self._split = {(act.microbatch, act.chunk) for act in rows[own] if act.kind == "I"}
        self._activation_dtype, self._overlap = activation_dtype, overlap
        self._position_cut = mesh.layout.cp * (mesh.layout.tp if sequence_parallel else 1)
        self._loss, self._told = loss, told

    @contextmanager
    def shortened(self, passes: int) -> Iterator[None]:
        """While it lasts a step is no more than the first `passes` microbatches of each chunk, in their order: for
        a rank whose peers aren't there (`train/dryrun/`), as other ranks would wait for the rest."""
        whole = self._program, self._passes, self._round_ends
        kept: set[Place] = set()
        begun: Counter[int] = Counter()
        for step in self._program:
            if isinstance(step, Act) and step.kind == "F" and begun[step.chunk] < passes:
                begun[step.chunk] += 1
                kept.add((step.microbatch, step.chunk))
        self._program = tuple(step for step in self._program if (step.microbatch, step.chunk) in kept)
        row = tuple(step for step in self._program if isinstance(step, Act))
        self._passes, self._round_ends = begun, round_ends(row)
        try:
            yield
        finally:
            self._program, self._passes, self._round_ends = whole

    def run(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of all microbatches. Leaves reduced gradients; returns this rank's part of the
        summed cross-entropy, which is zero off the last stage."""
        assert len(batch.inputs_BS) == self._num_microbatches
        state = InFlight(torch.zeros((), dtype=torch.float64, device=self._mesh.device))
        for step in self._program:
            if isinstance(step, Act):
                self._data_parallel.before_act()
            if isinstance(step, Transfer):
                with self._clock.of("pp"):
                    self._transfer(step, state, batch)
            elif isinstance(step, Handover):
                self._hand_over(step, state)
            elif step.kind == "F":
                self._forward(step, state, batch)
            elif step.kind == "W":
                self._tell(step, batch)
                self._weight_gradient(step, state)
            else:
                self._backward(step, state, batch)
        with self._clock.of("pp"):
            for _, work in state.leaving:
                work.wait()
        self._data_parallel.reduce()
        return state.loss_sum

    def _forward(self, act: Act, state: InFlight, batch: Batch) -> None:
        piece, place = self._pieces[act.chunk], (act.microbatch, act.chunk)
        self._tell(act, batch)
        if piece.is_first:
            x = batch.inputs(act.microbatch).to(self._mesh.device)
        else:
            x = self._arrived("F", act, state).requires_grad_()
            state.inputs[place] = x
        documents_BS = None
        if batch.documents_BS is not None:
            documents_BS = batch.documents_BS[act.microbatch].to(self._mesh.device)
        if place in self._split:
            state.weight_gradients[place] = WeightGradients()
        with self._clock.of("compute"), state.weight_gradients.get(place, nullcontext()):
            if piece.is_last:
                further = range(len(piece.later) + 1)
                targets_BS = [batch.targets(act.microbatch, each).to(self._mesh.device) for each in further]
                later_BS = [batch.inputs(act.microbatch, each).to(self._mesh.device) for each in further[1:]]
                # Gradients of the mean over the whole step: the sum over dp needs no division.
                scale = 1 / batch.global_tokens
                loss = partial(self._loss, targets_BS=targets_BS, scale=scale)
                output, entropy = piece(x, documents_BS, later_BS, loss)
                state.loss_sum += entropy
            else:
                output = piece(x, documents_BS)
        state.outputs[place] = output

    def _backward(self, act: Act, state: InFlight, batch: Batch) -> None:
        """Of everything, or (kind I) of all but the weights."""
        piece, place = self._pieces[act.chunk], (act.microbatch, act.chunk)
        upstream = None if piece.is_last else self._arrived("B", act, state)
        self._tell(act, batch)
        if act.kind == "B":
            is_last = self._is_last_backward(act.chunk, state)
            ends_round = place in self._round_ends
            self._data_parallel.before_backward(act.chunk, is_last=is_last, ends_round=ends_round)
        else:
            self._data_parallel.before_input_gradient(act.chunk)
        with self._clock.of("compute"), state.weight_gradients.get(place, nullcontext()):
            torch.autograd.backward(state.outputs.pop(place), upstream)
        if not piece.is_first:
            gradient = state.inputs.pop(place).grad
            assert gradient is not None
            state.gradients[place] = gradient

    def _tell(self, act: Act, batch: Batch) -> None:
        """Before every act that runs layers, or runs them again."""
        for each in self._told:
            each.samples_B = batch.samples_B(act.microbatch)

    def _weight_gradient(self, act: Act, state: InFlight) -> None:
        place = (act.microbatch, act.chunk)
        is_last, ends_round = self._is_last_backward(act.chunk, state), place in self._round_ends
        with self._clock.of("compute"):
            state.weight_gradients.pop(place).compute()
            self._data_parallel.after_weight_gradient(act.chunk, is_last=is_last, ends_round=ends_round)

    def _is_last_backward(self, chunk: int, state: InFlight) -> bool:
        """Whether the act that begins makes the last of a chunk's backwards whole."""
        state.backwards[chunk] += 1
        return state.backwards[chunk] == self._passes[chunk]

    def _hand_over(self, handover: Handover, state: InFlight) -> None:
        kind, place = handover.kind, (handover.microbatch, handover.chunk)
        tensor = self._sent(state, place) if kind == "F" else state.gradients.pop(place)
        state.arriving[kind, handover.microbatch, handover.to] = (tensor, None)

    def _transfer(self, transfer: Transfer, state: InFlight, batch: Batch) -> None:
        place = (transfer.microbatch, transfer.chunk)
        peer, group = self._mesh.peer(transfer.peer), self._mesh.groups["pp"]
        if transfer.way == "send":
            tensor = self._sent(state, place) if transfer.kind == "F" else state.gradients.pop(place)
            tensor = tensor.contiguous()
            work = dist.isend(tensor, peer, group, tag=transfer.tag)
        else:
            size, seq_len = batch.inputs_BS[transfer.microbatch].shape
            shape = (size, seq_len // self._position_cut, self._pieces[0].spec.d_model)
            tensor = torch.empty(shape, dtype=self._activation_dtype, device=self._mesh.device)
            work = dist.irecv(tensor, peer, group, tag=transfer.tag)
        assert work is not None
        if not self._overlap:
            # gloo hangs if a transfer is waited for twice.
            with self._clock.of("bubble" if transfer.way == "receive" else "pp"):
                work.wait()
            work = None
        if transfer.way == "receive":
            state.arriving[(transfer.kind, *place)] = (tensor, work)
        elif work is not None:
            state.leaving.append((tensor, work))
            if len(state.leaving) > MOST_LEAVING:
                state.leaving.popleft()[1].wait()

    def _sent(self, state: InFlight, place: Place) -> torch.Tensor:
        """The output that leaves, which from now on nobody here holds."""
        output = state.outputs[place]
        assert isinstance(output, torch.Tensor)
        state.outputs[place] = get_gradient_edge(output)
        return output.detach()

    def _arrived(self, kind: str, act: Act, state: InFlight) -> torch.Tensor:
        with self._clock.of("bubble"):
            tensor, work = state.arriving.pop((kind, act.microbatch, act.chunk))
            if work is not None:
                work.wait()
        return tensor
