"""Where the ranks of a group stand: how many of them share a scale-up domain, and so what their collectives ride.

The distance of neighbours on an axis is `Layout.stride`, here for every row of a table. Groups of experts lie in
the plane of tp, cp and dp (with pp between, where dp is outermost).
"""

import numpy as np

from trainwright.plan.table import ORDER, Ints, Table
from trainwright.spec.layout import ORDERS, Axis, aligned


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


def per_domain(table: Table) -> Ints:
    """Devices of every scale-up domain that hold ranks, so that all groups of an axis lie alike
    (`Layout.per_domain`)."""
    c, link_domain = table.columns, table.cluster.fabric.link_domain
    inner, experts, apart = c.tp * c.cp, c.etp * c.ep, stride(table, "dp")
    shared = np.where(experts <= inner, experts, np.maximum(experts // inner, 1) * apart)
    shards = apart * (c.dp // c.replicas)
    bounds = np.array([c.tp, inner, stride(table, "pp"), apart, c.etp, shared, shards, table.world])
    most = np.minimum(link_domain, table.world)
    fits = ((most % bounds == 0) | (bounds % most == 0)).all(axis=0)
    if not fits.all():
        odd, place = np.unique(bounds[:, ~fits], axis=1, return_inverse=True)
        found = np.array([aligned(link_domain, tuple(each.tolist())) for each in odd.T])
        most[~fits] = found[place.ravel()]
    return most


def members(table: Table, axis: Axis) -> Ints:
    """Ranks of an axis' group that share a scale-up domain."""
    return _near(per_domain(table), stride(table, axis), degree(table, axis))


def shard_members(table: Table) -> Ints:
    """The same of a group that shards states: cp, and dp less the replicas of HSDP."""
    shards = table.columns.dp // table.columns.replicas
    domain = per_domain(table)
    return members(table, "cp") * _near(domain, stride(table, "dp"), shards)


def expert_members(table: Table, inner: Ints, size: Ints) -> Ints:
    """The same of a group of `size` ranks that stand `inner` apart in the plane of tp, cp and dp."""
    domain, block = per_domain(table), table.columns.tp * table.columns.cp
    near = np.clip(block // inner, 1, size)
    far_stride = stride(table, "dp") * np.maximum(inner // block, 1)
    return _near(domain, np.minimum(inner, block), near) * _near(domain, far_stride, np.maximum(size // near, 1))


def _near(domain: Ints, apart: Ints, size: Ints) -> Ints:
    return np.clip(domain // apart, 1, size)
