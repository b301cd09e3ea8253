"""One run at many values of some of its fields: what to predict, and the predictions one beside the other.

The points are the product of the values, the first field varying slowest. `gpus` is a field beside those of the
run: the layout keeps all its degrees but dp, which takes as many replicas as there are devices for, at the same
global batch. A point that the run's checks refuse is kept, with the reason.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

from trainwright.spec import base
from trainwright.spec.answers import Prediction
from trainwright.spec.base import Noun
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.ledger import SecondsCause
from trainwright.spec.run import Run

MOST_POINTS = 10_000
MOST_DIGITS = 9
"""Of a number of devices."""
GPUS = "gpus"
FIXED_DEGREES = ("tp", "cp", "pp")
"""What --gpus leaves as it is."""


class Growth(NamedTuple):
    """A cause whose part of the step rose from one point to the next."""

    cause: SecondsCause
    before: float
    after: float
    """Fractions of the step."""


class SweepPoint(Noun):
    """The values of one point, by field, and what they lead to."""

    values: dict[str, Any]
    prediction: Prediction

    def share(self, cause: SecondsCause) -> float:
        """Fraction of the step."""
        return self.prediction.ledger.seconds.get(cause, 0.0) / self.prediction.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.prediction.tokens_per_s_per_device * self.prediction.layout.world


class IllegalPoint(NamedTuple):
    """Values that are no legal run, and why."""

    values: dict[str, Any]
    reason: str


class Sweep(Noun):
    """All points, in order."""

    run_name: str
    fields: base.Sequence[str]
    points: base.Sequence[SweepPoint]
    illegal: tuple[IllegalPoint, ...]

    @property
    def is_over_gpus(self) -> bool:
        return self.fields[0] == GPUS

    @property
    def fitting(self) -> list[SweepPoint]:
        return [each for each in self.points if each.prediction.fits]

    @property
    def fastest(self) -> SweepPoint | None:
        """Most tokens per second and device, of those that fit."""
        return max(self.fitting, key=lambda each: each.prediction.tokens_per_s_per_device, default=None)

    def lines(self) -> dict[tuple[str, ...], list[int]]:
        """Places of points along the first field, by the values of the others; rising where it has numbers."""
        found: dict[tuple[str, ...], list[int]] = {}
        for place, each in enumerate(self.points):
            found.setdefault(tuple(str(each.values[field]) for field in self.fields[1:]), []).append(place)
        if self.is_numeric:
            for line in found.values():
                line.sort(key=lambda place: self.points[place].values[self.fields[0]])
        return found

    @property
    def is_numeric(self) -> bool:
        """Whether the first field's values are numbers."""
        values = [each.values[self.fields[0]] for each in self.points]
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)

    def growths(self) -> dict[int, Growth]:
        """By the place of a point that has another before it on its line: the cause whose part of the step grew
        most. Parts and not seconds, as at a fixed global batch most causes take fewer seconds on more devices."""
        found = {}
        for line in self.lines().values():
            for before, after in pairwise(line):
                growth = _growth(self.points[before], self.points[after])
                if growth.after > growth.before:
                    found[after] = growth
        return found

    def require_legal(self) -> "Sweep":
        """Raise `InvalidSpec` where no point is legal; return self."""
        if not self.points:
            first = self.illegal[0]
            raise InvalidSpec(f"none of the {len(self.illegal)} points is legal; the first: {first.reason}")
        return self

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys.

        run: its name; fields: those that were swept, `gpus` first where it was; mfu_convention: what mfu counts;
        points: the legal ones in order, each {values (by field), gpus, fits, step_s, tokens_per_s,
        tokens_per_s_per_gpu, tflops_per_gpu, mfu, peak_bytes, seconds_by_cause; with a budget gpu_hours, days, and
        cost_usd where there is a price; in a sweep over gpus grows_most: null, or {cause, share_before, share} of
        the cause whose part of the step grew most since the point before}; illegal: {values, reason} of others.
        """
        growths = self.growths()
        points = []
        for place, each in enumerate(self.points):
            values = _point_report(each)
            if self.is_over_gpus:
                growth = growths.get(place)
                values["grows_most"] = growth and {
                    "cause": growth.cause,
                    "share_before": growth.before,
                    "share": growth.after,
                }
            points.append(values)
        return {
            "run": self.run_name,
            "fields": list(self.fields),
            "mfu_convention": self.points[0].prediction.convention,
            "points": points,
            "illegal": [each._asdict() for each in self.illegal],
        }


def _growth(before: SweepPoint, after: SweepPoint) -> Growth:
    causes = after.prediction.ledger.seconds
    cause = max(causes, key=lambda cause: after.share(cause) - before.share(cause))
    return Growth(cause, before.share(cause), after.share(cause))


def _point_report(point: SweepPoint) -> dict[str, Any]:
    report = point.prediction.report()
    kept = ("fits", "step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "peak_bytes", "seconds_by_cause")
    budget = [name for name in ("gpu_hours", "days", "cost_usd") if name in report]
    return {
        "values": point.values,
        "gpus": point.prediction.layout.world,
        "tokens_per_s": point.tokens_per_s,
        **{name: report[name] for name in (*kept, *budget)},
    }


def axes(over: Iterable[str], gpus: str | None) -> dict[str, list[Any]]:
    """The fields and their values that the options say: `["recipe.micro_batch=1,2"], "512,1024"`.

    Raises `InvalidSpec` for what can't be read, and where the points are more than `MOST_POINTS`.
    """
    found: dict[str, list[Any]] = {}
    if gpus is not None:
        found[GPUS] = _without_repeats("--gpus", gpus, _device_counts(gpus))
    for text in over:
        field, values = _field_and_values(text)
        if field in found:
            reject("--over", text, "names this field a second time; give all its values at once")
        if field == "layout.dp" and gpus is not None:
            reject("--over", text, "is what --gpus chooses; leave one of them")
        found[field] = values
    if not found:
        raise InvalidSpec("--over: missing; name a field and its values, such as --over recipe.micro_batch=1,2,4")
    points = math.prod(map(len, found.values()))
    if points > MOST_POINTS:
        raise InvalidSpec(f"--over: {points} points; at most {MOST_POINTS} are predicted, give fewer values")
    return found


def _device_counts(text: str) -> list[int]:
    counts = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and len(each) <= MOST_DIGITS and int(each) for each in counts):
        reject("--gpus", text, "must be whole numbers above zero, such as 512,1024,2048")
    return [int(each) for each in counts]


def _field_and_values(text: str) -> tuple[str, list[Any]]:
    field, equals, listed = (part.strip() for part in text.partition("="))
    if not equals or not field or not listed:
        reject("--over", text, "must be field=values, such as recipe.micro_batch=1,2,4")
    try:
        values = tomllib.loads(f"values = [{listed}]")["values"]
    except (ValueError, RecursionError):
        values = [_value(each.strip()) for each in listed.split(",")]
    if "" in values:
        reject("--over", text, "has an empty value; separate the values by single commas")
    return field, _without_repeats("--over", text, values)


def _value(text: str) -> Any:
    """Read as TOML, or a string where it is none, as `--set` does."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _without_repeats(option: str, text: str, values: list[Any]) -> list[Any]:
    for at, value in enumerate(values):
        if value in values[:at]:
            reject(option, text, f"has {value} twice")
    return values


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """One choice of a value for each field, after another."""
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def varied(run: Run, values: Mapping[str, Any]) -> Run:
    """The run at one point, cross-examined. Raises `InvalidSpec` where that is no legal run."""
    choices = [(field, value) for field, value in values.items() if field != GPUS]
    if GPUS in values:
        choices.append(("layout.dp", _replicas(run, values)))
    return run.with_values(choices).check()


def _replicas(run: Run, values: Mapping[str, Any]) -> int:
    """Data-parallel replicas that the devices hold."""
    degrees = [values.get(f"layout.{axis}", getattr(run.layout, axis)) for axis in FIXED_DEGREES]
    if not all(isinstance(each, int) and each > 0 for each in degrees):
        return run.layout.dp  # a degree that its own check refuses
    each_replica = math.prod(degrees)
    if values[GPUS] % each_replica:
        reject(
            "--gpus", values[GPUS], f"must be a multiple of tp*cp*pp={'*'.join(map(str, degrees))}={each_replica}"
        )
    return values[GPUS] // each_replica
