"""Where a layout's groups lie on a cluster: the node of each rank, the groups of each axis, what travels in them
and the links that it rides.

Two ranks reach one another over the scale-up link where they are in one domain of neighbouring ranks, else over
the network. A domain holds `fabric.link_domain` ranks; where it is larger than a node, as a rack is, so many of
whole nodes that no group is cut unevenly (`Layout.per_domain`). A group of which some members share a domain and
some do not rides both. Experts have groups of their own, within the tp * cp * dp ranks of each stage
(`spec/layout.py`).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from trainwright.spec.errors import reject
from trainwright.spec.layout import Coordinate, Layout
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages

GroupAxis = Literal["tp", "cp", "pp", "dp", "dp_shard", "dp_replicate", "etp", "ep", "expert_dp"]
"""The axes of a layout; the two that gradients travel over where that is not plain dp; those of experts."""

Ride = Literal["alone", "link", "network", "both"]
"""alone: a group of one, whose communication is none."""

Groups = tuple[tuple[int, ...], ...]

LARGEST_WORLD = 1_000_000
"""Ranks; their groups are listed one by one."""


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one axis, each a tuple of ranks."""

    axis: GroupAxis
    groups: Groups
    rides: Mapping[Ride, int]
    """How many groups ride what."""
    carries: str
    """What travels in a group, and how often."""

    @property
    def degree(self) -> int:
        """Ranks in a group."""
        return len(self.groups[0])


@dataclass(frozen=True)
class Wiring:
    """A run's layout on its cluster."""

    run: Run
    axes: tuple[AxisGroups, ...]
    stages: tuple[tuple[int, ...], ...]
    """The stage that each chunk of each pipeline rank is, `[rank][chunk]`."""
    layers: tuple[range, ...]
    """Of each stage."""

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill, the last one perhaps in part."""
        return self.node_of(self.run.layout.world - 1) + 1

    @cached_property
    def domain_ranks(self) -> int:
        """Neighbouring ranks that share a scale-up domain."""
        return domain_ranks(self.run)

    def node_of(self, rank: int) -> int:
        return rank // self.run.cluster.node.devices

    def domain_of(self, rank: int) -> int:
        """Number of the scale-up domain."""
        return rank // self.domain_ranks

    def hop(self, one: int, other: int) -> Ride:
        """What one message between two ranks rides."""
        return ride((one, other), self.domain_ranks)

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys.

        world, order ("tp-cp-pp-dp": axes from the innermost), layout; nodes and devices_per_node; link and network
        by name, link_domain in ranks; stages: of each pipeline rank, a list of its chunks' {stage, first_layer,
        layers}; axes: by name {degree, groups (lists of ranks), rides (groups by alone, link, network, both),
        carries}; ranks: a list, in order, of {rank, node, link_domain, tp, cp, pp, dp}.
        """
        run = self.run
        return {
            "world": run.layout.world,
            "order": run.layout.order,
            "layout": run.layout.plain(),
            "nodes": self.nodes,
            "devices_per_node": run.cluster.node.devices,
            "link": run.cluster.fabric.link,
            "link_domain": self.domain_ranks,
            "network": run.cluster.fabric.network,
            "stages": [
                [
                    {"stage": stage, "first_layer": self.layers[stage].start, "layers": len(self.layers[stage])}
                    for stage in chunks
                ]
                for chunks in self.stages
            ],
            "axes": {
                each.axis: {
                    "degree": each.degree,
                    "groups": [list(group) for group in each.groups],
                    "rides": dict(each.rides),
                    "carries": each.carries,
                }
                for each in self.axes
            },
            "ranks": [
                {
                    "rank": rank,
                    "node": self.node_of(rank),
                    "link_domain": self.domain_of(rank),
                    **run.layout.coordinate(rank)._asdict(),
                }
                for rank in range(run.layout.world)
            ],
        }


def wiring(run: Run) -> Wiring:
    """Where the groups of a run lie. Raises `InvalidSpec` beyond `LARGEST_WORLD` ranks."""
    layout, recipe = run.layout, run.recipe
    if layout.world > LARGEST_WORLD:
        reject("layout", f"{layout.world} ranks", f"at most {LARGEST_WORLD} are drawn; lower layout.dp")
    groups: dict[GroupAxis, Groups] = {
        "tp": layout.groups("tp"),
        "cp": layout.groups("cp"),
        "pp": layout.groups("pp"),
        "dp": layout.groups("dp"),
    }
    if layout.dp > 1 and (layout.cp > 1 or recipe.dp_replicate > 1):
        groups |= _gradient_groups(layout, recipe.dp_replicate)
    if run.model.is_moe:
        groups |= _expert_groups(layout)
    domain = domain_ranks(run)
    axes = tuple(
        AxisGroups(axis, of_axis, Counter(ride(group, domain) for group in of_axis), _carries(run, axis, groups))
        for axis, of_axis in groups.items()
    )
    schedule = SCHEDULES[recipe.schedule]
    num_stages = schedule.num_stages(layout.pp, layout.vpp)
    layers = layers_of_stages(run.model.num_layers, num_stages, layout.stage_layers)
    return Wiring(run, axes, schedule.stages(layout.pp, layout.vpp), layers)


