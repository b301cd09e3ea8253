"""Expert parallelism (GShard, arXiv:2006.16668): tokens travel to the ranks that have their experts, and back.

    ep    each rank has some whole experts; rows go out by an all-to-all whose pieces are as long as the router
          made them, and come back by its mirror image
    etp   the width of an expert is cut over ranks, each of which has its own rows: they gather one another's, and
          each gets back the sum of what all of them made of its own

What backward sends are the mirror images again. Lengths travel first, as whole numbers; a rank that gets no row
takes part all the same, with gradients of zero.

With `overlap.ep` rows are on their way beside the shared experts: out beside the first half of these, back beside
the second, and backward likewise (as Megatron-Core's moe_shared_expert_overlap). Without, they are waited for at
once.

Experts are DTensors over (ep, etp), so that sharding, clipping and checkpoints know what each rank has of the
whole. The bias of a down projection is whole on each rank of etp.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.spec.recipe import Recipe
from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import Experts, Weights, mixtures
from trainwright.train.model.transformer import Transformer

CUTS = {"up": 1, "gate": 1, "down": 2, "up_bias": 1, "gate_bias": 1, "down_bias": None}
"""The dim of a stacked parameter that etp cuts; ep cuts the first."""


def apply_expert_parallel(piece: Transformer, mesh: Mesh, recipe: Recipe, clock: Clock) -> None:
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
        experts.forward = partial(dispatch.multiplied, experts)
        mixture.send = partial(_Travel, dispatch)
        mixture.hides_ways = recipe.overlap.ep


@dataclass(frozen=True)
class Dispatch:
    """The ways to a rank's experts and back; no group where a degree is 1."""

    ep: dist.ProcessGroup | None
    etp: dist.ProcessGroup | None
    clock: Clock

    def multiplied(
        self, experts: Experts, row_RD: torch.Tensor, weight_R: torch.Tensor, count_X: torch.Tensor
    ) -> torch.Tensor:
        """In the place of `Experts.forward`: rows of the experts that are here."""
        return experts.multiplied(row_RD, weight_R, count_X, self._here(experts))

    def to_experts(self, count_X: torch.Tensor) -> tuple["_Lengths | None", torch.Tensor]:
        """How many rows go where over ep, and how many of each expert here come from each rank, (W, X)."""
        if self.ep is None:
            return None, count_X.unsqueeze(0)
        sent_WX = count_X.unflatten(0, (self.ep.size(), -1))
        received_WX = torch.empty_like(sent_WX)
        with self.clock.of("ep"):
            dist.all_to_all_single(received_WX, sent_WX.contiguous(), group=self.ep)
        return _Lengths(tuple(sent_WX.sum(1).tolist()), tuple(received_WX.sum(1).tolist())), received_WX

    def to_widths(self, count_WX: torch.Tensor) -> tuple["_Lengths | None", torch.Tensor]:
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
        up, down = _part(experts.up), _part(experts.down)
        assert up is not None
        assert down is not None
        gate, up_bias, down_bias, gate_bias = (
            _part(each) for each in (experts.gate, experts.up_bias, experts.down_bias, experts.gate_bias)
        )
        # Each rank of etp adds its share of the bias, but all have the same rows and see the whole gradient.
        share = 1.0 if self.etp is None else 1 / self.etp.size()
        return Weights(up, down, gate, up_bias, down_bias, gate_bias, share)

    def exchange(self, rows: torch.Tensor, lengths: "_Lengths", group: dist.ProcessGroup) -> torch.Tensor:
        """All-to-all of pieces of rows along dim 0."""
        return _Flight(self, rows, lengths, group).landed()

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


class _Flight:
    """An all-to-all of pieces of rows along dim 0, from its beginning until somebody waits for it."""

    def __init__(
        self, dispatch: Dispatch, rows: torch.Tensor, lengths: _Lengths, group: dist.ProcessGroup
    ) -> None:
        self._clock, self._leaving = dispatch.clock, rows.contiguous()
        self.arriving = rows.new_empty((sum(lengths.received), *rows.shape[1:]))
        with self._clock.of("ep"):
            work = dist.all_to_all_single(
                self.arriving,
                self._leaving,
                list(lengths.received),
                list(lengths.sent),
                group=group,
                async_op=True,
            )
        assert work is not None
        self._work = work

    def landed(self) -> torch.Tensor:
        with self._clock.of("ep"):
            self._work.wait()
        return self.arriving


