"""What is asked of a run with failures, and what the planner answers: time that counts, three ways to save beside
one another, spares, and curves.

The JSON keys of `Goodput.report` and the fields of `WithFailures` are a contract with scripts: they stay.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Positive, Probability, Sequence
from trainwright.spec.recovery import Recovery
from trainwright.spec.saving import Saving, SavingKind


class GoodputQuestion(Noun):
    """What is asked, beside the run and its cluster."""

    useful_s: Positive
    """Work that is to be done: steps, without saves and failures."""
    replicas: Annotated[Count, Field(ge=2, le=64)] = 2
    """Nodes that hold each state in the memory tier, its own among them."""
    interval_s: Positive | None = None
    """Work between two saves; None: as the run says, or as is best."""
    runs: Annotated[Count, Field(ge=10, le=100_000)] = 1000
    """That are simulated of each way to save."""
    seed: Natural = 0


class WithFailures(Noun):
    """A prediction's budget where nodes fail, in the mean."""

    kind: SavingKind
    ettr: Probability
    mttf_s: Positive
    interval_s: Positive
    gpu_hours: NonNegative | None = None
    days: NonNegative | None = None
    cost_usd: NonNegative | None = None
    """The three of the whole budget, where the run has one (and the cluster a price)."""


class Simulated(Noun):
    """What runs of the simulation saw."""

    runs: Count
    seed: Natural
    ettr: Probability
    ettr_error: NonNegative
    """Standard error of it."""
    failures: NonNegative
    """Of a run, in the mean."""
    lost_s: NonNegative
    """Thrown away by a failure that hits work, in the mean."""
    wall_s: dict[Literal["p10", "p50", "p90"], float]


class Judged(Noun):
    """One way to save, at one interval."""

    saving: Saving
    interval_s: Positive
    interval_steps: Count
    storage_every: Count
    """Saves from one that goes to storage to the next."""
    checkfreq_steps: Count
    young_s: NonNegative
    daly_s: NonNegative
    exact_s: NonNegative
    """The three of the blocking time alone, before what a save takes to be written."""
    failures_alone: float
    """First order, without what saves take."""
    first_order: float
    first_order_holds: bool
    complete: Probability
    lost_s: NonNegative
    """Expected time that a failure throws away, in closed form."""
    simulated: Simulated | None = None
    notes: Sequence[str] = ()

    def usd(self, quantile: Literal["p10", "p50", "p90"], usd_per_s: float | None) -> float | None:
        """Dollars of the whole run."""
        if self.simulated is None or usd_per_s is None:
            return None
        return self.simulated.wall_s[quantile] * usd_per_s


class LostNodes(Noun):
    """Nodes that are lost at once, and how likely every state is still there."""

    nodes: Count
    recovered: Probability
    bound: Probability | None = None
    """The paper's corollary; None where the replicas don't divide the nodes."""


class Placement(Noun):
    """Where the memory tier's replicas are."""

    replicas: Count
    groups: dict[int, int]
    """How many of each size."""
    nodes_per_rack: Count
    is_spread: bool
    """Whether the loss of any one rack leaves each group a member."""
    lost: Sequence[LostNodes]


class PublishedMttf(Noun):
    """A mean time to failure as a paper has it."""

    devices: Count
    mttf_s: Positive
    kind: Literal["measured", "projected"]


class PublishedFailures(Noun):
    """What was published of failures (`data/failures.toml`)."""

    failures_per_1000_node_days: Positive
    """Of the line that the points are said to be on."""
    devices_per_node: Count
    source: str
    mttf: Sequence[PublishedMttf]


class MttfRow(Noun):
    """Mean times to failure of jobs of one size."""

    devices: Count
    mttf_s: Positive
    """At this run's rate."""
    published_line_s: Positive
    """1/N from the published rate."""
    published: PublishedMttf | None = None


class Change(Noun):
    """What the ratio would be if something were otherwise."""

    text: str
    ettr: Probability


class Curve(Noun):
    """The ratio of each way to save over intervals in seconds, or numbers of devices."""

    x: Sequence[float]
    ettr: dict[SavingKind, Sequence[float]]


class Goodput(Noun):
    """A run with failures."""

    run_name: str
    device: str
    devices: Count
    nodes: Count
    failures_per_node_day: Positive
    failures_source: str
    recovery: Recovery
    recovery_sources: dict[str, str]
    """Of its fields, each `kind: source`."""
    mttf_s: Positive
    step_s: Positive
    useful_s: Positive
    saved_bytes: Positive
    storage_bytes_per_s: Positive
    """Of all nodes together."""
    usd_per_device_hour: Positive | None = None
    spares: Natural
    """Nodes that bridge repairs at 99% of moments."""
    nodes_in_repair: NonNegative
    """In the mean."""
    judged: Sequence[Judged]
    placement: Placement | None = None
    mttf: Sequence[MttfRow]
    mttf_source: str
    changes: Sequence[Change]
    over_interval: Curve
    over_devices: Curve
    notes: Sequence[str] = ()

    @property
    def usd_per_s(self) -> float | None:
        price = self.usd_per_device_hour
        return None if price is None else price * self.devices / 3600.0

    @property
    def best(self) -> Judged:
        return max(self.judged, key=lambda each: each.complete)

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        values = self.plain()
        for judged, row in zip(self.judged, values["judged"], strict=True):
            row["average_storage_bytes_per_s"] = self.average_bytes_per_s(judged)
            if judged.simulated is not None and self.usd_per_s is not None:
                row["simulated"]["usd"] = {
                    name: judged.usd(name, self.usd_per_s) for name in ("p10", "p50", "p90")
                }
        return values

    def average_bytes_per_s(self, judged: Judged) -> float:
        """What storage must take in the mean."""
        return self.saved_bytes / (judged.storage_every * (judged.interval_s + judged.saving.blocked_s))
