"""Seconds of an operation or a collective on a cluster: rooflines and latency plus bytes over bandwidth.

matmul       launch + max(FLOPs * skew / (peak * fraction(FLOPs)), bytes / achieved memory bandwidth)
attention    launch + FLOPs / (peak * fraction(sequence length)), backward 2.5 times the forward FLOPs
elementwise  launches + bytes / (memory bandwidth * fraction for the activations' number format)
collective   hops * latency + the busiest link's bytes / achieved bandwidth of the slowest tier it crosses

Ring costs as in nccl-tests: all_gather and reduce_scatter move (n-1)/n of the message over each link,
all_reduce twice that. A ring over several nodes, with p members in each, crosses between nodes on p NICs at
once (multi-rail). A collective that the cluster has measured at its group size takes the measured line.
"""

import numpy as np

from trainwright.plan.operations import AttentionCore, Elementwise, Matmul
from trainwright.plan.table import Floats, Ints, Table
from trainwright.spec.cluster import ClusterSpec, CollectiveOp, Curve, Format
from trainwright.spec.errors import reject
from trainwright.spec.layout import AXES, Axis

BACKWARD_MATMULS = 2
BACKWARD_ATTENTION = 2.5
"""Backward over forward FLOPs of flash attention: five matmuls instead of two (arXiv:2307.08691 s4.1)."""


def curve(rate: Curve, size: Floats) -> Floats:
    """`Curve.at` for arrays."""
    return np.interp(np.log(np.maximum(size, 1e-300)), np.log(rate.size), rate.fraction)


def matmul_s(table: Table, each: Matmul) -> Floats:
    """Seconds of one matmul (forward; each of backward's two takes the same), without its launch."""
    recipe, cluster = table.recipe, table.cluster
    fmt: Format = recipe.matmul_format if each.in_low_precision or recipe.precision != "fp8" else "bf16"
    rate = cluster.rates.matmul.get(fmt)
    peak = cluster.peak(fmt)
    if rate is None or peak is None:
        known = ", ".join(sorted(cluster.rates.matmul))
        reject(
            "recipe.precision",
            recipe.precision,
            f"cluster {cluster.name} has no {fmt} matmul rate; it has {known}",
        )
    compute_s = each.forward_flops * _skew(table, each) / (peak * curve(rate, each.forward_flops))
    moved = recipe.compute_bytes * (each.m * each.k + each.k * each.n + each.m * each.n)
    return np.maximum(compute_s, moved / cluster.device.memory_bytes_per_s)


def _skew(table: Table, each: Matmul) -> Floats:
    """How much slower a matmul is than the square one of the same FLOPs, for its short dimensions; 1 or more."""
    half = table.cluster.rates.matmul_half_dim
    side = np.cbrt(each.forward_flops / 2)
    return (1 + half / each.m) * (1 + half / each.k) * (1 + half / each.n) / (1 + half / side) ** 3


def attention_s(table: Table, each: AttentionCore) -> tuple[Floats, Floats]:
    """Seconds forward and backward, without launches."""
    rates, fmt = table.cluster.rates, table.recipe.activation_format
    peak = table.cluster.peak(fmt) or table.cluster.device.peak_flops_per_s.fp32
    length = table.recipe.seq_len * np.ones(1)
    forward = each.forward_flops / (peak * curve(_of_format(rates.attention_forward, fmt), length))
    backward_flops = BACKWARD_ATTENTION * each.forward_flops
    backward = backward_flops / (peak * curve(_of_format(rates.attention_backward, fmt), length))
    return forward, backward


def _of_format(rates: dict[Format, Curve], fmt: Format) -> Curve:
    formats: tuple[Format, ...] = (fmt, "bf16", "fp32")
    return next(rates[name] for name in formats if name in rates)


def elementwise_s(table: Table, each: Elementwise) -> tuple[Floats, Floats]:
    """Seconds forward and backward, without launches."""
    rates, device = table.cluster.rates, table.cluster.device
    fraction = (
        rates.memory if each.streams else rates.elementwise.get(table.recipe.activation_format, rates.memory)
    )
    bytes_per_s = device.memory_bytes_per_s * fraction
    return each.forward_bytes / bytes_per_s, each.backward_bytes / bytes_per_s


def memory_s(cluster: ClusterSpec, moved_bytes: Floats) -> Floats:
    """Seconds to stream bytes through a device's memory, read and written ones together."""
    return moved_bytes / (cluster.device.memory_bytes_per_s * cluster.rates.memory)


def collective_s(
    cluster: ClusterSpec, op: CollectiveOp, message_bytes: Floats, size: Ints, stride: Ints
) -> Floats:
    """Seconds of a collective over groups of `size` ranks that stand `stride` apart. Zero for groups of one."""
    return group_s(cluster, op, message_bytes, size, np.clip(cluster.fabric.link_domain // stride, 1, size))


def group_s(cluster: ClusterSpec, op: CollectiveOp, message_bytes: Floats, size: Ints, members: Ints) -> Floats:
    """The same over groups of `size` ranks of which `members` share a scale-up domain."""
    nodes = np.ceil(size / members)
    within = cluster.fabric.link_bytes_per_s * cluster.rates.link
    between = cluster.network_bytes_per_s * cluster.rates.network * members
    bandwidth = np.where(nodes > 1, np.minimum(within, np.maximum(between, 1e-9)), within)
    if op == "send":
        latency = np.where(nodes > 1, cluster.rates.network_latency_s, cluster.rates.link_latency_s)
        share = np.ones(1)
        # A sender has a NIC of its own.
        own = cluster.network_bytes_per_s * cluster.rates.network
        bandwidth = np.where(nodes > 1, np.minimum(within, max(own, 1e-9)), within)
    else:
        rounds = 2 if op == "all_reduce" else 1
        latency = rounds * (
            (size - nodes) * cluster.rates.link_latency_s + (nodes > 1) * nodes * cluster.rates.network_latency_s
        )
        share = rounds * (size - 1) / size
    seconds = latency + share * message_bytes / bandwidth
    for measured in cluster.rates.collectives:
        if measured.op == op:
            line = measured.latency_s + message_bytes / measured.bytes_per_s
            seconds = np.where((size == measured.group_size) & (nodes == 1), line, seconds)
    return np.where(size > 1, seconds, 0.0)


def axis_collective_s(table: Table, axis: Axis, op: CollectiveOp, message_bytes: Floats) -> Floats:
    """Seconds of a collective over the groups of a mesh axis."""
    return collective_s(table.cluster, op, message_bytes, degree(table, axis), stride(table, axis))


def degree(table: Table, axis: Axis) -> Ints:
    return getattr(table.columns, axis)


def stride(table: Table, axis: Axis) -> Ints:
    """Distance between neighbours on an axis, for every row (`Layout.stride`)."""
    product = np.ones(len(table.columns), dtype=np.int64)
    for inner in AXES[: AXES.index(axis)]:
        product = product * degree(table, inner)
    return product
