"""Why nothing fits, and what would make it fit: the nearest plans, and remedies that were tried."""

from typing import Any

from trainwright.spec.answers import Prediction
from trainwright.spec.base import Natural, Noun, Sequence


class Remedy(Noun):
    """A change of the question, and what it led to."""

    name: str
    plan: Prediction
    """The fastest that fits; the one that comes nearest where none does."""
    same_job: bool = True
    """False where another model is trained in the end, as with shorter sequences."""

    @property
    def device_s_per_token(self) -> float:
        return 1 / self.plan.tokens_per_s_per_device

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return {"remedy": self.name, "same_job": self.same_job, "plan": self.plan.report()}


class Diagnosis(Noun):
    """What stands between a question and a plan."""

    considered: Natural
    feasible: Natural
    nearest: Sequence[Prediction]
    """Plans of different layouts that miss fewest bytes; where something fits, the fastest and the roomiest."""
    tried: Sequence[str] = ()
    """What is no remedy, since all of it was searched."""
    remedies: Sequence[Remedy] = ()
    """Those that make it fit first, the cheapest in device-seconds per token at the top; then by missing bytes."""

    @property
    def cheapest(self) -> Remedy | None:
        """The remedy that makes it fit for least; None where none does."""
        return next((each for each in self.remedies if each.plan.fits), None)

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return {
            "considered": self.considered,
            "feasible": self.feasible,
            "nearest": [plan.report() for plan in self.nearest],
            "tried": list(self.tried),
            "remedies": [each.report() for each in self.remedies],
            "cheapest": self.cheapest and self.cheapest.name,
        }
