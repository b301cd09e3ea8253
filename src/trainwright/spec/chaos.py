"""What `chaos` does to a run, and what it cost: faults in a seeded order, and the run beside one to which nothing
happened."""

from typing import Literal

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Sequence

PlantKind = Literal[
    "kill",
    "stop",
    "busy",
    "store",
    "crash",
    "slow",
    "nan",
    "spike",
    "flip",
    "lose",
    "lose_all",
    "later",
    "rot",
    "full",
]


class Planted(Noun):
    """One fault. lose: the rank dies, and the memory of its host with it; lose_all: that of all hosts. later: it
    dies `place` thousandths of two steps after the step began. rot: a byte of the newest commit changes, and the
    rank dies. full: the disk of commits takes nothing from this rank until the step after. flip: a bit of a tensor
    of the state changes, weights and moments counted through by `place`. spike: a rank with the head."""

    kind: PlantKind
    rank: Natural
    step: Count
    place: Natural = 0


class Blow(Noun):
    """One fault, and what became of it."""

    kind: str
    rank: Natural
    step: Count
    seen_as: str
    """What was told of it; empty where nothing was."""
    is_right: bool
    """Whether it was seen as what it is, at the right rank where a rank can be told."""
    found_after_s: NonNegative = 0.0
    back_after_s: NonNegative = 0.0
    """From then until steps went on; 0 where they never stopped."""
    done_again: Natural = 0
    """Steps."""


class Toll(Noun):
    """Of the whole run."""

    run_name: str
    seed: Natural
    ranks: Count
    steps: Count
    blows: Sequence[Blow]
    left_out: dict[str, str]
    """Kinds that this run can't have, and why."""
    false_alarms: Sequence[str]
    """What was told and was not done to the run."""
    losses_equal: bool
    """All logged ones, to the bit."""
    first_difference: Natural = 0
    """The first step whose loss is another; 0: none."""
    state_equal: bool
    """Weights and moments at the end, to the bit."""
    plain_s: NonNegative
    hurt_s: NonNegative

    @property
    def is_survived(self) -> bool:
        seen = all(blow.is_right for blow in self.blows) and not self.false_alarms
        return seen and self.losses_equal and self.state_equal
