"""A run that was trained, for people: how the loss went and how fast it was."""

import math
from collections.abc import Sequence

from rich.console import RenderableType

from trainwright.present.parts import facts, section, sparkline
from trainwright.spec.model import CONVENTION_TEXT
from trainwright.spec.record import RankRecord, StepRecord, StepSeconds
from trainwright.spec.run import Run
from trainwright.spec.units import bytes_text, count_text, scaled, seconds_text

LEAST_SHARE = 0.005
"""Of a step: smaller causes aren't named in a line."""


def causes_text(seconds: StepSeconds, step: int) -> str:
    """Where a step's time went on its rank, largest first: `compute 71%, dp 12%`; names the step where it is
    another than `step`."""
    whole = sum(seconds.seconds.values()) or 1.0
    ranked = sorted(seconds.seconds.items(), key=lambda item: -item[1])
    text = ", ".join(f"{cause} {value / whole:.0%}" for cause, value in ranked if value > LEAST_SHARE * whole)
    if seconds.checkpoint_s:
        text += f", and a save of {seconds_text(seconds.checkpoint_s)}"
    return text if seconds.step == step else f"step {seconds.step}: {text}"


def utilization_text(run: Run, record: StepRecord) -> str:
    """MFU and HFU of a step with what they count and against which peak, beside FLOP/s."""
    fmt = run.recipe.product_format(run.cluster)
    peak_flops_per_s = run.cluster.peak(fmt) or 0.0
    return (
        f"MFU {record.mfu:.1%}, HFU {record.hfu:.1%} of {scaled(peak_flops_per_s, 'FLOP/s')} (dense {fmt} peak), "
        f"{scaled(record.flops_per_s, 'FLOP/s')} per device; MFU counts {CONVENTION_TEXT['full']}; HFU counts it"
    )


def training_view(run: Run, records: Sequence[StepRecord], ranks: Sequence[RankRecord] = ()) -> RenderableType:
    """The course of the loss, the last step in full, and the memory of the fullest rank by cause."""
    if not records:
        return section(f"{run.name} ({run.hash}): no steps")
    first, last = records[0], records[-1]
    rows = [
        ("loss", f"{first.loss:.3f} {sparkline([record.loss for record in records])} {last.loss:.3f}"),
        (
            "last step",
            f"{seconds_text(last.step_s)}, {count_text(last.tokens_per_s)} tokens/s",
        ),
        ("gradient", f"norm {last.grad_norm:.3g} before clipping"),
        ("memory", f"{bytes_text(last.peak_bytes)} at the peak, in tensors"),
    ]
    if last.mfu:
        rows.insert(2, ("utilization", utilization_text(run, last)))
    lost = next((record.step for record in records if not math.isfinite(record.loss)), None)
    if lost is not None:
        rows.insert(1, ("diverged", f"the loss is no finite number from step {lost} on"))
    if ranks:
        rows[-1] = ("memory", _memory_text(max(ranks, key=lambda each: each.peak_bytes)))
    steps = (
        f"{len(records)} step{'s' if len(records) > 1 else ''} of {count_text(run.recipe.tokens_per_step)} tokens"
    )
    return section(f"Trained {run.name} ({run.hash}): {steps} on {run.layout.world} processes", facts(rows))


def _memory_text(rank: RankRecord) -> str:
    """A rank's peak by cause."""
    working = rank.peak_bytes - sum(rank.bytes.values())
    parts = ", ".join(
        f"{cause} {bytes_text(value)}" for cause, value in {**rank.bytes, "working set": working}.items()
    )
    return f"{bytes_text(rank.peak_bytes)} at the peak of rank {rank.rank}, in tensors: {parts}"