def domain_ranks(run: Run) -> int:
    """Neighbouring ranks that share a scale-up domain."""
    link_domain, node = run.cluster.fabric.link_domain, run.cluster.node.devices
    placed = run.layout.per_domain(link_domain, run.recipe.dp_replicate)
    return placed if link_domain > node and placed >= node and placed % node == 0 else link_domain


def ride(ranks: tuple[int, ...], link_domain: int) -> Ride:
    """What the communication of a group rides."""
    if len(ranks) == 1:
        return "alone"
    domains = len({rank // link_domain for rank in ranks})
    if domains == 1:
        return "link"
    return "network" if domains == len(ranks) else "both"


def _gradient_groups(layout: Layout, replicas: int) -> dict[GroupAxis, Groups]:
    """Gradients are reduced over cp too, and with HSDP within a replica first, then across them."""
    size = layout.dp // replicas
    groups: dict[GroupAxis, Groups] = {
        "dp_shard": _grouped(layout, lambda at: (at.tp, at.pp, at.dp // size)),
    }
    if replicas > 1:
        groups["dp_replicate"] = _grouped(layout, lambda at: (at.tp, at.cp, at.pp, at.dp % size))
    return groups


def _expert_groups(layout: Layout) -> dict[GroupAxis, Groups]:
    def number(at: Coordinate) -> int:
        """Place in the plane of a stage, whose innermost axis is etp, then ep, then the replicas."""
        return at.tp + layout.tp * (at.cp + layout.cp * at.dp)

    shared = layout.etp * layout.ep
    groups: dict[GroupAxis, Groups] = {}
    if layout.etp > 1:
        groups["etp"] = _grouped(layout, lambda at: (at.pp, number(at) // layout.etp))
    groups["ep"] = layout.expert_groups()
    groups["expert_dp"] = _grouped(layout, lambda at: (at.pp, number(at) % shared))
    return groups


def _grouped(layout: Layout, key: Callable[[Coordinate], Hashable]) -> Groups:
    """Ranks whose coordinates have the same key."""
    found: dict[Hashable, list[int]] = {}
    for rank in range(layout.world):
        found.setdefault(key(layout.coordinate(rank)), []).append(rank)
    return tuple(map(tuple, found.values()))


def _carries(run: Run, axis: GroupAxis, axes: Iterable[GroupAxis]) -> str:
    recipe = run.recipe
    if axis == "dp" and "dp_shard" in axes:
        return "its gradients travel over dp shard" + (" and dp replicate" if "dp_replicate" in axes else "")
    reduced = f"{'of all but experts, ' * run.model.is_moe}{_reduced(recipe)}"
    words: dict[GroupAxis, str] = {
        "tp": TP_CARRIES[recipe.sequence_parallel] + IN_PARTS * recipe.overlap.tp,
        "cp": CP_CARRIES[recipe.cp_method],
        "pp": _pipeline_carries(run),
        "dp": reduced,
        "dp_shard": reduced,
        "dp_replicate": "each step: all-reduce of the gradients' shards",
        "etp": ETP_CARRIES,
        "ep": DISPATCH_CARRIES[recipe.dispatch],
        "expert_dp": f"of experts, {_reduced(recipe)}",
    }
    return words[axis]


def _pipeline_carries(run: Run) -> str:
    text = "each microbatch: send of one activation to the next stage, and of its gradient back"
    if run.layout.vpp > 1:
        text += f", once for each of {run.layout.vpp} chunks"
    if run.model.tied_embeddings:
        text += "; each step: all-reduce of the tied embedding's gradient between first and last stage"
    return text


def _reduced(recipe: Recipe) -> str:
    """How gradients and parameters travel over data-parallel ranks."""
    if recipe.zero == 3:
        again = "forward and backward" if recipe.reshard_after_forward else "forward"
        return f"each microbatch: all-gather of parameters {again}, reduce-scatter of gradients"
    return {
        0: "each step: all-reduce of gradients",
        1: "each step: reduce-scatter of gradients, all-gather of parameters",
        2: "each microbatch: reduce-scatter of gradients; each step: all-gather of parameters",
    }[recipe.zero]


LAYER, MOE_LAYER = "each layer, each microbatch", "each MoE layer, each microbatch"

TP_CARRIES = {
    True: f"{LAYER}: all-gather into attention and MLP, reduce-scatter out of them, both again in backward",
    False: f"{LAYER}: all-reduce after attention and MLP, and of their inputs' gradients in backward",
}
IN_PARTS = "; each in parts, sent round the ring beside the matmuls"
CP_CARRIES = {
    "all_gather": f"{LAYER}: all-gather of keys and values, again in backward; reduce-scatter of their gradients",
    "ring": f"{LAYER}: sends of keys and values round the ring, in backward with their gradients",
    "all_to_all": f"{LAYER}: all-to-all before and after attention swaps heads for sequence, also in backward",
}
ETP_CARRIES = f"{MOE_LAYER}: all-gather of tokens into the cut experts, reduce-scatter out, also in backward"
DISPATCH_CARRIES = {
    "all_to_all": f"{MOE_LAYER}: all-to-all of tokens to their experts and back, also in backward",
    "hierarchical": f"{MOE_LAYER}: tokens go to their experts, once to each node, and back; also in backward",
}
