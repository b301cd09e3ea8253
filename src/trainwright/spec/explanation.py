"""Where the MFU of a finished run went: by cause, predicted and seen, and what to try.

What saw the run decides which causes are told apart. A run of ours tells what its clock charges; a trace tells
kinds of kernels; a log of step times tells none, and is explained by constants that fit it (`LogFit`)."""

from collections.abc import Mapping
from typing import Any

from trainwright.spec.answers import Prediction
from trainwright.spec.base import Natural, NonNegative, Noun, Positive, Sequence
from trainwright.spec.ledger import SecondsCause

COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")
WORK: tuple[SecondsCause, ...] = ("matmul", "attention", "elementwise", "quantize", "recompute")

RUN_CAUSES: Mapping[str, tuple[SecondsCause, ...]] = {
    "compute": (*WORK, "launch", "core_sharing", "straggling", "software"),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "pp": ("pp",),
    "bubble": ("bubble",),
    "dp": ("dp",),
    "optimizer": ("optimizer",),
    "host": ("host",),
}
"""What a run's own clock tells apart (`ledger.STEP_SECONDS`; data are of the host), and the predicted causes of
each."""

TRACE_CAUSES: Mapping[str, tuple[SecondsCause, ...]] = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "elementwise": ("elementwise", "quantize"),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "pp": ("pp", "bubble"),
    "dp": ("dp", "straggling"),
    "optimizer": ("optimizer",),
    "copies": (),
    "unnamed": (),
    "idle": ("launch", "host", "core_sharing", "software"),
}
"""The same of a trace. A rank that waits for another waits in a kernel of communication: bubbles are in pp, and
the slowest rank is waited for in dp. copies: memcpy and memset; unnamed: collectives of no known axis; idle:
nothing runs on the device."""

RECOMPUTED = "matmul, attention, elementwise and recompute"
"""One cause of a trace where the run recomputes: kernels don't say whether it is the first time."""


def trace_causes(recomputes: bool) -> Mapping[str, tuple[SecondsCause, ...]]:
    """`TRACE_CAUSES`, with the kinds of compute in one where the run computes some of it twice."""
    if not recomputes:
        return TRACE_CAUSES
    rest = {
        name: parts for name, parts in TRACE_CAUSES.items() if name not in ("matmul", "attention", "elementwise")
    }
    return {RECOMPUTED: WORK, **rest}


class SeenStep(Noun):
    """A steady step as a run's telemetry or a trace has it."""

    source: str
    """What saw it: `telemetry of 4 ranks`."""
    steps: Natural
    """That it is a median or a mean of."""
    seconds: dict[str, NonNegative]
    """By cause; they sum to the step."""
    hidden: dict[str, NonNegative] = {}  # noqa: RUF012  (pydantic copies defaults)
    """Seconds of communication that compute ran beside, by axis; no part of the step."""
    collectives: dict[str, NonNegative] = {}  # noqa: RUF012
    """Seconds of communication by kind, hidden or not."""
    notes: Sequence[str] = ()

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


class Try(Noun):
    """A change of the run that the planner says helps."""

    fields: dict[str, Any]
    """By dotted name, the value to set."""
    step_s: Positive
    """Predicted with it, where the run's own prediction is `from_s`."""
    from_s: Positive

    @property
    def saves(self) -> float:
        """Fraction of the predicted step."""
        return 1 - self.step_s / self.from_s

    @property
    def text(self) -> str:
        return ", ".join(f"{field}={_plain(value)}" for field, value in self.fields.items())


class CauseGap(Noun):
    """One cause of a step, predicted and seen."""

    name: str
    predicted_s: float
    seen_s: float
    at_peak_s: NonNegative = 0.0
    """What its FLOPs take at the peaks of their formats: no loss."""
    tries: Sequence[Try] = ()
    """The best first."""

    @property
    def gap_s(self) -> float:
        return self.seen_s - self.predicted_s


