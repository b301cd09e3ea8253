"""Messages of a step, counted: by axis, operation, number format, ranks of the group and bytes."""

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from trainwright.plan.exact.standing import Standing
from trainwright.spec.counts import CollectiveCount
from trainwright.spec.groups import Division, divisions, role

Key = tuple[str, str, str, int, int]
FORMATS = {8: "float64", 4: "float32", 2: "bfloat16"}
"""Of the trainer's tensors, by the bytes of a value."""


SIZES = {name: size for size, name in FORMATS.items()}


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
        layout, recipe, rank = self._standing.run.layout, self._standing.run.recipe, self._standing.rank
        plain = {"first_last": "ends", "dp_cp": "dp x cp" if layout.cp > 1 else "dp"}
        if recipe.dp_replicate == 1:
            plain["dp_shard"] = plain["dp_cp"]
        named: dict[str, Named] = {"world": Named("world", layout.world)}
        firsts: dict[tuple[str, Division], str] = {}
        for axis, division in divisions(layout, recipe.dp_replicate).items():
            mine = next(ranks for ranks in division if rank in ranks)
            named[axis] = Named(firsts.setdefault(role(axis, division), plain.get(axis, axis)), len(mine))
        return named
