"""What matmuls in a low precision buy a plan over the best one in bf16, and why it isn't the ratio of the peaks.

If all of a step went faster by the ratio of the two peaks, each cause would take what it takes without, divided by
that ratio. What a cause takes beyond that is what keeps the step from it; these sum to what the step lacks.
"""

from typing import Any

from trainwright.spec.answers import Prediction
from trainwright.spec.base import Noun, Positive, Sequence


class CauseGain(Noun):
    """Seconds of one cause in both steps."""

    cause: str
    plain_s: float
    low_s: float

    def beyond_s(self, ratio: float) -> float:
        """What it takes beyond its part of a step that is `ratio` times as fast."""
        return self.low_s - self.plain_s / ratio


class MatmulRate(Noun):
    """Matmuls of one shape on a rank, in both formats."""

    name: str
    m: float
    k: float
    n: float
    groups: float
    """Experts that are multiplied at once; 1 of a plain one."""
    share: float
    """Of the seconds of all of the step's matmuls."""
    plain_flops_per_s: float
    low_flops_per_s: float

    @property
    def speedup(self) -> float:
        return self.low_flops_per_s / self.plain_flops_per_s


class LayerBytes(Noun):
    """What one layer keeps for backward of a microbatch where nothing is recomputed, in the low plan's layout."""

    plain_bytes: float
    low_bytes: float


class Gathers(Noun):
    """Weights of the fullest rank, gathered once over those that shard them."""

    plain_bytes: float
    low_bytes: float
    """With `Recipe.gather_fp8`."""
    step_s: float
    """Of the plan with `gather_fp8`."""


class PrecisionGain(Noun):
    """A plan beside the best one of the same question without low precision."""

    plan: Prediction
    without: Prediction | None = None
    """None where nothing fits without."""
    alike: Prediction | None = None
    """The plan's own layout and recipe without low precision, fitting or not; None where that is `without`."""
    peak_ratio: Positive
    """Of the formats that the matmuls run in."""
    low_flops_share: float
    """Of the FLOPs that the busiest rank computes, those of low-precision matmuls."""
    causes: Sequence[CauseGain] = ()
    matmuls: Sequence[MatmulRate] = ()
    layer: LayerBytes
    gathers: Gathers | None = None
    """None where nothing is sharded, or weights are gathered cast already."""
    usd_per_device_hour: float | None = None

    @property
    def speedup(self) -> float | None:
        """Step in bf16 over the plan's."""
        return None if self.without is None else self.without.step_s / self.plan.step_s

    def usd_per_trillion_tokens(self, plan: Prediction) -> float | None:
        """What a trillion tokens cost by a plan, if nothing fails."""
        if self.usd_per_device_hour is None:
            return None
        hours = 1e12 / plan.tokens_per_s_per_device / 3600
        return hours * self.usd_per_device_hour

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        ratio = self.peak_ratio
        return {
            "without": self.without and self.without.report(),
            "alike": self.alike and self.alike.report(),
            "speedup": self.speedup,
            "peak_ratio": ratio,
            "low_flops_share": self.low_flops_share,
            "causes": [each.plain() | {"beyond_s": each.beyond_s(ratio)} for each in self.causes],
            "matmuls": [each.plain() | {"speedup": each.speedup} for each in self.matmuls],
            "layer_kept_bytes": self.layer.plain(),
            "gathers": self.gathers and self.gathers.plain(),
            "usd_per_trillion_tokens": {
                "without": self.without and self.usd_per_trillion_tokens(self.without),
                "low": self.usd_per_trillion_tokens(self.plan),
            },
        }
