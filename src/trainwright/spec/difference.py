"""Two runs and their predictions side by side: which fields differ, and what the difference costs, by cause.

Seconds and bytes are rounded to a power of two, a 2^-50th of the larger total or less. Sums and differences of
such numbers are exact, in any order: what the causes differ by sums to what the totals differ by, to the bit.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainwright.spec.answers import Prediction
from trainwright.spec.base import Noun, Sequence
from trainwright.spec.model import FlopConvention
from trainwright.spec.run import Run

SIGNIFICANT_BITS = 50
ALIKE = 5e-4
"""Steps that are nearer than this fraction are called alike."""
WHOLE_NOUNS = ("model", "cluster")
"""Summed up by their names where these differ."""
UNCOMPARED = ("cluster.provenance",)
"""Where numbers come from: nothing follows from it."""


class FieldDifference(Noun):
    """A field that the two runs choose otherwise; None where one has no such field."""

    field: str
    a: Any
    b: Any


class ValueDifference(Noun):
    """A number of each, in the unit that its name ends in."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def relative_difference(self) -> float | None:
        """Difference over a; None where a is zero."""
        return self.difference / self.a if self.a else None


class Difference(Noun):
    """Run B against run A."""

    a_name: str
    b_name: str
    fields: Sequence[FieldDifference]
    quantities: Sequence[ValueDifference]
    """step_s, gpus, tokens_per_step, tokens_per_s_per_gpu, flops_per_s_per_gpu, mfu, peak_flops_per_s (of which
    mfu is a fraction), peak_bytes, capacity_bytes; and gpu_hours, days, cost_usd where both have them."""
    convention: FlopConvention
    """What flops_per_s_per_gpu and mfu count."""
    seconds: Sequence[ValueDifference]
    """A step's seconds by cause, largest difference first; they sum to step_s."""
    bytes: Sequence[ValueDifference]
    """Bytes of the fullest rank at its peak by cause, in the same order; they sum to peak_bytes."""

    def quantity(self, name: str) -> ValueDifference:
        return next(each for each in self.quantities if each.name == name)

    def ratio(self, name: str) -> float:
        """A quantity of B over that of A."""
        quantity = self.quantity(name)
        return quantity.b / quantity.a

    @property
    def is_alike(self) -> bool:
        """Whether the steps take the same time, for people."""
        return abs(self.ratio("step_s") - 1) < ALIKE

    def causes(self, along: bool) -> tuple[ValueDifference, ...]:
        """Causes that change the step in the direction in which it changes, or (along=False) the other one;
        largest first."""
        total_s = self.quantity("step_s").difference
        return tuple(each for each in self.seconds if each.difference * total_s * (1 if along else -1) > 0)

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys.

        a, b: names of the runs; mfu_convention: what FLOPs are counted; fields: by dotted name {a, b}, null where
        one has no such field; quantities, seconds_by_cause and bytes_by_cause: by name {a, b, difference (b - a),
        relative_difference (over a, null where a is 0)}. The causes' differences sum to those of step_s and
        peak_bytes exactly.
        """

        def rows(values: tuple[ValueDifference, ...]) -> dict[str, dict[str, float | None]]:
            return {
                each.name: {
                    "a": each.a,
                    "b": each.b,
                    "difference": each.difference,
                    "relative_difference": each.relative_difference,
                }
                for each in values
            }

        return {
            "a": self.a_name,
            "b": self.b_name,
            "mfu_convention": self.convention,
            "fields": {each.field: {"a": each.a, "b": each.b} for each in self.fields},
            "quantities": rows(self.quantities),
            "seconds_by_cause": rows(self.seconds),
            "bytes_by_cause": rows(self.bytes),
        }


def difference(a: Run, b: Run, a_prediction: Prediction, b_prediction: Prediction) -> Difference:
    """What is different in run B, and what that does."""
    seconds = _by_cause(a_prediction.ledger.seconds, b_prediction.ledger.seconds)
    num_bytes = _by_cause(a_prediction.ledger.bytes, b_prediction.ledger.bytes)
    return Difference(
        a_name=a.name,
        b_name=b.name,
        fields=tuple(_fields(a.plain(), b.plain())),
        quantities=(
            _total("step_s", seconds),
            *_quantities(a_prediction, b_prediction),
            _total("peak_bytes", num_bytes),
            ValueDifference(name="capacity_bytes", a=a_prediction.capacity_bytes, b=b_prediction.capacity_bytes),
            *_budget(a_prediction, b_prediction),
        ),
        convention=a_prediction.convention,
        seconds=seconds,
        bytes=num_bytes,
    )


def _quantities(a: Prediction, b: Prediction) -> Iterator[ValueDifference]:
    yield ValueDifference(name="gpus", a=float(a.layout.world), b=float(b.layout.world))
    a_tokens, b_tokens = a.recipe.tokens_per_step, b.recipe.tokens_per_step
    yield ValueDifference(name="tokens_per_step", a=float(a_tokens), b=float(b_tokens))
    yield ValueDifference(name="tokens_per_s_per_gpu", a=a.tokens_per_s_per_device, b=b.tokens_per_s_per_device)
    yield ValueDifference(name="flops_per_s_per_gpu", a=a.flops_per_s_per_device, b=b.flops_per_s_per_device)
    yield ValueDifference(name="mfu", a=a.mfu, b=b.mfu)
    yield ValueDifference(name="peak_flops_per_s", a=a.peak_flops_per_s, b=b.peak_flops_per_s)


def _budget(a: Prediction, b: Prediction) -> Iterator[ValueDifference]:
    for name in ("gpu_hours", "days", "cost_usd"):
        a_value, b_value = getattr(a, name), getattr(b, name)
        if a_value is not None and b_value is not None:
            yield ValueDifference(name=name, a=a_value, b=b_value)


def _by_cause(a: Mapping[Any, float], b: Mapping[Any, float]) -> tuple[ValueDifference, ...]:
    """Causes of either, rounded so that sums are exact, largest difference first."""
    largest = max(math.fsum(map(abs, values.values())) for values in (a, b))
    quantum = math.ldexp(1.0, math.frexp(largest)[1] - SIGNIFICANT_BITS)

    def rounded(value: float) -> float:
        return round(value / quantum) * quantum

    rows = [
        ValueDifference(name=cause, a=rounded(a.get(cause, 0.0)), b=rounded(b.get(cause, 0.0)))
        for cause in {**a, **b}
    ]
    return tuple(sorted(rows, key=lambda each: -abs(each.difference)))


def _total(name: str, causes: tuple[ValueDifference, ...]) -> ValueDifference:
    return ValueDifference(name=name, a=sum(each.a for each in causes), b=sum(each.b for each in causes))


def _fields(a: Any, b: Any, path: str = "") -> Iterator[FieldDifference]:
    """Fields of nested tables that differ, by dotted name."""
    if a == b or path in UNCOMPARED:
        return
    if None in (a, b) and isinstance(a or b, dict):
        a, b = a or {}, b or {}  # a table that one of them has
    if not (isinstance(a, dict) and isinstance(b, dict)):
        yield FieldDifference(field=path, a=a, b=b)
    elif path in WHOLE_NOUNS and a["name"] != b["name"]:
        yield FieldDifference(field=path, a=a["name"], b=b["name"])
    else:
        for name in {**a, **b}:
            yield from _fields(a.get(name), b.get(name), f"{path}.{name}" if path else name)
