"""Where the ranks of a group stand: how many of them share a scale-up domain, and so what their collectives ride.

The distance of neighbours on an axis, and the devices of a domain, are the table's own. Groups of experts lie in
the plane of tp, cp and dp (with pp between, where dp is outermost).
"""

import numpy as np

from trainwright.plan.table import Ints, Table
from trainwright.spec.layout import Axis


def degree(table: Table, axis: Axis) -> Ints:
    return getattr(table.columns, axis)


def members(table: Table, axis: Axis) -> Ints:
    """Ranks of an axis' group that share a scale-up domain."""
    return near(table.per_domain, table.strides[axis], degree(table, axis))


def shard_members(table: Table) -> Ints:
    """The same of a group that shards states: cp, and dp less the replicas of HSDP."""
    shards = table.columns.dp // table.columns.replicas
    domain = table.per_domain
    return members(table, "cp") * near(domain, table.strides["dp"], shards)


def expert_members(table: Table, inner: Ints, size: Ints) -> Ints:
    """The same of a group of `size` ranks that stand `inner` apart in the plane of tp, cp and dp."""
    domain, block = table.per_domain, table.columns.tp * table.columns.cp
    close = near(block, inner, size)
    far_stride = table.strides["dp"] * np.maximum(inner // block, 1)
    return near(domain, np.minimum(inner, block), close) * near(domain, far_stride, np.maximum(size // close, 1))


def near(domain: Ints, apart: Ints, size: Ints) -> Ints:
    """Of `size` ranks that stand so far apart, those in a block of `domain` ranks: one at least."""
    return np.minimum(np.maximum(domain // apart, 1), size)
