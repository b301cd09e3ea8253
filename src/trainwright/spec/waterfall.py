"""From peak FLOP/s to model FLOP/s: what takes from a device's peak, bar by bar, until its MFU is left.

Each cause of a step's seconds takes its share of the step, as a device at its peak would have computed all the
while. Of matmuls and attention only what they take beyond the time at their formats' peaks is lost; a format
with a lower peak than the one that MFU is a fraction of loses the difference. What is left are the FLOPs that
the busiest rank computes. Last comes what is computed and what is counted: other ranks compute less, and a
convention counts FLOPs that nobody computes and leaves out some that somebody does. All bars sum to the MFU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainwright.spec.answers import ComputedFlops, Prediction, WorkKind
from trainwright.spec.base import Noun, Sequence
from trainwright.spec.ledger import SECONDS_CAUSES, SecondsCause

BELOW_PEAK: Mapping[WorkKind, str] = {
    "matmul": "matmuls below their peak",
    "attention": "attention below its peak",
}
LOWER_PEAK = "formats of a lower peak"
UNEVEN = {True: "other ranks compute more", False: "other ranks compute less"}
COUNTED: Mapping[WorkKind, Mapping[bool, str]] = {
    "matmul": {True: "matmuls counted beyond those computed", False: "matmuls that are not counted"},
    "attention": {True: "attention counted in full", False: "attention that is not counted"},
}
"""By whether more is counted than is computed."""
NOISE = 1e-14
"""Of the peak: what rounding leaves of a bar that is none."""


class Bar(NamedTuple):
    """What one thing adds to the FLOP/s of a device, or takes from them."""

    name: str
    share: float
    """Of the peak; 0.01 is one percentage point of MFU."""
    flops_per_s: float


class Waterfall(Noun):
    """Bars from a device's peak to what it reaches, in the order in which they take."""

    peak_flops_per_s: float
    bars: Sequence[Bar]

    @property
    def mfu(self) -> float:
        return 1.0 + sum(bar.share for bar in self.bars)

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return {
            "peak_tflops_per_gpu": self.peak_flops_per_s / 1e12,
            "bars": [
                {"name": bar.name, "mfu_points": 100 * bar.share, "tflops_per_gpu": bar.flops_per_s / 1e12}
                for bar in self.bars
            ],
            "mfu": self.mfu,
        }


def waterfall_of(prediction: Prediction) -> Waterfall:
    """The waterfall of a predicted step."""
    return waterfall(prediction.ledger.seconds, prediction.peak_flops_per_s, prediction.computed)


def waterfall(
    seconds: Mapping[SecondsCause, float], peak_flops_per_s: float, computed: Mapping[WorkKind, ComputedFlops]
) -> Waterfall:
    """The bars of a step.

    seconds: by cause, all of the step. computed: for each cause that computes a model's FLOPs, what it computes
    and what MFU counts of it.
    """
    step_s = sum(seconds.values())
    at_peak_s = sum(work.at_peak_s for work in computed.values())
    busiest_s = sum(work.busiest_flops for work in computed.values()) / peak_flops_per_s
    mean_s = sum(work.mean_flops for work in computed.values()) / peak_flops_per_s
    lost_s = {BELOW_PEAK[kind]: seconds.get(kind, 0.0) - work.at_peak_s for kind, work in computed.items()}
    lost_s[LOWER_PEAK] = at_peak_s - busiest_s
    lost_s |= {cause: seconds[cause] for cause in SECONDS_CAUSES if cause in seconds and cause not in computed}
    lost_s[UNEVEN[mean_s > busiest_s]] = busiest_s - mean_s
    for kind, work in computed.items():
        more_flops = work.counted_flops - work.mean_flops
        lost_s[COUNTED[kind][more_flops > 0]] = -more_flops / peak_flops_per_s
    shares = {name: -lost / step_s for name, lost in lost_s.items()}
    bars = [Bar(name, share, share * peak_flops_per_s) for name, share in shares.items() if abs(share) > NOISE]
    return Waterfall(peak_flops_per_s=peak_flops_per_s, bars=tuple(bars))
