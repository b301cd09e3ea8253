"""What rounding did to the tensors of each low-precision layer in one step, over all ranks: how many values
saturated, how many became zero, and how large the largest was.

A layer's scale has saturated where more than `ALARM_SHARE` of a tensor's values were beyond what its scales hold,
or where the largest value is no number. Such a layer is named, and goes on in the activation format from the next
step on, if the recipe says so (`precision_fallback`); as all ranks see the counts of all, they agree.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from trainwright.spec.record import TensorHealth
from trainwright.train.mesh import Mesh
from trainwright.train.precision.largest import ROLES, Role
from trainwright.train.precision.quantized import Quantized
from trainwright.train.precision.rates import Counts, counts

ALARM_SHARE = 0.01
"""Chosen: above what delayed scaling lets saturate while activations grow in a run's first steps (up to 0.7%
seen), below what an activation that has outgrown its history does (94%)."""


class Alarm(NamedTuple):
    layer: str
    role: str
    health: TensorHealth

    @property
    def text(self) -> str:
        if not self.health.is_finite:
            return f"{self.layer}: its {self.role} has values that are no numbers"
        share = f"{self.health.overflow:.2%} of its {self.role}'s values are beyond what the scale holds"
        return f"{self.layer}: {share}, the largest is {self.health.amax:.3g}"


class Health:
    """Counts of this rank's layers, while `is_on`. Each tensor counts where it is quantized along what Fprop or
    Dgrad sums over; one that several layers read counts with the first."""

    def __init__(self) -> None:
        self.is_on = False
        self.listener: Callable[[str, Role, torch.Tensor, Quantized], None] | None = None
        """Is told what `saw` is, watched or not."""
        self._counts: dict[tuple[str, Role], list[Counts]] = {}

    def saw(self, layer: str, role: Role, x: torch.Tensor, quantized: Quantized) -> None:
        """A tensor and what has become of it."""
        if self.listener is not None:
            self.listener(layer, role, x, quantized)
        if self.is_on and x.numel():
            self._counts.setdefault((layer, role), []).append(counts(x, quantized))

    def taken(self, layers: Sequence[str], mesh: Mesh, axes: Sequence[str]) -> dict[str, dict[str, TensorHealth]]:
        """Of each of this rank's layers and their tensors, over the ranks of the axes, all of which call it; and
        counts begin anew."""
        places: list[tuple[str, Role]] = [(layer, role) for layer in sorted(layers) for role in ROLES]
        sums_P3 = torch.zeros(len(places), 3, dtype=torch.float64, device=mesh.device)
        amax_P = torch.zeros(len(places), device=mesh.device)
        for place, key in enumerate(places):
            for each in self._counts.get(key, ()):
                values = each.overflow.new_tensor(each.values)
                sums_P3[place] += torch.stack((values, each.overflow, each.underflow))
                amax_P[place] = torch.maximum(amax_P[place], each.amax)
        self._counts.clear()
        for axis in axes:
            if axis in mesh.groups:
                dist.all_reduce(sums_P3, group=mesh.groups[axis])
                dist.all_reduce(amax_P, dist.ReduceOp.MAX, group=mesh.groups[axis])
        found: dict[str, dict[str, TensorHealth]] = {}
        for (layer, role), (values, overflow, underflow), amax in zip(
            places, sums_P3.tolist(), amax_P.tolist(), strict=True
        ):
            if values:
                health = TensorHealth(amax=amax, overflow=overflow / values, underflow=underflow / values)
                found.setdefault(layer, {})[role] = health
        return found


def alarms_of(health: dict[str, dict[str, TensorHealth]]) -> list[Alarm]:
    """Tensors whose scale has saturated."""
    return [
        Alarm(layer, role, each)
        for layer, roles in health.items()
        for role, each in roles.items()
        if each.overflow > ALARM_SHARE or not each.is_finite
    ]
