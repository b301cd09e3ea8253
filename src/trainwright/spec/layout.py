"""How the ranks are arranged: the degree of each axis, a rank's coordinates, and the groups.

Innermost are tp and cp: neighbouring ranks are tensor-parallel peers, which need the fastest links. Then come pp
and dp (Llama 3's order), or dp and pp (Megatron-Core's and torchtitan's, which keeps expert and data parallelism
inside nodes where tp is small). The rank count is tp * cp * pp * dp.

Experts are NOT a fifth factor, unlike in the textbook product `gpus = tp * cp * pp * ep * dp`: within one
pipeline stage the same tp * cp * dp ranks are re-read as a grid etp x ep x edp, innermost first, so ep is
carved out of dp and cp (and of tp, where etp < tp), as Megatron-Core and DeepSeek-V3 do.
"""

from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Natural, Noun, Sequence
from trainwright.spec.errors import reject

Axis = Literal["tp", "cp", "pp", "dp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "pp", "dp")
"""As a coordinate names them."""

Order = Literal["tp-cp-pp-dp", "tp-cp-dp-pp"]
ORDERS: dict[Order, tuple[Axis, ...]] = {
    "tp-cp-pp-dp": ("tp", "cp", "pp", "dp"),
    "tp-cp-dp-pp": ("tp", "cp", "dp", "pp"),
}
"""Axes, innermost first."""


class Coordinate(NamedTuple):
    """Place of a rank on each axis."""

    tp: int
    cp: int
    pp: int
    dp: int


@lru_cache(maxsize=1 << 16)
def aligned(link_domain: int, spans: tuple[int, ...]) -> int:
    """The most devices of a scale-up domain that can hold ranks so that no group is cut unevenly by its border.

    spans: ranks from the first of a group to the first of the next, of every kind of group; the largest is the
    world. With tp 8 and dp 32 that is 64 of the 72 devices of an NVL72 rack, as schedulers place such jobs.
    """
    most = min(link_domain, max(spans))
    return next(each for each in range(most, 0, -1) if all(each % span == 0 or span % each == 0 for span in spans))


class Layout(Noun):
    """Degrees of parallelism. `vpp` is the number of model chunks that each pipeline rank holds."""

    tp: Count = 1
    cp: Count = 1
    pp: Annotated[int, Field(ge=1, le=512)] = 1
    vpp: Count = 1
    ep: Count = 1
    etp: Count = 1
    dp: Count = 1
    order: Order = "tp-cp-pp-dp"
    """Which ranks are neighbours: axes from the innermost to the outermost."""
    stage_layers: Sequence[Natural] = ()
    """Layers of each pipeline stage, in order; empty: as even as they go (`spec/stages.py`)."""

    @model_validator(mode="after")
    def _check(self) -> "Layout":
        plane = self.tp * self.cp * self.dp
        if plane % (self.ep * self.etp):
            allowed = [degree for degree in range(1, min(plane, 4096) + 1) if plane % (degree * self.etp) == 0]
            options = ", ".join(map(str, allowed[:12])) or "none with this etp"
            reject("ep", self.ep, f"times etp={self.etp} does not divide tp*cp*dp={plane}; ep may be {options}")
        if self.vpp > 1 and self.pp == 1:
            reject("vpp", self.vpp, "needs pp above 1; set layout.vpp=1")
        return self

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stages(self) -> int:
        """Pieces that the layers are cut into: chunks of all pipeline ranks."""
        return self.pp * self.vpp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def degree(self, axis: Axis) -> int:
        return getattr(self, axis)

    def stride(self, axis: Axis) -> int:
        """Distance between the ranks of two neighbours on `axis`."""
        axes = ORDERS[self.order]
        stride = 1
        for inner in axes[: axes.index(axis)]:
            stride *= self.degree(inner)
        return stride

    def per_domain(self, link_domain: int, replicas: int) -> int:
        """Devices of every scale-up domain that hold ranks (`aligned`), with so many HSDP replicas."""
        inner, experts, apart = self.tp * self.cp, self.etp * self.ep, self.stride("dp")
        shared = experts if experts <= inner else max(experts // inner, 1) * apart
        shards = apart * (self.dp // replicas)
        return aligned(
            link_domain, (self.tp, inner, self.stride("pp"), apart, self.etp, shared, shards, self.world)
        )

    def coordinate(self, rank: int) -> Coordinate:
        """Place of `rank` on each axis."""
        if not 0 <= rank < self.world:
            reject("rank", rank, f"must be from 0 to {self.world - 1}, the layout's ranks")
        return Coordinate(*(rank // self.stride(axis) % self.degree(axis) for axis in AXES))

    def rank(self, coordinate: Coordinate) -> int:
        return sum(at * self.stride(axis) for axis, at in zip(AXES, coordinate, strict=True))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The groups of an axis, each a tuple of ranks in the order of the axis; every rank is in one."""
        degree, stride = self.degree(axis), self.stride(axis)
        firsts = (rank for rank in range(self.world) if rank // stride % degree == 0)
        return tuple(tuple(first + at * stride for at in range(degree)) for first in firsts)

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ep groups, each a tuple of ranks in the order of their experts; every rank is in one."""
        return tuple(
            tuple(block[width] for block in replica) for replica in self.expert_grid() for width in range(self.etp)
        )

    def expert_grid(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Within a stage the tp * cp * dp ranks, in that order, are a grid of etp x ep x replicas, innermost
        first. Here, stage after stage, is each replica of all experts: by place in ep, the ranks of etp."""
        grid = []
        for pp in range(self.pp):
            plane = [
                self.rank(Coordinate(tp, cp, pp, dp))
                for dp in range(self.dp)
                for cp in range(self.cp)
                for tp in range(self.tp)
            ]
            for first in range(0, len(plane), self.etp * self.ep):
                replica = plane[first : first + self.etp * self.ep]
                grid.append(tuple(tuple(replica[at : at + self.etp]) for at in range(0, len(replica), self.etp)))
        return tuple(grid)
