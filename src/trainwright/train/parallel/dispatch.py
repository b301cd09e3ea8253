"""Expert parallelism (GShard, arXiv:2006.16668): tokens travel to the ranks that have their experts, and back.

    ep    each rank has some whole experts; rows go out by an all-to-all whose pieces are as long as the router
          made them, and come back by its mirror image
    etp   the width of an expert is cut over ranks, each of which has its own rows: they gather one another's, and
          each gets back the sum of what all of them made of its own

What backward sends are the mirror images again. Lengths travel first, as whole numbers; a rank that gets no row
takes part all the same, with gradients of zero.

Experts are DTensors over (ep, etp), so that sharding, clipping and checkpoints know what each rank has of the
whole. The bias of a down projection is whole on each rank of etp.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import Experts, Weights, mixtures
from trainwright.train.model.transformer import Transformer

CUTS = {"up": 1, "gate": 1, "down": 2, "up_bias": 1, "gate_bias": 1, "down_bias": None}
"""The dim of a stacked parameter that etp cuts; ep cuts the first."""


def apply_expert_parallel(piece: Transformer, mesh: Mesh, clock: Clock) -> None:
    """Spread a piece's experts over the ranks of its stage, in place. Parameters may be on the meta device."""
    layout = mesh.layout
    if layout.ep * layout.etp == 1:
        return
    submesh = mesh.expert_submesh("ep", "etp")
    dispatch = Dispatch(mesh.groups.get("ep"), mesh.groups.get("etp"), clock)
    for _, mixture in mixtures(piece):
        experts = mixture.experts
        for name, cut in CUTS.items():
            parameter = getattr(experts, name)
            if parameter is not None:
                placements = (Shard(0), Replicate() if cut is None else Shard(cut))
                distributed = distribute_tensor(parameter, submesh, placements, src_data_rank=None)
                setattr(experts, name, nn.Parameter(distributed))
        experts.forward = _Spread(experts, dispatch)


@dataclass(frozen=True)
class _Spread:
    """In the place of `Experts.forward`, with the same arguments: all experts, of which some are here."""

    experts: Experts
    dispatch: "Dispatch"

    def __call__(self, row_RD: torch.Tensor, weight_R: torch.Tensor, count_X: torch.Tensor) -> torch.Tensor:
        return self.dispatch.around(self.experts, row_RD, weight_R, count_X)


