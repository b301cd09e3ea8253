"""How many devices: what is asked (the fewest, or the cheapest, in so many days), and what each number led to.

Nothing is taken for granted of how time depends on devices: every number that could be in time is searched by
itself, and what is said of another one is what was found for it.
"""

from typing import Any, Literal

from trainwright.spec.answers import Prediction
from trainwright.spec.base import Count, Noun, Positive, Sequence
from trainwright.spec.units import count_text

Least = Literal["gpus", "cost"]
"""What is to be least: the devices, or the dollars of the whole budget."""

MOST_DEVICES = 65_536


class Goal(Noun):
    """To have trained in so many days, with the least of something."""

    least: Least
    days: Positive
    most_devices: Count = MOST_DEVICES


class Tried(Noun):
    """A number of devices, and the fastest plan for it; None where nothing fits."""

    devices: Count
    plan: Prediction | None = None

    @property
    def days(self) -> float:
        """Infinite where nothing fits."""
        return float("inf") if self.plan is None or self.plan.days is None else self.plan.days

    @property
    def price(self) -> float:
        """Dollars, or device-hours where the cluster has no price."""
        if self.plan is None or self.plan.gpu_hours is None:
            return float("inf")
        return self.plan.gpu_hours if self.plan.cost_usd is None else self.plan.cost_usd

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys; null for what is not known where nothing fits."""
        plan = self.plan
        return {
            "devices": self.devices,
            "days": plan and plan.days,
            "gpu_hours": plan and plan.gpu_hours,
            "cost_usd": plan and plan.cost_usd,
            "step_s": plan and plan.step_s,
            "mfu": plan and plan.mfu,
            "layout": plan and plan.layout.plain(),
        }


class Sizing(Noun):
    """All numbers of devices that were tried, and which of them is the answer."""

    goal: Goal
    tried: Sequence[Tried]
    """By number of devices, rising."""
    illegal: Sequence[Count] = ()
    """Numbers that no layout splits the batch over."""

    @property
    def in_time(self) -> list[Tried]:
        return [each for each in self.tried if each.days <= self.goal.days]

    @property
    def answer(self) -> Tried | None:
        """The least that is in time; None where none is."""
        if self.goal.least == "cost":
            return min(self.in_time, key=lambda each: (each.price, each.devices), default=None)
        return next(iter(self.in_time), None)

    @property
    def pareto(self) -> list[Tried]:
        """Those that no other beats in both days and dollars, fastest first."""
        front: list[Tried] = []
        for each in sorted(self.tried, key=lambda each: (each.days, each.price)):
            if each.plan is not None and (not front or each.price < front[-1].price):
                front.append(each)
        return front

    @property
    def text(self) -> str:
        """The answer in a sentence, beside the number that comes next."""
        answer = self.answer
        if answer is None:
            return self._none_text()
        said = f"{answer.devices:,} devices finish in {answer.days:.1f} days"
        if self.goal.least == "cost":
            others = sorted((each for each in self.in_time if each is not answer), key=lambda each: each.price)
            said = f"{said} for {count_text(answer.price)} USD"
            return said + (f"; {_price_text(others[0])}" if others else "; no other number is in time")
        fewer = [each for each in self.tried if each.devices < answer.devices]
        return said + (f"; {_days_text(fewer[-1])}" if fewer else "; it is the smallest number that makes sense")

    def _none_text(self) -> str:
        nearest = min(self.tried, key=lambda each: each.days, default=None)
        said = f"no number of devices up to {self.goal.most_devices:,} finishes in {self.goal.days:g} days"
        if nearest is None or nearest.plan is None:
            return f"{said}, and none of them has the memory"
        return f"{said}; {nearest.devices:,} come nearest, with {nearest.days:.1f}"

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        answer = self.answer
        return {
            "min": self.goal.least,
            "days": self.goal.days,
            "most_devices": self.goal.most_devices,
            "devices": answer and answer.devices,
            "text": self.text,
            "tried": [each.report() for each in self.tried],
            "pareto": [each.report() for each in self.pareto],
            "illegal": list(self.illegal),
        }


def _days_text(each: Tried) -> str:
    if each.plan is None:
        return f"{each.devices:,} don't have the memory"
    return f"{each.devices:,} would take {each.days:.1f}"


def _price_text(each: Tried) -> str:
    return f"{each.devices:,} would cost {count_text(each.price)} USD and take {each.days:.1f} days"
