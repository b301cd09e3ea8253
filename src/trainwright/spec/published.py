"""A published, measured run as the planner's nouns, and how far from such runs predictions lie.

A row of a table of published runs becomes a `PublishedRun` (what a `Run` needs but for the cluster, which is
named, not read) or a `RefusedRow`. `Bands` says how the measured step times of such runs lie about predictions
of a planner that hadn't seen them.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from trainwright.spec.base import Count, Natural, Noun, Positive, Sequence
from trainwright.spec.layout import Layout
from trainwright.spec.ledger import BytesCause
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Recipe

PrecisionClass = Literal["FP32", "BF16", "FP16", "FP8", "FP4"]
Trust = Literal["A", "B", "C"]


MemoryKind = Literal["allocated", "reserved", "device"]


class PublishedRun(Noun):
    """One measured run with its configuration."""

    id: str
    line: Natural = 0
    """Of the table, its header being 1."""
    source: str
    publisher: str
    """Repository or paper; sources of one publisher have much in common."""
    siblings: str
    """Sources that print the same measurements have the same name here; else it is the source's."""
    year: Natural
    gpu: str
    """As the source calls it."""
    cluster: str
    """Its name in the catalogue."""
    overrides: dict[str, int | float] = Field(default_factory=dict)
    """Dotted fields of the cluster that the source states otherwise."""
    software: str
    """The part of `data/software.toml` that stands for its framework and time."""
    model: ModelSpec
    layout: Layout
    recipe: Recipe
    repeats: Count = 1
    """The step is this many runs of `recipe`, one after the other: the pipeline is flushed between them."""
    step_s: Positive
    memory_bytes: Count | None = None
    memory_kind: MemoryKind = "reserved"
    """What memory_bytes counts: tensors; what the allocator holds of the device for them; or all that is taken of
    the device, its context too."""
    """Peak of one device, where the source prints it; what it counts differs between sources."""
    precision_class: PrecisionClass
    trust: Trust = "B"
    tuned: bool = True
    """False where the source calls the run untuned or an early port."""
    natural_routing: bool = False
    """Tokens choose their experts freely, or the source doesn't say that balance is forced."""
    recompute_known: bool = True
    assumed: Sequence[str] = ()
    """One sentence for each thing that the source leaves open."""

    @property
    def architecture(self) -> Literal["dense", "moe"]:
        return "moe" if self.model.is_moe else "dense"

    @property
    def is_doubtful(self) -> bool:
        """Whether something that moves the step time is not known."""
        return not self.tuned or self.natural_routing or not self.recompute_known

    def counted_bytes(self, predicted: Mapping[BytesCause, float], framework_bytes: float) -> float:
        """What of a rank's predicted bytes `memory_kind` counts; framework_bytes: the cluster's, of the
        context."""
        total = sum(predicted.values())
        if self.memory_kind == "device":
            return total
        return total - (framework_bytes if self.memory_kind == "reserved" else predicted.get("framework", 0.0))


class RefusedRow(Noun):
    """A row of a table that says no complete run."""

    id: str
    line: Natural
    """Of the table, its header being 1."""
    reason: str


class Band(Noun):
    """Multipliers of a predicted step time that a share of the measured ones lies between."""

    low: Positive
    high: Positive
    rows: Natural
    """Measured runs behind it."""


class Bands(Noun):
    """Split conformal bands (arXiv:2107.07511 s1.1) of runs that the constants had not been fitted to, by class:
    dense or MoE, software of a known or an unknown kind."""

    share: float = Field(gt=0, lt=1)
    """Of measured step times that lie inside."""
    dense_seen: Band
    dense_unseen: Band
    moe_seen: Band
    moe_unseen: Band
    widening: float = Field(ge=1, le=4)
    """Exponent of the multipliers where something that moves the step time is not known: natural routing, unknown
    recompute, untuned software, a device that no published run was measured on."""
    software: Sequence[str]
    """Kinds of software that the constants were fitted to."""
    devices: Sequence[str]
    """Names of the devices that they were."""
    most_devices: Natural = 0
    """Of one run; 0: not known."""
    longest_seq: Natural = 0
    """Tokens of a sequence; 0: not known."""

    def far(self, *, software: str, device: str, devices: int, seq_len: int) -> list[str]:
        """In what a run is far from every measured one, in words."""
        notes = []
        if device not in self.devices:
            notes.append(f"no published run of {device} was read")
        if software not in ("", "gpu") and software not in self.software:
            notes.append(f"software {software!r} stands for no stack that runs were published of")
        if self.most_devices and devices > self.most_devices:
            notes.append(f"{devices:,} devices are more than in any measured run ({self.most_devices:,})")
        if self.longest_seq and seq_len > self.longest_seq:
            notes.append(
                f"sequences of {seq_len:,} tokens are longer than in any measured run ({self.longest_seq:,})"
            )
        return notes

    def class_of(
        self, *, is_moe: bool, software: str | None, device: str, is_doubtful: bool = False
    ) -> tuple[float, float]:
        """The lower and the upper multiplier of a predicted step time. `software` is None where a plan is for
        software that has not been measured; `device` is the `ClusterSpec`'s `device.name`."""
        seen = software in self.software
        band = (
            (self.moe_seen if seen else self.moe_unseen)
            if is_moe
            else (self.dense_seen if seen else self.dense_unseen)
        )
        exponent = self.widening if is_doubtful or device not in self.devices else 1.0
        return band.low**exponent, band.high**exponent
