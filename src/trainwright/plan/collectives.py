"""Seconds of a collective: latency of its hops, and the busiest link's bytes over what it reaches.

Ring costs as in nccl-tests: all_gather and reduce_scatter move (n-1)/n of the message over each link,
all_reduce twice that. A ring over several nodes, with p members in each, crosses between nodes on p NICs at
once (multi-rail). Where switches add up (NVLS inside a domain, SHARP between nodes), all_reduce is faster by the
cluster's gain. An all_to_all sends each peer its own part: what goes to the own domain rides links, the rest the
rank's NIC. A collective that the cluster has measured at its group size takes the measured line.
"""

from collections.abc import Callable
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.operations import Dispatch
from trainwright.plan.table import Floats, Ints, Table
from trainwright.spec.cluster import ClusterSpec, CollectiveOp, CollectiveRate
from trainwright.spec.model import MoeMlp


class Line(NamedTuple):
    """A collective's seconds as a function of its message: latency_s + message bytes * s_per_byte, each
    (rows,)."""

    latency_s: Floats
    s_per_byte: Floats

    def take(self, rows: Ints) -> "Line":
        """The same in some rows, which may come several times."""
        return Line(self.latency_s[rows], self.s_per_byte[rows])

    def at(self, message_bytes: Floats) -> Floats:
        return self.latency_s + message_bytes * self.s_per_byte


def collective_s(
    cluster: ClusterSpec,
    op: CollectiveOp,
    message_bytes: Floats,
    size: Ints,
    members: Ints,
    at_work: Ints | None = None,
) -> Floats:
    """Seconds of a collective over groups of `size` ranks of which `members` share a scale-up domain.

    message_bytes: the whole tensor's; of an all_to_all, what one rank holds before it. at_work: ranks of the node,
    the group's alone unless said otherwise. Zero for groups of one.
    """
    return collective(cluster, op, size, members, at_work)(message_bytes)


def collective(
    cluster: ClusterSpec, op: CollectiveOp, size: Ints, members: Ints, at_work: Ints | None = None
) -> Callable[[Floats], Floats]:
    """The same as a function of the message."""
    if (size <= 1).all():
        return lambda message_bytes: np.zeros(len(size))
    if op != "all_to_all":
        return line(cluster, op, size, members, at_work).at

    def all_to_all_s(message_bytes: Floats) -> Floats:
        inside, outside = (members - 1) / size, (size - members) / size
        seconds = exchange_s(cluster, message_bytes * inside, message_bytes * outside, size, members)
        return np.where(size > 1, _measured_exchange(cluster, seconds, message_bytes, size, members, at_work), 0.0)

    return all_to_all_s


def line(cluster: ClusterSpec, op: CollectiveOp, size: Ints, members: Ints, at_work: Ints | None = None) -> Line:
    """The same for any message, of all operations but all_to_all."""
    rates = cluster.rates
    nodes = np.ceil(size / members)
    within = _links(cluster, members) * rates.link
    own_nic = max(cluster.network_bytes_per_s * rates.network, 1e-9)
    if op == "send":
        # A sender has a NIC of its own.
        pair = _links(cluster, np.minimum(members, 2)) * rates.link
        bandwidth = np.where(nodes > 1, np.minimum(pair, own_nic), pair)
        latency = np.where(nodes > 1, rates.network_latency_s, rates.link_latency_s)
        slope = 1 / bandwidth
    else:
        rounds = 2 if op == "all_reduce" else 1
        bandwidth = np.where(nodes > 1, np.minimum(within, own_nic * members), within)
        if op == "all_reduce":
            link_gain = _link_sharp_gain(rates.link_sharp_gain, size) if cluster.fabric.link_sharp else 1.0
            network_gain = rates.network_sharp_gain if cluster.fabric.network_sharp else 1.0
            bandwidth = bandwidth * np.where(nodes > 1, network_gain, link_gain)
        # A ring's size - 1 steps, of which nodes - 1 cross the network (NCCL src/graph/tuning.cc).
        latency = rounds * ((size - nodes) * rates.link_latency_s + (nodes - 1) * rates.network_latency_s)
        slope = rounds * (size - 1) / size / bandwidth
    for measured in _measured(cluster, op):
        is_measured = _is_like(measured, size, at_work) & (nodes == 1)
        latency = np.where(is_measured, measured.latency_s, latency)
        slope = np.where(is_measured, 1 / measured.bytes_per_s, slope)
    return Line(np.where(size > 1, latency, 0.0), np.where(size > 1, slope, 0.0))


def _measured(cluster: ClusterSpec, op: CollectiveOp) -> list[CollectiveRate]:
    """Of an operation, those of few ranks at work first: each holds until one of more does."""
    found = [each for each in cluster.rates.collectives if each.op == op]
    return sorted(found, key=lambda each: each.at_work)


