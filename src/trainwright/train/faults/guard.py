"""Losses and gradients that may move no weight: what is no number, and spikes.

All ranks have the loss and the norm of the gradient from one sum, so that each decides for itself and all decide
alike. What the decision follows from is kept with the state (`spec.supervision.GuardState`), so that a resume
decides again as before.
"""

import math
import statistics
from dataclasses import dataclass, field

from trainwright.spec.supervision import Guard, GuardState
from trainwright.train.faults.reasons import Diverged, RollBack

FIRST_LOSSES = 8
"""Good steps before spikes are looked for: a deviation of fewer means little."""


@dataclass
class Judge:
    """Of the steps of a run."""

    policy: Guard
    state: GuardState = field(default_factory=GuardState)
    roll_backs: int = 0
    """In a row, without a save between."""

    def rate(self, lr: float) -> float:
        """At which the step that comes learns."""
        return lr * self.policy.cool_down_factor if self.state.cooling else lr

    def complaint(self, loss: float, norm: float) -> str:
        """What is wrong with a step; empty where nothing is."""
        for name, value, earlier in (("loss", loss, self.state.losses), ("norm", norm, self.state.norms)):
            if not math.isfinite(value):
                return f"{name} {value}"
            limit = self.policy.spike_deviations
            if limit is None or len(earlier) < FIRST_LOSSES:
                continue
            mean, deviation = statistics.fmean(earlier), statistics.pstdev(earlier)
            if value > mean + limit * deviation:
                return f"{name} {value:.4g}, above {mean:.4g} by more than {limit:g} times {deviation:.2g}"
        return ""

    def good(self, loss: float, norm: float) -> None:
        """A step's update is made."""
        keep = self.policy.window if self.policy.spike_deviations is not None else 0
        self.state = self.state.model_copy(
            update={
                "losses": (*self.state.losses, loss)[-keep:] if keep else (),
                "norms": (*self.state.norms, norm)[-keep:] if keep else (),
                "cooling": max(0, self.state.cooling - 1),
                "bad_in_a_row": 0,
            }
        )

    def bad(self, step: int, complaint: str) -> str:
        """A step's update is not made: what is said of it. Raises where the run does not simply go on."""
        what = f"step {step}: {complaint}"
        row = self.state.bad_in_a_row + 1
        if self.policy.action == "stop":
            raise Diverged(f"{what}; the run ends here, as guard.action says")
        if self.policy.action == "roll_back":
            self.roll_backs += 1
            if self.roll_backs > self.policy.patience:
                raise Diverged(f"{what}, after {self.policy.patience} roll backs to the same commit")
            raise RollBack(what)
        if row > self.policy.patience:
            raise Diverged(f"{what}, after {self.policy.patience} bad steps in a row")
        self.state = self.state.model_copy(
            update={"skipped": self.state.skipped + 1, "cooling": self.policy.cool_down_steps, "bad_in_a_row": row}
        )
        slowly = f"; {self.policy.cool_down_steps} steps learn slowly" if self.policy.cool_down_steps else ""
        return f"{what}: its update is left out{slowly}"

    def rolled_back(self) -> None:
        """The state of a commit is there."""
        self.state = self.state.model_copy(update={"cooling": self.policy.cool_down_steps})

    def saved(self) -> None:
        self.roll_backs = 0
