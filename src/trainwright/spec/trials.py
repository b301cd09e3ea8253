"""One run trained at several values of its fields, one field toggled at a time: predicted and seen side by
side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainwright.spec import base
from trainwright.spec.answers import ComparedQuantity, Comparison
from trainwright.spec.base import Noun
from trainwright.spec.errors import InvalidSpec


class Trial(Noun):
    """Values by field, and what came of training with them."""

    values: dict[str, Any]
    comparison: Comparison

    @property
    def tokens_per_s(self) -> ComparedQuantity:
        """Of all ranks."""
        return next(each for each in self.comparison.quantities if each.name == "tokens_per_s")

    @property
    def peak_bytes(self) -> ComparedQuantity:
        """Of the rank where most were seen."""
        peaks = [each for rank in self.comparison.ranks for each in rank.quantities if each.name == "peak_bytes"]
        return max(peaks, key=lambda peak: peak.seen)


class Untrained(NamedTuple):
    """Values that can't be trained, and why."""

    values: dict[str, Any]
    reason: str


class Trials(Noun):
    """All of them, in order."""

    run_name: str
    steps: int
    trials: base.Sequence[Trial]
    untrained: tuple[Untrained, ...]

    def require_any(self) -> "Trials":
        """Raise `InvalidSpec` where nothing could be trained; return self."""
        if not self.trials:
            first = self.untrained[0]
            raise InvalidSpec(f"none of the {len(self.untrained)} can be trained; the first: {first.reason}")
        return self

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys.

        run, steps; trials: each {values (by field), tokens_per_s, peak_bytes}, both {predicted, seen,
        relative_residual}; untrained: each {values, reason}.
        """
        return {
            "run": self.run_name,
            "steps": self.steps,
            "trials": [
                {
                    "values": each.values,
                    "tokens_per_s": _quantity(each.tokens_per_s),
                    "peak_bytes": _quantity(each.peak_bytes),
                }
                for each in self.trials
            ],
            "untrained": [each._asdict() for each in self.untrained],
        }


def one_at_a_time(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Each value of each field, the others as the run has them."""
    for field, each in values.items():
        for value in each:
            yield {field: value}


def _quantity(quantity: ComparedQuantity) -> dict[str, Any]:
    return {
        "predicted": quantity.predicted,
        "seen": quantity.seen,
        "relative_residual": quantity.relative_residual,
    }
