"""The predicted step as events in time: what each pipeline rank does from the step's beginning to its end.

Events of three tracks lie one after another and fill a rank's step: its acts, its bubbles, and what follows the
pipeline. They say in `seconds` what they account for by cause, so that a rank's events add up to the step. The
other tracks show what runs beside or inside them and account for nothing more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.spec.ledger import SecondsCause

ACTS, EXPOSED, BUBBLE, SENDS, DP, AFTER = TRACKS = (
    "acts",
    "exposed communication in acts",
    "bubble",
    "sends",
    "dp beside compute",
    "after the pipeline",
)
"""What a rank's events are sorted into, in the order in which they are shown."""


class Event(NamedTuple):
    """Something that takes a while on a rank of the pipeline."""

    rank: int
    track: str
    name: str
    start_s: float
    end_s: float
    """Before start_s where it gives seconds back: software that is faster than its operations."""
    args: Mapping[str, Any]
    """What a reader is told of it: microbatch, chunk, stage."""
    seconds: Mapping[SecondsCause, float] = {}
    """What of the step it accounts for; empty where it runs beside or inside what does."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """Events of a step, in order of rank and track, and of time in each track."""

    run_name: str
    step_s: float
    num_microbatches: int
    """Of the step that is shown."""
    of_microbatches: int
    """Of the run's step; more than num_microbatches where a shorter one is shown."""
    stages: tuple[tuple[int, ...], ...]
    """Of the model, by rank and chunk."""
    events: tuple[Event, ...]

    @property
    def is_shortened(self) -> bool:
        return self.num_microbatches < self.of_microbatches

    def seconds(self, rank: int) -> dict[SecondsCause, float]:
        """What the events of a rank account for, by cause; they sum to the step."""
        found: dict[SecondsCause, float] = {}
        for event in self.events:
            if event.rank == rank:
                for cause, value in event.seconds.items():
                    found[cause] = found.get(cause, 0.0) + value
        return found
