"""Where the ranks of a group stand: how many of them share a scale-up domain, and so what their collectives ride.

The distance of neighbours on an axis is `Layout.stride`, here for every row of a table. Groups of experts lie in
the plane of tp, cp and dp (with pp between, where dp is outermost).
"""

import numpy as np

from trainwright.plan.table import ORDER, Ints, Table
from trainwright.spec.layout import ORDERS, Axis


def degree(table: Table, axis: Axis) -> Ints:
    return getattr(table.columns, axis)


def stride(table: Table, axis: Axis) -> Ints:
    """Distance between neighbours on an axis, for every row (`Layout.stride`)."""
    c = table.columns
    inner = c.tp * c.cp
    if axis == "tp":
        return np.ones(len(c), dtype=np.int64)
    if axis == "cp":
        return c.tp
    outermost = np.array([ORDERS[name][-1] == axis for name in ORDER])[c.order]
    other = c.pp if axis == "dp" else c.dp
    return np.where(outermost, inner * other, inner)


def members(table: Table, axis: Axis) -> Ints:
    """Ranks of an axis' group that share a scale-up domain."""
    return _near(table.cluster.fabric.link_domain, stride(table, axis), degree(table, axis))


def shard_members(table: Table) -> Ints:
    """The same of a group that shards states: cp, and dp less the replicas of HSDP."""
    shards = table.columns.dp // table.columns.replicas
    domain = table.cluster.fabric.link_domain
    return members(table, "cp") * _near(domain, stride(table, "dp"), shards)


def expert_members(table: Table, inner: Ints, size: Ints) -> Ints:
    """The same of a group of `size` ranks that stand `inner` apart in the plane of tp, cp and dp."""
    domain, block = table.cluster.fabric.link_domain, table.columns.tp * table.columns.cp
    near = np.clip(block // inner, 1, size)
    far_stride = stride(table, "dp") * np.maximum(inner // block, 1)
    return _near(domain, np.minimum(inner, block), near) * _near(domain, far_stride, np.maximum(size // near, 1))


def _near(domain: int, apart: Ints, size: Ints) -> Ints:
    return np.clip(domain // apart, 1, size)
