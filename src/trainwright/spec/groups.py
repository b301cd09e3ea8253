"""The groups of ranks that a layout makes: on its axes, of ranks that share states, at the ends of the pipeline,
and of experts. The trainer makes process groups of them and the planner counts what goes over them."""

from trainwright.spec.layout import AXES, Coordinate, Layout

Division = tuple[tuple[int, ...], ...]
"""All ranks, cut into groups."""


def divisions(layout: Layout, dp_replicate: int) -> dict[str, Division]:
    """By axis, in the order in which the trainer makes groups: tp, cp, pp, dp; `dp_cp` of all ranks that share
    parameters, and its parts `dp_shard` and `dp_replicate`; `first_last` and `twins` of a pipeline; and those of
    experts, `etp`, `ep`, `edp`, `edp_shard` and `edp_replicate`."""
    axes: dict[str, Division] = {axis: layout.groups(axis) for axis in AXES}
    axes["dp_cp"] = _planes(layout)
    shard = layout.dp * layout.cp // dp_replicate
    axes["dp_shard"] = tuple(
        ranks[first : first + shard] for ranks in axes["dp_cp"] for first in range(0, len(ranks), shard)
    )
    axes["dp_replicate"] = tuple(ranks[first::shard] for ranks in axes["dp_cp"] for first in range(shard))
    if layout.pp > 1:
        ends = tuple((ranks[0], ranks[-1]) for ranks in axes["pp"])
        axes["first_last"] = ends + tuple((rank,) for ranks in axes["pp"] for rank in ranks[1:-1])
        if layout.pp % 2 == 0:
            half = layout.pp // 2
            axes["twins"] = tuple((ranks[at], ranks[-1 - at]) for ranks in axes["pp"] for at in range(half))
    return axes | _expert_axes(layout, dp_replicate)


def role(axis: str, division: Division) -> tuple[str, Division]:
    """Axes of one role share a group: groups of one are alike, and so are those over which states alone are summed
    or cut."""
    if max(map(len, division)) == 1:
        return "alone", division
    return "states" if "dp" in axis else axis, division


def _expert_axes(layout: Layout, dp_replicate: int) -> dict[str, Division]:
    """`edp` is in the order of the replicas, which is that of dp, cp and tp."""
    grid = layout.expert_grid()
    replicas = layout.expert_dp
    shard = replicas // dp_replicate
    edp = tuple(
        tuple(grid[stage * replicas + at][place][width] for at in range(replicas))
        for stage in range(layout.pp)
        for place in range(layout.ep)
        for width in range(layout.etp)
    )
    return {
        "etp": tuple(ranks for replica in grid for ranks in replica),
        "ep": layout.expert_groups(),
        "edp": edp,
        "edp_shard": tuple(ranks[first : first + shard] for ranks in edp for first in range(0, replicas, shard)),
        "edp_replicate": tuple(ranks[first::shard] for ranks in edp for first in range(shard)),
    }


def _planes(layout: Layout) -> Division:
    """Ranks that differ in dp and cp alone, cp innermost."""
    return tuple(
        tuple(layout.rank(Coordinate(tp, cp, pp, dp)) for dp in range(layout.dp) for cp in range(layout.cp))
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    )
