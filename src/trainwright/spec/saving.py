"""Ways to keep a run's state: what a save costs, how long until it counts, and what a failure costs beside the
work that is lost.

synchronous   the step waits until storage has all of it
asynchronous  the step waits for a copy in the host's memory, from which storage is written beside the next steps
memory        that copy goes to other nodes' memories, and every so often to storage too: most failures are
              recovered from memory (GEMINI, Wang et al., SOSP 2023)

A failure during a restart begins it again; memory is gone until a restart from storage is over. After a restart
from memory a write to storage that was cut short begins again.
"""

from typing import Literal

from trainwright.spec.base import Count, NonNegative, Noun, Probability

SavingKind = Literal["synchronous", "asynchronous", "memory"]

SAVING_TEXT: dict[SavingKind, str] = {
    "synchronous": "steps wait",
    "asynchronous": "beside steps",
    "memory": "to memory",
}
"""As short as columns want them."""


class Saving(Noun):
    """One way, with its seconds. Of the memory tier what storage needs is `durable_s` and `recover_s` too."""

    kind: SavingKind
    blocked_s: NonNegative
    """For which a step waits at each save: w of a synchronous write, s of a snapshot."""
    durable_s: NonNegative = 0.0
    """From then until storage has it, p; a synchronous write is durable when the step goes on."""
    recover_s: NonNegative
    """From a failure to the next step where state comes from storage, u."""
    memory_share: Probability = 0.0
    """Of failures that are recovered from memory, f."""
    memory_durable_s: NonNegative = 0.0
    """From the snapshot until other nodes have it."""
    memory_recover_s: NonNegative = 0.0
    """From a failure to the next step where state comes from memory."""

    @property
    def least_interval_s(self) -> float:
        """Seconds of work between two saves, so that one has ended before the next is begun."""
        lag_s = self.memory_durable_s if self.kind == "memory" else self.durable_s
        return max(0.0, lag_s - self.blocked_s)

    def storage_every(self, interval_s: float) -> Count:
        """Every how many saves storage gets one: as often as it can write them."""
        if self.kind != "memory":
            return 1
        return max(1, -int(-self.durable_s // (interval_s + self.blocked_s)))
