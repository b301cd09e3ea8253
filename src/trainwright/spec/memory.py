"""Bytes of each pipeline rank over the time of a step, by cause.

A rank's time is cut where what it holds changes: column k of `bytes` is held from borders_s[k] to borders_s[k +
1].
"""

from itertools import pairwise
from typing import Any

from trainwright.spec.base import Natural, Noun, Sequence
from trainwright.spec.ledger import BytesCause, Ledger


class RankMemory(Noun):
    """What one rank holds from the step's beginning to its end."""

    pp_rank: Natural
    borders_s: Sequence[float]
    """One more than there are columns."""
    doing: Sequence[str]
    """What the rank does in each column."""
    bytes: dict[BytesCause, Sequence[float]]

    @property
    def total_bytes(self) -> tuple[float, ...]:
        """Of each column, over causes."""
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))

    @property
    def peak(self) -> int:
        """The first of the columns with most bytes."""
        totals = self.total_bytes
        return max(range(len(totals)), key=lambda at: totals[at])

    @property
    def peak_bytes(self) -> float:
        return self.total_bytes[self.peak]

    @property
    def peak_ledger(self) -> Ledger:
        """Bytes by cause at the peak."""
        return self.ledger(self.peak)

    def ledger(self, column: int) -> Ledger:
        return Ledger(bytes={cause: values[column] for cause, values in self.bytes.items()})

    def fullest(self, parts: int) -> tuple[int, ...]:
        """The step cut into equal parts: the column with most bytes in each."""
        totals, whole_s, found = self.total_bytes, self.borders_s[-1], list[int]()
        first = 0
        for part in range(parts):
            start_s, end_s = whole_s * part / parts, whole_s * (part + 1) / parts
            while first + 1 < len(totals) and self.borders_s[first + 1] <= start_s:
                first += 1
            last = first
            while last + 1 < len(totals) and self.borders_s[last + 1] < end_s:
                last += 1
            found.append(max(range(first, last + 1), key=lambda at: totals[at]))
        return tuple(found)

    def report(self) -> dict[str, Any]:
        """The JSON form of its peak, with stable keys."""
        return {
            "pp_rank": self.pp_rank,
            "peak_bytes": self.peak_bytes,
            "peak_s": self.borders_s[self.peak],
            "peak_in": self.doing[self.peak],
            "bytes_by_cause": dict(self.peak_ledger.bytes),
        }

    def columns(self) -> list[dict[str, Any]]:
        """The JSON form of its course, with stable keys."""
        return [
            {"start_s": start_s, "end_s": end_s, "doing": doing, "bytes_by_cause": dict(self.ledger(at).bytes)}
            for at, ((start_s, end_s), doing) in enumerate(zip(pairwise(self.borders_s), self.doing, strict=True))
        ]


class StepMemory(Noun):
    """All ranks of a pipeline over one step."""

    run_name: str
    step_s: float
    num_microbatches: Natural
    """Of the step that is shown."""
    of_microbatches: Natural
    """Of the run's step; more than num_microbatches where a shorter one is shown."""
    capacity_bytes: float
    """Memory of a device."""
    ranks: Sequence[RankMemory]

    @property
    def fullest(self) -> RankMemory:
        """The first of the ranks with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.peak_bytes <= self.capacity_bytes

    def report(self, rank: int) -> dict[str, Any]:
        """The JSON form, with stable keys; the course over time of one rank."""
        return {
            "run": self.run_name,
            "step_s": self.step_s,
            "microbatches": self.num_microbatches,
            "of_microbatches": self.of_microbatches,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "ranks": [each.report() for each in self.ranks],
            "rank": rank,
            "over_time": self.ranks[rank].columns(),
        }
