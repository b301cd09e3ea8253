"""Choices of experts over whole sequences, whose positions the ranks of tp and cp share.

A capacity is counted in the order of a sequence's positions, and the loss for balance is of a sequence
(`model/routing.py`). A rank's positions are one run of them, or two, an early one and a late one
(`parallel/positions.py`), each cut again by sequence parallelism. So ranks tell one another how often each of
their runs chose each expert, a few whole numbers, and every rank puts the runs of all in order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainwright.spec.recipe import Recipe
from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import mixtures
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.positions import positions_of


def apply_choices(piece: Transformer, mesh: Mesh, recipe: Recipe, clock: Clock) -> None:
    """Let a piece's mixtures know what was chosen at the positions of other ranks, in place."""
    layout, at, found = mesh.layout, mesh.coordinate, mixtures(piece)
    if layout.tp * layout.cp == 1 or not found:
        return
    parts = parts_of(recipe, layout.tp, layout.cp)
    order = order_of(parts)
    runs = len(order) // len(parts)
    own = at.cp * layout.tp + at.tp
    places = [order.index(own * runs + run) for run in range(runs)]
    groups = tuple((axis, mesh.groups[axis]) for axis in ("tp", "cp") if layout.degree(axis) > 1)
    for _, mixture in found:
        mixture.cuts = (cut_of(parts[own]),) if runs > 1 else ()
        mixture.over_sequence = Choices(groups, clock, order, places)


def parts_of(recipe: Recipe, tp: int, cp: int) -> list[torch.Tensor]:
    """Positions of every rank, by cp and tp inside it. With experts tp always cuts the sequence (`Run.check`)."""
    return [part for rank in range(cp) for part in positions_of(recipe, cp, rank).view(tp, -1)]


def order_of(parts: list[torch.Tensor]) -> list[int]:
    """The runs of all ranks by their positions: one of each, or, where anyone has two, two of each, of which the
    second may have no positions."""
    cuts = [cut_of(part) for part in parts]
    is_cut = any(cut < len(part) for part, cut in zip(parts, cuts, strict=True))
    runs = [run for part, cut in zip(parts, cuts, strict=True) for run in part.tensor_split([cut][:is_cut])]
    # A run of no positions may stand anywhere.
    firsts = [int(run[0]) if len(run) else -1 for run in runs]
    return sorted(range(len(runs)), key=firsts.__getitem__)


def cut_of(positions: torch.Tensor) -> int:
    """Where ascending positions that are one run or two first don't follow one another; their number where they
    all do."""
    jumps = (positions.diff() != 1).nonzero().flatten().tolist()
    assert len(jumps) <= 1
    return jumps[0] + 1 if jumps else len(positions)


@dataclass(frozen=True)
class Choices:
    """`MixtureOfExperts.over_sequence` of one rank."""

    groups: tuple[tuple[str, dist.ProcessGroup], ...]
    """Over which a sequence is shared, the innermost first."""
    clock: Clock
    order: list[int]
    """The runs of all ranks by their positions; their numbers are in the order of cp, tp and run."""
    places: list[int]
    """Of this rank's runs in that order."""

    def __call__(self, count_RBX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for cause, group in self.groups:
            mine = count_RBX.contiguous()
            count_RBX = mine.new_empty((group.size() * len(mine), *mine.shape[1:]))
            with self.clock.of(cause):
                all_gather(count_RBX, mine, group=group)
        ordered_RBX = count_RBX[self.order]
        earlier_RBX = ordered_RBX.cumsum(0) - ordered_RBX
        return earlier_RBX[self.places], ordered_RBX.sum(0)
