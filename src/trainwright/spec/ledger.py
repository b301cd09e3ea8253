"""Where the time and the memory go: seconds and bytes by cause. Prediction and measurement both return one,
and `seen - predicted` compares them."""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from trainwright.spec.base import Noun

SecondsCause = Literal[
    "matmul",
    "attention",
    "elementwise",
    "quantize",
    "launch",
    "recompute",
    "tp",
    "cp",
    "ep",
    "pp",
    "dp",
    "bubble",
    "core_sharing",
    "optimizer",
    "straggling",
    "host",
    "software",
]
"""Causes of a step's seconds; they sum to the step.

matmul, attention, elementwise  compute of forward and backward
quantize      casts of activations, weights and gradients to fp8 or fp4
launch        fixed cost of starting operations
recompute     forward work done again in backward
tp, cp, ep, pp, dp  communication of the axis that nothing hides (exposed)
bubble        waiting for other pipeline stages
core_sharing  waiting for a core where a node has more ranks than cores
optimizer     clipping and the update
straggling    waiting for the slowest of many ranks
host          the program around the operations: data, logging, Python, launches that the device waits for
software      what this generation of software takes beyond all of these; negative where it is faster
"""

BytesCause = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "communication",
    "framework",
]
"""Causes of a rank's bytes at its peak; they sum to the peak.

parameters    master and compute copies of the weights
gradients     accumulated gradients
optimizer     moments
activations   what layers keep for backward, and the recomputed layer's working set
logits        output of the head and the loss's working set
communication buffers of gathers, reductions and sends
framework     context, communicators, allocator fragments
"""

Cause = TypeVar("Cause", SecondsCause, BytesCause)

SECONDS_CAUSES: tuple[SecondsCause, ...] = get_args(SecondsCause)
BYTES_CAUSES: tuple[BytesCause, ...] = get_args(BytesCause)


class Ledger(Noun):
    """Seconds and bytes by cause. Causes that are absent are zero."""

    seconds: dict[SecondsCause, float] = {}  # noqa: RUF012  (pydantic copies defaults)
    bytes: dict[BytesCause, float] = {}  # noqa: RUF012

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(seconds=_sum(self.seconds, other.seconds, 1), bytes=_sum(self.bytes, other.bytes, 1))

    def __sub__(self, other: "Ledger") -> "Ledger":
        return Ledger(seconds=_sum(self.seconds, other.seconds, -1), bytes=_sum(self.bytes, other.bytes, -1))


def _sum(left: Mapping[Cause, float], right: Mapping[Cause, float], sign: int) -> dict[Cause, float]:
    return {cause: left.get(cause, 0) + sign * right.get(cause, 0) for cause in {**left, **right}}


SEEN_SECONDS: Mapping[str, tuple[SecondsCause, ...]] = {
    "compute": (
        "matmul",
        "attention",
        "elementwise",
        "quantize",
        "launch",
        "recompute",
        "core_sharing",
        "straggling",
        "software",
    ),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "pp": ("pp", "bubble"),
    "dp": ("dp",),
    "optimizer": ("optimizer",),
    "host": ("host",),
}
"""What a running program can tell apart, and the predicted causes that each of its causes sums up."""

STEP_SECONDS: Mapping[str, str] = {
    "compute": "compute",
    "tp": "tp",
    "cp": "cp",
    "ep": "ep",
    "pp": "pp",
    "bubble": "pp",
    "dp": "dp",
    "optimizer": "optimizer",
    "data": "host",
    "host": "host",
}
"""What a clock tells apart in every step, and the key of `SEEN_SECONDS` that each belongs to.

bubble        waiting for a tensor of another stage, and at the step's end for the stages that finish last; what of
              such a wait its transfer took is in it, as one rank can't tell the two apart
pp            sends, sums over stages, and transfers that are not overlapped
data          making the batch
"""


def seen_seconds(step_seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the keys of `STEP_SECONDS` as seconds by those of `SEEN_SECONDS`."""
    seconds = dict.fromkeys(SEEN_SECONDS, 0.0)
    for cause, value in step_seconds.items():
        seconds[STEP_SECONDS[cause]] += value
    return seconds


SEEN_BYTES: Mapping[str, tuple[BytesCause, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "working set": ("activations", "logits", "communication"),
}
"""The same for bytes: what is live at the peak and is no state is the working set."""