def _is_like(measured: CollectiveRate, size: Ints, at_work: Ints | None) -> NDArray[np.bool_]:
    """Where a measured rate is of groups of that size, and of no more ranks at work than there are."""
    return (size == measured.group_size) & (measured.at_work <= (size if at_work is None else at_work))


def _link_sharp_gain(of_eight: float, size: Ints) -> Floats:
    """Gain of a scale-up switch that adds, over a ring: a device sends its message once, and in a ring
    2 (size - 1) / size times, so that few devices gain less than the eight that it was measured on."""
    return np.minimum(np.maximum(of_eight * (size - 1) / size * 8 / 7, 1.0), of_eight)


def _links(cluster: ClusterSpec, members: Ints) -> Floats:
    """Nominal bytes per second that a device has to so many members of its scale-up domain, itself among them."""
    fabric = cluster.fabric
    if not fabric.link_mesh or fabric.link_domain == 1:
        return np.full(len(members), fabric.link_bytes_per_s)
    return fabric.link_bytes_per_s * np.maximum(members - 1, 1) / (fabric.link_domain - 1)


def exchange_s(
    cluster: ClusterSpec, inside_bytes: Floats, outside_bytes: Floats, size: Ints, members: Ints
) -> Floats:
    """Seconds until a rank has sent `inside_bytes` over its links and, beside them, `outside_bytes` over its
    NIC."""
    rates = cluster.rates
    within = _links(cluster, members) * rates.link * rates.all_to_all
    nic = max(cluster.network_bytes_per_s * rates.network * rates.all_to_all, 1e-9)
    # Messages to all peers are under way together, but each has its start: assumed to lie between one start for
    # all and one for each, as the square root.
    latency = rates.link_latency_s * np.sqrt(members) + (size > members) * rates.network_latency_s * np.sqrt(
        np.maximum(size / members, 1)
    )
    return latency + np.maximum(inside_bytes / within, outside_bytes / nic)


def dispatch_s(
    table: Table, each: Dispatch, bytes_per_copy: float, mlp: MoeMlp, size: Ints, members: Ints
) -> Floats:
    """Seconds of an all-to-all of tokens over `size` ranks with experts, of which `members` share a domain.

    By `all_to_all` every copy goes straight to its expert's rank. By `hierarchical` dispatch a token crosses to
    each domain once, whatever the number of its experts there, and is copied inside it (DeepSeek-V3,
    arXiv:2412.19437 s3.2.2); node-limited routing bounds how many domains that are.
    """
    nodes = np.maximum(size / members, 1.0)
    copies = np.full(len(size), float(each.copies))
    crossing = copies * (1 - 1 / nodes)
    if table.recipe.dispatch == "hierarchical":
        crossing = domains_of_a_token(nodes, each.copies, mlp) * (1 - 1 / nodes)
    inside = copies * (members - 1) / members * (1.0 if table.recipe.dispatch == "hierarchical" else 1 / nodes)
    per_copy = each.tokens * bytes_per_copy
    seconds = exchange_s(table.cluster, inside * per_copy, crossing * per_copy, size, members)
    seconds = _measured_exchange(table.cluster, seconds, copies * per_copy, size, members, table.at_work)
    return np.where(size > 1, seconds, 0.0)


def _measured_exchange(
    cluster: ClusterSpec,
    seconds: Floats,
    message_bytes: Floats,
    size: Ints,
    members: Ints,
    at_work: Ints | None,
) -> Floats:
    """`seconds` of an all_to_all, or the measured line where the cluster has one for the group."""
    for measured in _measured(cluster, "all_to_all"):
        own = measured.latency_s + message_bytes / measured.bytes_per_s
        seconds = np.where(_is_like(measured, size, at_work) & (members >= size), own, seconds)
    return seconds


def domains_of_a_token(nodes: Floats, copies: float, mlp: MoeMlp) -> Floats:
    """Domains, of `nodes`, that a token's experts stand in, on average, for `copies` experts drawn at random.

    A router with groups picks `top_groups` of them first and draws its experts there: a domain with j of the
    picked groups has one of the experts with probability 1 - (1 - j/top_groups)^copies, and j is hypergeometric.
    """
    return np.array([_domains(float(each), copies, mlp.num_groups, mlp.top_groups) for each in nodes])


@lru_cache(maxsize=4096)
def _domains(nodes: float, copies: float, num_groups: int, top_groups: int) -> float:
    here = num_groups / nodes
    if num_groups == 1 or here < 1 or here != int(here):
        # A group spans domains: those of the picked groups are all alike.
        among = nodes if num_groups == 1 else max(nodes * top_groups / num_groups, 1.0)
        return among * (1 - (1 - 1 / among) ** copies)
    own = int(here)
    return nodes * sum(
        comb(own, j)
        * comb(num_groups - own, top_groups - j)
        / comb(num_groups, top_groups)
        * (1 - (1 - j / top_groups) ** copies)
        for j in range(1, min(own, top_groups) + 1)
    )
