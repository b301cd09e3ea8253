"""What the planner answers and what the comparison answers, as values that present and JSON show.

The JSON keys of `Prediction.report` and `Answer.report` are a contract with scripts: they stay.
"""

from typing import Any, Literal

from trainwright.spec.base import Natural, Noun, Sequence
from trainwright.spec.goodput import WithFailures
from trainwright.spec.layout import Layout
from trainwright.spec.ledger import Ledger
from trainwright.spec.model import FlopConvention
from trainwright.spec.recipe import Recipe


class StageMemory(Noun):
    """Bytes of one pipeline rank at its own peak, by cause."""

    pp_rank: Natural
    layers: Natural
    ledger: Ledger


class ComputedFlops(Noun):
    """What a device computes of one kind in a step, what is done again left out, and what MFU counts of it."""

    busiest_flops: float
    """On the pipeline rank whose seconds the prediction has."""
    mean_flops: float
    """On a mean rank of the pipeline."""
    at_peak_s: float
    """Seconds of busiest_flops at the peaks of the number formats that they are computed in."""
    counted_flops: float
    """Of a mean device, under the convention."""


WorkKind = Literal["matmul", "attention"]
"""Causes of seconds that do a model's FLOPs."""


class StepBand(Noun):
    """Where a step's measured time lies, by how published runs lay about the planner's predictions of them."""

    low_s: float
    high_s: float
    share: float
    """Of measured steps that lie between."""
    notes: Sequence[str] = ()
    """What makes it wider, or is beyond what was measured."""


class RecomputeChoice(Noun):
    """How the recipe's recompute was chosen, where it was left to a budget."""

    budget_bytes: float
    """What the fullest rank may hold."""
    considered: Natural
    """Ways to recompute."""
    within: Natural
    """Those of them that stay within the budget."""