@dataclass(frozen=True)
class Dispatch:
    """The ways to a rank's experts and back; no group where a degree is 1."""

    ep: dist.ProcessGroup | None
    etp: dist.ProcessGroup | None
    clock: Clock

    def around(
        self, experts: Experts, row_RD: torch.Tensor, weight_R: torch.Tensor, count_X: torch.Tensor
    ) -> torch.Tensor:
        """What `experts` of all ranks make of rows in the order of experts, `count_X` of each."""
        out, count_WX = self._to_experts(count_X)
        gather, count_WX = self._to_widths(count_WX)
        row_RD, weight_R = self._sent(row_RD, out, gather), self._sent(weight_R, out, gather)
        # Rows are in the order of the ranks that sent them; a matmul wants those of an expert together.
        local_X = torch.arange(count_WX.shape[1], device=row_RD.device)
        order_R = local_X.repeat(len(count_WX)).repeat_interleave(count_WX.flatten()).argsort(stable=True)
        row_RD, weight_R = row_RD.index_select(0, order_R), weight_R.index_select(0, order_R)
        row_RD = experts.multiplied(row_RD, weight_R, count_WX.sum(0), self._here(experts))
        row_RD = torch.zeros_like(row_RD).index_copy(0, order_R, row_RD)
        if gather is not None:
            row_RD = _ScatterSum.apply(row_RD, gather, self)  # pyright: ignore[reportAssignmentType]
        if out is not None:
            row_RD = _Exchange.apply(row_RD, out.back(), self)  # pyright: ignore[reportAssignmentType]
        return row_RD

    def _sent(self, rows: torch.Tensor, out: "_Lengths | None", gather: "_Lengths | None") -> torch.Tensor:
        if out is not None:
            rows = _Exchange.apply(rows, out, self)  # pyright: ignore[reportAssignmentType]
        if gather is not None:
            rows = _Gather.apply(rows, gather, self)  # pyright: ignore[reportAssignmentType]
        return rows

    def _to_experts(self, count_X: torch.Tensor) -> tuple["_Lengths | None", torch.Tensor]:
        """How many rows go where over ep, and how many of each expert here come from each rank, (W, X)."""
        if self.ep is None:
            return None, count_X.unsqueeze(0)
        sent_WX = count_X.unflatten(0, (self.ep.size(), -1))
        received_WX = torch.empty_like(sent_WX)
        with self.clock.of("ep"):
            dist.all_to_all_single(received_WX, sent_WX.contiguous(), group=self.ep)
        return _Lengths(tuple(sent_WX.sum(1).tolist()), tuple(received_WX.sum(1).tolist())), received_WX

    def _to_widths(self, count_WX: torch.Tensor) -> tuple["_Lengths | None", torch.Tensor]:
        """How many rows the ranks of etp have, and of each expert from each rank of all of them."""
        if self.etp is None:
            return None, count_WX
        ranks = self.etp.size()
        whole = count_WX.new_empty((ranks * len(count_WX), count_WX.shape[1]))
        with self.clock.of("ep"):
            all_gather(whole, count_WX.contiguous(), group=self.etp)
        lengths = tuple(whole.unflatten(0, (ranks, -1)).sum((1, 2)).tolist())
        return _Lengths((int(count_WX.sum()),) * ranks, lengths), whole

    def _here(self, experts: Experts) -> Weights:
        """This rank's part of the experts, as plain tensors."""
        down_bias = _part(experts.down_bias)
        if down_bias is not None and self.etp is not None:
            # Each rank of etp adds its share of the bias, but all have the same rows and see the whole gradient.
            down_bias = down_bias + (down_bias / self.etp.size() - down_bias).detach()
        up, down = _part(experts.up), _part(experts.down)
        assert up is not None
        assert down is not None
        return Weights(up, down, _part(experts.gate), _part(experts.up_bias), down_bias, _part(experts.gate_bias))

    def exchange(self, rows: torch.Tensor, lengths: "_Lengths", group: dist.ProcessGroup) -> torch.Tensor:
        """All-to-all of pieces of rows along dim 0."""
        received = rows.new_empty((sum(lengths.received), *rows.shape[1:]))
        with self.clock.of("ep"):
            dist.all_to_all_single(
                received, rows.contiguous(), list(lengths.received), list(lengths.sent), group=group
            )
        return received

    def gather(self, rows: torch.Tensor, lengths: "_Lengths") -> torch.Tensor:
        """Rows of all ranks of etp: an all-to-all that sends all of them to each, as no all-gather takes pieces of
        different lengths."""
        assert self.etp is not None
        return self.exchange(rows.repeat(self.etp.size(), *[1] * (rows.ndim - 1)), lengths, self.etp)

    def scatter_sum(self, rows: torch.Tensor, lengths: "_Lengths") -> torch.Tensor:
        """This rank's rows, added up over etp: the mirror image of `gather`."""
        assert self.etp is not None
        parts = self.exchange(rows, lengths.back(), self.etp)
        return parts.view(self.etp.size(), lengths.sent[0], *rows.shape[1:]).sum(0)


@dataclass(frozen=True)
class _Lengths:
    """Rows to and from each rank of a group, in its order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def back(self) -> "_Lengths":
        return _Lengths(self.received, self.sent)


def _part(parameter: torch.Tensor | None) -> torch.Tensor | None:
    if parameter is None:
        return None
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class _Exchange(torch.autograd.Function):
    """All-to-all over ep."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, lengths: _Lengths, dispatch: Dispatch) -> torch.Tensor:
        ctx.lengths, ctx.dispatch = lengths, dispatch
        assert dispatch.ep is not None
        return dispatch.exchange(rows, lengths, dispatch.ep)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.dispatch.exchange(gradients[0], ctx.lengths.back(), ctx.dispatch.ep), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, lengths: _Lengths, dispatch: Dispatch) -> torch.Tensor:
        ctx.lengths, ctx.dispatch = lengths, dispatch
        return dispatch.gather(rows, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.dispatch.scatter_sum(gradients[0], ctx.lengths), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, lengths: _Lengths, dispatch: Dispatch) -> torch.Tensor:
        ctx.lengths, ctx.dispatch = lengths, dispatch
        return dispatch.scatter_sum(rows, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.dispatch.gather(gradients[0], ctx.lengths), None, None
