"""What came of holding a run against the plain model: errors step by step, and where the two part first."""

from typing import Any, Literal

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Sequence

BOUND = 1e-10
"""Largest relative error (L2) of what is equal. Rounding in float64 is seen at 1e-13, errors of substance above
1e-4."""
QUANTITIES = ("loss", "gradients", "norm", "weights")
"""What is compared, in the order in which a step makes it."""


class StepErrors(Noun):
    """Of one step, the worst relative error of each quantity over all ranks and parameters."""

    step: Count
    errors: dict[str, NonNegative]

    @property
    def beyond(self) -> list[str]:
        """Quantities that are not equal."""
        return [each for each in QUANTITIES if self.errors[each] > BOUND]


class Divergence(Noun):
    """The first step that is not equal."""

    step: Count
    quantities: Sequence[str]
    """In the order in which the step makes them: what comes first is nearest to the cause."""
    parameter: str = ""
    """The first in the model's order whose gradient differs, or where none does, whose weights do; empty where
    no tensor differs."""
    error: NonNegative = 0.0
    """Its relative error."""
    num_parameters: Natural = 0
    """How many differ alike."""
    of_parameters: Natural = 0
    ranks: Sequence[Natural] = ()
    """That find the parameter, or where there is none the quantity, different."""


class Verdict(Noun):
    """All steps."""

    steps: Sequence[StepErrors]
    first: Divergence | None = None

    @property
    def equal(self) -> bool:
        return self.first is None

    @property
    def worst(self) -> float:
        """The largest relative error of all."""
        return max(max(each.errors.values()) for each in self.steps)


AxisFinding = Literal["equal", "unequal", "not there"]
"""Of the same run with an axis at degree 1; "not there" where the planted fault needs the axis."""


class Verification(Noun):
    """A verdict, and where it is no, the axes that were looked at one by one."""

    verdict: Verdict
    fault: str = ""
    """What was planted."""
    without: dict[str, AxisFinding] = {}  # noqa: RUF012  (pydantic copies defaults)
    """By axis: what came of the run with that axis at degree 1."""

    @property
    def axes(self) -> list[str]:
        """Axes without which the difference is gone."""
        return [axis for axis, finding in self.without.items() if finding != "unequal"]

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys.

        equal, bound, worst (largest relative error); fault: what was planted, or null; steps: each {step, loss,
        gradients, norm, weights} with the worst relative errors; first: null, or the first step that differs:
        {step, quantities, parameter, error, num_parameters, of_parameters, ranks, axes, without}, axes being those
        without which the difference is gone, and without what was found for each.
        """
        first = self.verdict.first
        return {
            "equal": self.verdict.equal,
            "bound": BOUND,
            "worst": self.verdict.worst,
            "fault": self.fault or None,
            "steps": [{"step": each.step, **each.errors} for each in self.verdict.steps],
            "first": first and {**first.plain(), "axes": self.axes, "without": self.without},
        }
