"""What is done when something goes wrong while a run goes on: its tables `supervision`, of processes, and `guard`,
of numbers; and what was done, as a line of `faults.jsonl`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Fraction, Natural, NonNegative, Noun, Positive, Sequence
from trainwright.spec.errors import reject


class Supervision(Noun):
    """Of the processes of a run. It changes no number, so a run may go on under another one. Without the table a
    failure ends the run."""

    max_restarts: Natural = 3
    """Restarts in a row of which none takes the run a step further than it had come; then it is given up."""
    hang_s: Annotated[float, Field(ge=1.0, le=3600.0)] = 2.0
    """For which no rank may get on, at the least, until one is said to hang; where the slowest of its acts so far
    takes long, `HANG_FACTOR` times as long as that."""
    slow_factor: Annotated[float, Field(gt=1.0, le=100.0)] = 1.33
    """A rank is told as slow whose own work takes so many times as long as that of others with the same work."""
    digest_every_steps: Natural = 0
    """Hold the digests of state that several ranks have against one another so often, and before each save; 0:
    never."""
    lemon_after: Count = 2
    """Failures of one rank's place on this node, one in each of so many attempts, after which the place is left
    out, where the run can do with fewer dp replicas."""
    grow_after_steps: Natural = 0
    """Steps after which a run with fewer replicas is stopped at a commit and goes on with all; 0: it stays."""


HANG_FACTOR = 3.0
"""Acts of healthy steps are alike: in 4,000 steps of four ranks on two cores none took longer than the longest of
the first two steps (docs/log.md). Three times leaves room for data that come late, and for a save beside."""

Action = Literal["skip", "roll_back", "stop"]


class Guard(Noun):
    """Of the loss and the gradient of every step: one that is no number, or a spike, moves no weight. What is
    decided follows from sums that all ranks have, and is kept with the state, so that all decide alike and a
    resume decides again as before."""

    action: Action = "skip"
    """skip: the update is left out and the next batch comes; roll_back: to the newest commit, and on from there
    with the batches after the bad one (PaLM, arXiv:2204.02311 s5.1); stop: the run ends."""
    spike_deviations: Positive | None = None
    """A loss or norm of the gradient that lies so many standard deviations above the mean of the last `window`
    is a spike; 7 in OLMo 2 (arXiv:2501.00656 s3.1). None: only what is no number is bad."""
    window: Annotated[Count, Field(ge=8, le=10_000)] = 128
    cool_down_steps: Natural = 0
    """Steps after a bad one that learn at `cool_down_factor` of the rate."""
    cool_down_factor: Fraction = 0.1
    patience: Count = 3
    """Bad steps in a row, or roll backs without a good save between, after which the run is ended."""

    @model_validator(mode="after")
    def _check(self) -> "Guard":
        default = type(self).model_fields["cool_down_factor"].default
        if not self.cool_down_steps and self.cool_down_factor != default:
            why = "is the rate of cool_down_steps, which are 0; set them, or leave it out"
            reject("cool_down_factor", self.cool_down_factor, why)
        if self.action == "stop" and self.cool_down_steps:
            why = "follow a bad step, after which action=stop ends the run; leave one of them out"
            reject("cool_down_steps", self.cool_down_steps, why)
        if self.spike_deviations is None and self.window != type(self).model_fields["window"].default:
            reject("window", self.window, "is what spikes are judged by; set spike_deviations, or leave it out")
        return self


class GuardState(Noun):
    """What a guard knows at a step's end, as a commit keeps it."""

    losses: Sequence[float] = ()
    """Of the last steps that were good, the newest last."""
    norms: Sequence[float] = ()
    skipped: Natural = 0
    """Steps so far whose update was left out."""
    cooling: Natural = 0
    """Steps that are still to learn slowly."""
    bad_in_a_row: Natural = 0


FaultKind = Literal["died", "hung", "slow", "corrupt", "diverged", "excluded", "shrunk", "grown", "resumed"]


class FaultRecord(Noun):
    """Something that went wrong, or was done about it: a line of `faults.jsonl`."""

    kind: FaultKind
    attempt: Natural
    """Starts of the run's processes before, in this call."""
    rank: Natural | None = None
    """None: of all, or none could be told."""
    step: Natural = 0
    """In which it was, from 1; 0: before the first."""
    text: str
    at_s: NonNegative
    """Seconds since 1970."""
    found_after_s: NonNegative = 0.0
    """Since the last sign that all was well; of resumed, since the failure was known."""
    done_again: Natural = 0
    """Of resumed: steps that had been done, or begun, and are done again."""