class Explanation(Noun):
    """A finished run against its prediction, by cause, in seconds and in points of MFU."""

    run_name: str
    run_hash: str
    seen: SeenStep
    prediction: Prediction
    causes: Sequence[CauseGap]
    """What took most beyond its prediction first."""

    @property
    def seen_mfu(self) -> float:
        """Counted as the prediction counts it."""
        return self.prediction.mfu * self.prediction.step_s / self.seen.step_s

    @property
    def seen_hfu(self) -> float:
        return self.prediction.hfu * self.prediction.step_s / self.seen.step_s

    @property
    def seen_flops_per_s(self) -> float:
        """Of one device, as MFU counts them."""
        return self.prediction.model_flops_per_device / self.seen.step_s

    def lost(self, cause: CauseGap, *, seen: bool) -> float:
        """Of the peak, what a cause takes: its share of the step, less what its FLOPs take at the peak."""
        seconds, step_s = (cause.seen_s, self.seen.step_s) if seen else (cause.predicted_s, self.prediction.step_s)
        return (seconds - cause.at_peak_s) / step_s

    def other(self, *, seen: bool) -> float:
        """What is left of the peak beside causes and MFU: FLOPs that are computed and not counted, or the reverse,
        and formats of another peak. With it the peak is shared out exactly."""
        mfu = self.seen_mfu if seen else self.prediction.mfu
        return 1 - mfu - sum(self.lost(cause, seen=seen) for cause in self.causes)

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return {
            "run": self.run_name,
            "run_hash": self.run_hash,
            "source": self.seen.source,
            "steps": self.seen.steps,
            "step_s": {"predicted": self.prediction.step_s, "seen": self.seen.step_s},
            "mfu": {"predicted": self.prediction.mfu, "seen": self.seen_mfu},
            "hfu": {"predicted": self.prediction.hfu, "seen": self.seen_hfu},
            "tflops_per_gpu": {
                "predicted": self.prediction.flops_per_s_per_device / 1e12,
                "seen": self.seen_flops_per_s / 1e12,
            },
            "mfu_convention": self.prediction.convention,
            "mfu_peak": {
                "format": self.prediction.peak_format,
                "flops_per_s": self.prediction.peak_flops_per_s,
            },
            "causes": [
                {
                    "cause": each.name,
                    "predicted_s": each.predicted_s,
                    "seen_s": each.seen_s,
                    "gap_s": each.gap_s,
                    "predicted_mfu_points": -100 * self.lost(each, seen=False),
                    "seen_mfu_points": -100 * self.lost(each, seen=True),
                    "hidden_s": self.seen.hidden.get(each.name, 0.0),
                    "try": [
                        {"fields": one.fields, "predicted_step_s": one.step_s, "saves": one.saves}
                        for one in each.tries
                    ],
                }
                for each in self.causes
            ],
            "other_mfu_points": {
                "predicted": -100 * self.other(seen=False),
                "seen": -100 * self.other(seen=True),
            },
            "seconds_by_collective": dict(self.seen.collectives),
            "notes": list(self.seen.notes),
        }


class LogSteps(Noun):
    """The steady steps of a log, of one size of batch."""

    global_batch: Natural
    step_s: Positive
    """Their median."""
    steps: Natural
    """Lines that it is the median of."""


class FittedConstant(Noun):
    """A factor on the planner's rates that a log identifies."""

    name: str
    what: str
    """Which rates it multiplies."""
    value: Positive
    low: Positive
    high: Positive

    @property
    def is_at_its_border(self) -> bool:
        return not 1.01 * self.low < self.value < self.high / 1.01


class LogFit(Noun):
    """What a log of step times says: constants that fit it, and the plan that they lead to."""

    run_name: str
    run_hash: str
    framework: str
    """Whose format the log is in."""
    steps: Sequence[LogSteps]
    """By the size of the batch, the run's own last."""
    constants: Sequence[FittedConstant]
    unidentified: Sequence[str]
    """What the log can't say."""
    before: Prediction
    """Of the run, by the constants of its file."""
    after: Prediction
    """The same by the fitted ones."""
    best: Prediction | None = None
    """The fastest plan of as many devices by the fitted ones; None where nothing fits."""
    notes: Sequence[str] = ()

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return {
            "run": self.run_name,
            "run_hash": self.run_hash,
            "framework": self.framework,
            "steps": [each.plain() for each in self.steps],
            "constants": [each.plain() for each in self.constants],
            "unidentified": list(self.unidentified),
            "predicted": self.before.report(),
            "fitted": self.after.report(),
            "best": self.best and self.best.report(),
            "notes": list(self.notes),
        }


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