class Prediction(Noun):
    """One run as the planner sees it."""

    layout: Layout
    recipe: Recipe
    ledger: Ledger
    """Seconds of the step by cause, and bytes by cause of the fullest rank at its peak."""
    stages: Sequence[StageMemory]
    mfu: float
    hfu: float
    """Like mfu, with recomputed FLOPs counted as work."""
    convention: FlopConvention
    peak_format: str
    """The number format whose dense peak mfu and hfu are fractions of."""
    peak_flops_per_s: float
    model_flops_per_device: float
    """Of a step, under the convention."""
    band: StepBand | None = None
    """None where no published run is of its kind: on CPUs."""
    recompute_choice: RecomputeChoice | None = None
    """None where the run said itself what is recomputed."""
    computed: dict[WorkKind, ComputedFlops] = {}  # noqa: RUF012  (pydantic copies defaults)
    """What is really computed, for the waterfall from peak to MFU (`spec/waterfall.py`)."""
    capacity_bytes: float
    """Memory of a device."""
    gpu_hours: float | None = None
    days: float | None = None
    cost_usd: float | None = None
    """The three of the whole budget, where the run has one (and the cluster a price), if nothing fails."""
    with_failures: WithFailures | None = None
    """None where the cluster has no rate of failures."""

    @property
    def step_s(self) -> float:
        return self.ledger.total_s

    @property
    def peak_bytes(self) -> float:
        return self.ledger.total_bytes

    @property
    def short_by_bytes(self) -> float:
        """Bytes that are missing; 0 where it fits."""
        return max(0.0, self.peak_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        return self.short_by_bytes == 0

    @property
    def largest_bytes_cause(self) -> str:
        return max(self.ledger.bytes, key=lambda cause: self.ledger.bytes[cause])

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.recipe.tokens_per_step / self.step_s / self.layout.world

    @property
    def flops_per_s_per_device(self) -> float:
        return self.model_flops_per_device / self.step_s

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        values: dict[str, Any] = {
            "layout": self.layout.plain(),
            "recipe": self.recipe.plain(),
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_device,
            "tflops_per_gpu": self.flops_per_s_per_device / 1e12,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "mfu_convention": self.convention,
            "mfu_peak": {"format": self.peak_format, "flops_per_s": self.peak_flops_per_s},
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "bytes_by_cause": dict(self.ledger.bytes),
            "seconds_by_cause": dict(self.ledger.seconds),
            "fits": self.fits,
        }
        if not self.fits:
            values |= {"short_by_bytes": self.short_by_bytes, "cause": self.largest_bytes_cause}
        if self.band is not None:
            values |= {
                "step_s_p10": self.band.low_s,
                "step_s_p90": self.band.high_s,
                "band_notes": list(self.band.notes),
            }
        if self.recompute_choice is not None:
            values["recompute_choice"] = self.recompute_choice.plain()
        if self.with_failures is not None:
            values["with_failures"] = self.with_failures.plain()
        totals = {"gpu_hours": self.gpu_hours, "days": self.days, "cost_usd": self.cost_usd}
        return values | {key: value for key, value in totals.items() if value is not None}


class Balanced(Noun):
    """One of the plans whose layers were assigned to stages unevenly, and what its step was before."""

    layout: Layout
    """With its `stage_layers`."""
    step_s: float
    even_step_s: float

    @property
    def saves(self) -> float:
        """Fraction of the even step."""
        return 1 - self.step_s / self.even_step_s


class Change(Noun):
    """What the best plan would be if the question were another one."""

    name: str
    """Such as `twice the NICs`."""
    plan: Prediction | None = None
    """None where nothing fits then."""
    text: str
    """What changes, in a sentence."""

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return {"change": self.name, "text": self.text, "plan": self.plan and self.plan.report()}


class Answer(Noun):
    """What a search found."""

    considered: Natural
    judged: Natural
    """Of them, those whose memory was looked at: all, or of a great many those that may be near the fastest."""
    feasible: Natural
    """Of the judged, those that fit."""
    plans: Sequence[Prediction]
    """Fastest first; empty where nothing fits."""
    why: Sequence[str]
    pareto: Sequence[Prediction] = ()
    """Plans that no other beats in both step time and memory, fastest first."""
    balanced: Sequence[Balanced] = ()
    """Of `plans` those that are faster with uneven stages than with the even ones that they were ranked with."""
    changes: Sequence[Change] = ()

    def report(self, search_s: float) -> dict[str, Any]:
        """The JSON form, with stable keys. `search_s` is what the search took by the caller's clock."""
        return {
            "considered": self.considered,
            "judged": self.judged,
            "feasible": self.feasible,
            "search_s": search_s,
            "plans": [plan.report() for plan in self.plans],
            "why": list(self.why),
            "pareto": [plan.report() for plan in self.pareto],
            "balanced": [each.plain() for each in self.balanced],
            "changes": [each.report() for each in self.changes],
        }


class ComparedQuantity(Noun):
    """One quantity, predicted and seen, in the unit that its name ends in."""

    name: str
    predicted: float
    seen: float

    @property
    def residual(self) -> float:
        return self.seen - self.predicted

    @property
    def relative_residual(self) -> float | None:
        """Residual over prediction; None where nothing was predicted."""
        return self.residual / self.predicted if self.predicted else None


class RankBytes(Noun):
    """Memory of one rank: its states, and the most that was live at one time."""

    rank: Natural
    quantities: Sequence[ComparedQuantity]
    """parameter_bytes, gradient_bytes, optimizer_bytes, peak_bytes."""


class Comparison(Noun):
    """A finished run against its prediction."""

    run_name: str
    run_hash: str
    steps_timed: Natural
    """Steps that the seen step time is the median of."""
    quantities: Sequence[ComparedQuantity]
    """step_s, tokens_per_s, mfu."""
    ranks: Sequence[RankBytes]
    seconds: Sequence[ComparedQuantity]
    """A step's seconds by the causes that the program can tell apart (`ledger.SEEN_SECONDS`)."""
    bytes: Sequence[ComparedQuantity]
    """Bytes at the peak by `ledger.SEEN_BYTES`, of the rank with the largest peak."""

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""

        def rows(quantities: tuple[ComparedQuantity, ...]) -> dict[str, dict[str, float | None]]:
            return {
                each.name: {
                    "predicted": each.predicted,
                    "seen": each.seen,
                    "residual": each.residual,
                    "relative_residual": each.relative_residual,
                }
                for each in quantities
            }

        return {
            "run": self.run_name,
            "run_hash": self.run_hash,
            "steps_timed": self.steps_timed,
            "quantities": rows(self.quantities),
            "ranks": {str(each.rank): rows(each.quantities) for each in self.ranks},
            "seconds_by_cause": rows(self.seconds),
            "bytes_by_cause": rows(self.bytes),
        }
