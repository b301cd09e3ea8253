"""Why all ranks of a run end together, each on its own account: the supervisor asks for it, and a run that nobody
supervises says it in one line."""

from typing import Literal


class RunEnded(Exception):
    """`str()` says why; `ranks` whose fault it is, where that can be told."""

    kind: Literal["corrupt", "diverged"]

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks


class Corrupt(RunEnded):
    """Replicas of the state differ: the run can go on from a commit."""

    kind = "corrupt"


class Diverged(RunEnded):
    """Losses or gradients are no good: to start again would end here again."""

    kind = "diverged"


class RollBack(Exception):
    """The state of the newest commit is to be taken, and the batches after the bad one; `str()` says why."""
