"""When a run's state is written down, where, how much of it is kept, and what is there; `train/checkpoint` says
how."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Positive
from trainwright.spec.errors import reject


class Checkpointing(Noun):
    """The table `checkpoint` of a run. It changes no number of the run, so a run may go on under another one."""

    every_steps: Count | None = None
    """Save whenever so many steps are done; None: as often as overhead_bound allows. The last step is saved
    always."""
    overhead_bound: Annotated[float, Field(gt=0, le=1)] = 0.035
    """Without every_steps: the share of training time that saving may add (CheckFreq's 3.5%, FAST 2021 s4.2)."""
    asynchronous: bool = True
    """A save blocks the step for a copy in memory alone; files are written beside the next steps."""
    keep: Count = 2
    """Commits that are kept; older ones are removed when a newer one is whole."""
    directory: str = ""
    """Where commits lie, which all ranks can reach; empty: `checkpoints` in the run's output."""
    deadline_s: Positive = 600.0
    """After which a save that has not ended is given up, and said to be late, with the rank that is."""
    memory_every_steps: Natural = 0
    """Keep each rank's state in the memory of its host and of peers so often too, for a run that is supervised; 0:
    never."""
    memory_replicas: Annotated[Count, Field(le=64)] = 2
    """Hosts that keep each state, its own among them; of fewer hosts, all do."""

    @model_validator(mode="after")
    def _check(self) -> "Checkpointing":
        bound = self.overhead_bound
        if self.every_steps is not None and bound != type(self).model_fields["overhead_bound"].default:
            why = f"chooses the interval, which every_steps={self.every_steps} fixes; leave one of them out"
            reject("overhead_bound", bound, why)
        replicas = self.memory_replicas
        if not self.memory_every_steps and replicas != type(self).model_fields["memory_replicas"].default:
            why = "is of states kept in memory; set memory_every_steps, or leave it out"
            reject("memory_replicas", replicas, why)
        if self.every_steps is None and not self.asynchronous:
            why = "makes a step wait for the files, which overhead_bound does not count; set every_steps"
            reject("asynchronous", False, why)
        return self


class SavedStep(Noun):
    """A save, as `checkpoint ls` shows it."""

    name: str
    step: Natural
    generation: Natural
    state: Literal["whole", "damaged", "unfinished", "newer"]
    """Whole: what was looked at is as it was written, which is names and lengths, and every byte where that was
    asked for. Newer: a later program wrote it, in a format that this one can't read."""
    complaint: str = ""
    """What is wrong with it."""
    num_bytes: Natural = 0
    ranks: Natural = 0
    """That wrote it."""
    layout: str = ""
    written_at_s: NonNegative = 0.0
    """Seconds since 1970."""
    blocked_s: NonNegative = 0.0
    """For which the slowest rank's step waited for the copy in memory."""
    write_s: NonNegative = 0.0
    """Of the slowest rank."""


class ShownCommit(Noun):
    """A commit, as `checkpoint show` has it."""

    name: str
    step: Natural
    samples: Natural
    """Global number of the next sample."""
    schedule_steps: Natural
    num_bytes: Natural
    layout: dict[str, int]
    files: dict[str, Natural]
    """Bytes, by name."""
    tensors: dict[str, list[str | int]]
    """Kind, as safetensors has it, and shape, by name."""
