"""The executor of a step: one rank's row of acts, with a function for each kind of act.

The same rows that the planner plays with durations (`spec/schedule.py`) are run here with tensors. A pipeline of
one rank is the plain loop over microbatches. PyTorch's own pipeline runtime takes such rows too, but it scatters
gradients once per step whatever the ZeRO stage, and holds a receive buffer for every microbatch of the step from
its start; this one asks the data-parallel form before each backward, and allocates a buffer when its transfer is
due.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainwright.spec.schedule import Act, Rows, round_ends
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.loss import VocabularyPart, summed_losses
from trainwright.train.mesh import Mesh
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.gradients import DataParallel
from trainwright.train.parallel.transfers import Program, Transfer, programs

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
    backwards: dict[int, int] = field(default_factory=dict)
    """Backward acts done, by chunk."""


class Pipeline:
    """Runs `rows[pp_rank]` over `pieces`, chunk c being pieces[c].

    `activation_dtype` is what travels between stages, (micro_batch, positions of this rank, d_model);
    `vocabulary` is this rank's part of the logits, where tp cuts them; `later_weight` is that of the loss of each
    later token, in multi-token prediction.
    """

    def __init__(
        self,
        pieces: list[Transformer],
        rows: Rows,
        mesh: Mesh,
        data_parallel: DataParallel,
        clock: Clock,
        *,
        activation_dtype: torch.dtype,
        sequence_parallel: bool,
        overlap: bool,
        vocabulary: VocabularyPart | None,
        later_weight: float,
    ) -> None:
        self._pieces, self._mesh, self._data_parallel, self._clock = pieces, mesh, data_parallel, clock
        self._program: Program = programs(rows, mesh.layout.vpp)[mesh.coordinate.pp]
        self._round_ends = round_ends(rows[mesh.coordinate.pp])
        self._num_microbatches = sum(act.kind == "F" for act in rows[0]) // mesh.layout.vpp
        self._activation_dtype, self._overlap = activation_dtype, overlap
        self._position_cut = mesh.layout.tp if sequence_parallel else 1
        self._vocabulary, self._later_weight = vocabulary, later_weight

    def run(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of all microbatches. Leaves reduced gradients; returns this rank's part of the
        summed cross-entropy, which is zero off the last stage."""
        assert len(batch.inputs_BS) == self._num_microbatches
        state = InFlight(torch.zeros((), dtype=torch.float64, device=self._mesh.device))
        for step in self._program:
            if isinstance(step, Transfer):
                with self._clock.of("pp"):
                    self._transfer(step, state, batch)
            elif step.kind == "F":
                self._forward(step, state, batch)
            else:
                self._backward(step, state, batch)
        with self._clock.of("pp"):
            for _, work in state.leaving:
                work.wait()
        self._data_parallel.reduce()
        return state.loss_sum

    def _forward(self, act: Act, state: InFlight, batch: Batch) -> None:
        piece, place = self._pieces[act.chunk], (act.microbatch, act.chunk)
        if piece.is_first:
            x = batch.inputs_BS[act.microbatch].to(self._mesh.device)
        else:
            x = self._arrived("F", act, state).requires_grad_()
            state.inputs[place] = x
        with self._clock.of("compute"):
            output = piece(x, batch.inputs_BS[act.microbatch].to(self._mesh.device)) if piece.later else piece(x)
            if piece.is_last:
                targets_BS = batch.targets_BS[act.microbatch].to(self._mesh.device)
                loss, output = summed_losses(output, targets_BS, self._vocabulary, self._later_weight)
                state.loss_sum += loss.detach()
                # Gradients of the mean over the whole step: the sum over dp needs no division.
                output = output / batch.global_tokens
        state.outputs[place] = output

    def _backward(self, act: Act, state: InFlight, batch: Batch) -> None:
        piece, place = self._pieces[act.chunk], (act.microbatch, act.chunk)
        upstream = None if piece.is_last else self._arrived("B", act, state)
        state.backwards[act.chunk] = state.backwards.get(act.chunk, 0) + 1
        is_last = state.backwards[act.chunk] == self._num_microbatches
        self._data_parallel.before_backward(act.chunk, is_last=is_last, ends_round=place in self._round_ends)
        with self._clock.of("compute"):
            torch.autograd.backward(state.outputs.pop(place), upstream)
        if not piece.is_first:
            gradient = state.inputs.pop(place).grad
            assert gradient is not None
            state.gradients[place] = gradient

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
        with self._clock.of("pp"):
            tensor, work = state.arriving.pop((kind, act.microbatch, act.chunk))
            if work is not None:
                work.wait()
        return tensor
