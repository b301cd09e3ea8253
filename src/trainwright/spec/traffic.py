"""One step's communication as it was seen: every collective and send of every rank, in the order in which it left.

Bytes are those of the whole message on one rank: of what a gather gives, of what a reduction or exchange takes, of
the tensor that is sent.
"""

from collections.abc import Iterable
from typing import Any, Literal

from trainwright.spec.base import Natural, NonNegative, Noun, Sequence

Phase = Literal["forward", "recompute", "backward", "after backward", "update"]
"""Of a step on one rank: acts of the pipeline (with forward work that is done again inside a backward), what
follows them up to the gradient's norm, and the update."""


class Collective(Noun):
    """One collective, or one end of a send, on one rank."""

    rank: Natural
    phase: Phase
    act: str = ""
    """Of the pipeline, such as `F3` or `B0 chunk 1`; empty outside of them."""
    where: str = ""
    """Module or parameter at which it left; of FSDP's, the unit whose parameters travel."""
    operation: str
    axis: str
    """Of the layout, or `world`, or `ends` (of the pipeline); dp_shard and dp_replicate where shards are
    replicated."""
    ranks: Sequence[Natural]
    """The group in order; of a send the sender and the receiver."""
    dtype: str
    bytes: Natural
    start_s: NonNegative
    """From the step's beginning to the call."""
    end_s: NonNegative
    """To when somebody had waited for it: it may have been over before."""
    waited_s: NonNegative
    """Of that, the time that was spent waiting."""
    beside: Sequence[str] = ()
    """Where this rank multiplied matrices between the call and the wait, in order."""


class Act(Noun):
    """A stretch of a rank's step: an act of the pipeline, or what comes after them."""

    rank: Natural
    name: str
    start_s: NonNegative
    end_s: NonNegative


class Row(Noun):
    """Collectives of a rank that are alike but for the act and the time."""

    first: Collective
    count: Natural
    beside: Sequence[str]
    """Of all of them."""


class Traffic(Noun):
    """A whole step."""

    collectives: Sequence[Collective]
    """By rank, and in the order in which they left."""
    acts: Sequence[Act]

    def of(self, rank: int) -> list[Collective]:
        return [each for each in self.collectives if each.rank == rank]

    def rows(self, rank: int) -> list[Row]:
        """A rank's collectives with those that are alike on one row, in order of the first."""
        found: dict[tuple[object, ...], list[Collective]] = {}
        for each in self.of(rank):
            key = (each.phase, each.where, each.operation, each.axis, each.ranks, each.dtype, each.bytes)
            found.setdefault(key, []).append(each)
        return [
            Row(first=alike[0], count=len(alike), beside=_united(each.beside for each in alike))
            for alike in found.values()
        ]

    def totals(self, rank: int) -> dict[tuple[str, str], tuple[int, int]]:
        """By axis and operation: how many a rank has, and their bytes."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for each in self.of(rank):
            count, total = found.get((each.axis, each.operation), (0, 0))
            found[each.axis, each.operation] = count + 1, total + each.bytes
        return found

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys.

        collectives: all of them by rank and in order, each {rank, phase, act, where, operation, axis, ranks,
        dtype, bytes, start_s, end_s, waited_s, beside}; totals: for each rank {axis, operation, count, bytes}.
        """
        ranks = sorted({each.rank for each in self.acts})
        return {
            "collectives": [each.plain() for each in self.collectives],
            "totals": [
                {"rank": rank, "axis": axis, "operation": operation, "count": count, "bytes": total}
                for rank in ranks
                for (axis, operation), (count, total) in self.totals(rank).items()
            ],
        }


def _united(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for some in lists for each in some))