class _Trip:
    """Rows that go over ep, and their gradients that come the other way. Both are begun by one node of the graph
    and waited for by another: autograd runs the nodes made last first, so that what forward has put between the
    two lies between them in backward too."""

    def __init__(self, dispatch: Dispatch, rows: torch.Tensor, lengths: _Lengths) -> None:
        self._dispatch, self._lengths = dispatch, lengths
        self._flight: _Flight | None = None
        self._rows: torch.Tensor | None = _Depart.apply(rows, self)  # pyright: ignore[reportAttributeAccessIssue]

    def ended(self) -> torch.Tensor:
        """The rows, waited for. The graph holds the trip, which must not hold the graph any longer."""
        rows, self._rows = self._rows, None
        return _Arrive.apply(rows, self)  # pyright: ignore[reportReturnType]

    def begin(self, rows: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """What will hold what arrives."""
        assert self._dispatch.ep is not None
        lengths = self._lengths.back() if backward else self._lengths
        self._flight = _Flight(self._dispatch, rows, lengths, self._dispatch.ep)
        return self._flight.arriving

    def end(self) -> torch.Tensor:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        return flight.landed()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.begin(rows, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The gradient that comes along the graph says no more than that the other has left.
        return ctx.trip.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        trip.end()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Of the shape that autograd wants here; of the other shape is what has left.
        ctx.trip.begin(gradients[0], backward=True)
        return gradients[0], None


class _Travel:
    """`experts.Way` over ep and etp. No rows are held longer than they are of use."""

    def __init__(
        self, dispatch: Dispatch, row_RD: torch.Tensor, weight_R: torch.Tensor, count_X: torch.Tensor
    ) -> None:
        self._dispatch = dispatch
        self._out, self._count_WX = dispatch.to_experts(count_X)
        self._going: list[_Trip | torch.Tensor] = [self._sent(row_RD), self._sent(weight_R)]
        self._gather: _Lengths | None = None
        self._coming: _Trip | torch.Tensor | None = None

    def there(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dispatch = self._dispatch
        self._gather, count_WX = dispatch.to_widths(self._count_WX)
        row_RD, weight_R = (self._arrived(each) for each in self._going)
        self._going.clear()
        if self._gather is not None:
            row_RD, weight_R = (_Gather.apply(each, self._gather, dispatch) for each in (row_RD, weight_R))
        # Rows are in the order of the ranks that sent them; a matmul wants those of an expert together.
        local_X = torch.arange(count_WX.shape[1], device=row_RD.device)
        order_R = local_X.repeat(len(count_WX)).repeat_interleave(count_WX.flatten()).argsort(stable=True)
        self._order_R = order_R
        return row_RD.index_select(0, order_R), weight_R.index_select(0, order_R), count_WX.sum(0)

    def back(self, out_RD: torch.Tensor) -> None:
        out_RD = _PutBack.apply(out_RD, self._order_R)  # pyright: ignore[reportAssignmentType]
        if self._gather is not None:
            out_RD = _ScatterSum.apply(out_RD, self._gather, self._dispatch)  # pyright: ignore[reportAssignmentType]
        self._coming = self._sent(out_RD, back=True)

    def home(self) -> torch.Tensor:
        assert self._coming is not None
        coming, self._coming = self._coming, None
        return self._arrived(coming)

    def _sent(self, rows: torch.Tensor, *, back: bool = False) -> _Trip | torch.Tensor:
        if self._out is None:
            return rows
        return _Trip(self._dispatch, rows, self._out.back() if back else self._out)

    def _arrived(self, rows: _Trip | torch.Tensor) -> torch.Tensor:
        return rows.ended() if isinstance(rows, _Trip) else rows


class _PutBack(torch.autograd.Function):
    """Rows at the places that they were taken from, which alone are kept: PyTorch's index_copy keeps rows too."""

    @staticmethod
    def forward(ctx: Any, row_RD: torch.Tensor, place_R: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place_R)
        return torch.zeros_like(row_RD).index_copy(0, place_R, row_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (place_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, place_R), None


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
