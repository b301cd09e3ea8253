"""Some steps of a run that are looked at: `10:13` are the steps 10 to 13, both among them, counted from 1."""

import re

from pydantic import model_validator

from trainwright.spec.base import Count, Noun
from trainwright.spec.errors import reject


class StepWindow(Noun):
    """From `first` to `last`."""

    first: Count
    last: Count

    @model_validator(mode="after")
    def _check(self) -> "StepWindow":
        if self.last < self.first:
            reject("last", self.last, f"must be at least first={self.first}")
        return self

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_window(text: str, option: str) -> StepWindow:
    """The window that an option says; `InvalidSpec` where it is none."""
    found = re.fullmatch(r"\s*(\d{1,15}):(\d{1,15})\s*", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        reject(option, text, "must be first:last, steps counted from 1, such as 10:13")
    return StepWindow(first=int(found[1]), last=int(found[2]))


def require_inside(window: StepWindow, option: str, earliest: int, steps: int) -> None:
    """Reject a window that begins before `earliest`, or ends after the run's last step."""
    if window.first < earliest:
        reject(option, str(window), f"must begin at step {earliest} or later: those before warm up")
    if window.last > steps:
        reject(option, str(window), f"must end by the run's last step, {steps}; see --steps")
