"""Messages of a step, counted: by axis, operation, number format, ranks of the group and bytes."""

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from trainwright.plan.exact.standing import Standing
from trainwright.spec.counts import CollectiveCount
from trainwright.spec.layout import AXES, Coordinate

Key = tuple[str, str, str, int, int]
FORMATS = {8: "float64", 4: "float32", 2: "bfloat16"}
"""Of the trainer's tensors, by the bytes of a value."""


class Messages:
    """Counts messages on one rank."""

    def __init__(self, standing: Standing) -> None:
        self._axes = Axes(standing)
        self.found: Counter[Key] = Counter()

    def add(self, axis: str, operation: str, dtype: str, num_bytes: int, count: int = 1) -> None:
        """`count` messages over the group of an axis; none where the rank is alone in it."""
        name, ranks = self._axes.named[axis]
        if ranks > 1 and count:
            pair = 2 if operation in ("send", "receive") else ranks
            self.found[name, operation, dtype, pair, num_bytes] += count

    def counts(self) -> tuple[CollectiveCount, ...]:
        return tuple(
            CollectiveCount(axis=axis, operation=operation, dtype=dtype, ranks=ranks, bytes=size, count=count)
            for (axis, operation, dtype, ranks, size), count in sorted(self.found.items())
            if count
        )


class Named(NamedTuple):
    name: str
    ranks: int


class Axes:
    """The groups that a rank is in, as the recorder names them: of states that are shared by the same ranks, the
    first axis names the group (`train/mesh.py`)."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    @cached_property
    def named(self) -> dict[str, Named]:
        layout, recipe, at = self._standing.run.layout, self._standing.run.recipe, self._standing.at
        groups: dict[str, tuple[int, ...]] = {}
        for axis in AXES:
            groups[axis] = tuple(
                layout.rank(at._replace(**{axis: place})) for place in range(layout.degree(axis))
            )
        plane = tuple(
            layout.rank(Coordinate(at.tp, cp, at.pp, dp)) for dp in range(layout.dp) for cp in range(layout.cp)
        )
        shard = len(plane) // recipe.dp_replicate
        groups |= _cut("dp", plane, shard, self._standing.rank, "dp_cp")
        if layout.pp > 1:
            ends = at.pp in (0, layout.pp - 1)
            first, last = (layout.rank(at._replace(pp=place)) for place in (0, layout.pp - 1))
            groups["first_last"] = (first, last) if ends else (self._standing.rank,)
            if layout.pp % 2 == 0:
                twin = layout.rank(at._replace(pp=layout.pp - 1 - at.pp))
                groups["twins"] = tuple(sorted((self._standing.rank, twin)))
        groups |= self._of_experts()
        plain = {"first_last": "ends", "dp_cp": "dp x cp" if layout.cp > 1 else "dp"}
        if recipe.dp_replicate == 1:
            plain["dp_shard"] = plain["dp_cp"]
        named: dict[str, Named] = {"world": Named("world", layout.world)}
        firsts: dict[tuple[bool, str, tuple[int, ...]], str] = {}
        for axis, ranks in groups.items():
            of_states = "dp" in axis
            key = (of_states, "" if of_states else axis, ranks)
            named[axis] = Named(firsts.setdefault(key, plain.get(axis, axis)), len(ranks))
        return named

    def _of_experts(self) -> dict[str, tuple[int, ...]]:
        layout, at = self._standing.run.layout, self._standing.at
        plane = [
            layout.rank(Coordinate(tp, cp, at.pp, dp))
            for dp in range(layout.dp)
            for cp in range(layout.cp)
            for tp in range(layout.tp)
        ]
        place = plane.index(self._standing.rank)
        size = layout.etp * layout.ep
        replica, inside = divmod(place, size)
        ep, etp = divmod(inside, layout.etp)
        first = replica * size
        edp = tuple(plane[each * size + inside] for each in range(layout.expert_dp))
        shard = max(len(edp) // self._standing.run.recipe.dp_replicate, 1)
        return {
            "etp": tuple(plane[first + ep * layout.etp + each] for each in range(layout.etp)),
            "ep": tuple(plane[first + each * layout.etp + etp] for each in range(layout.ep)),
            **_cut("edp", edp, shard, self._standing.rank, "edp"),
        }


def _cut(axis: str, ranks: tuple[int, ...], shard: int, rank: int, whole: str) -> dict[str, tuple[int, ...]]:
    place = ranks.index(rank)
    first = place // shard * shard
    return {
        whole: ranks,
        f"{axis}_shard": ranks[first : first + shard],
        f"{axis}_replicate": ranks[place % shard :: shard],
    }
