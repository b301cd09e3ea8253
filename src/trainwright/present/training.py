"""A run that was trained, for people: how the loss went and how fast it was."""

import math
from collections.abc import Sequence

from rich.console import RenderableType

from trainwright.present.parts import facts, section, sparkline
from trainwright.spec.record import StepRecord
from trainwright.spec.run import Run
from trainwright.spec.units import bytes_text, count_text, seconds_text


def training_view(run: Run, records: Sequence[StepRecord]) -> RenderableType:
    """The course of the loss, and the last step in full."""
    if not records:
        return section(f"{run.name} ({run.hash}): no steps")
    first, last = records[0], records[-1]
    rows = [
        ("loss", f"{first.loss:.3f} {sparkline([record.loss for record in records])} {last.loss:.3f}"),
        (
            "last step",
            f"{seconds_text(last.step_s)}, {count_text(last.tokens_per_s)} tokens/s, MFU {last.mfu:.1%}",
        ),
        ("gradient", f"norm {last.grad_norm:.3g} before clipping"),
        ("memory", f"{bytes_text(last.peak_bytes)} at the peak, in tensors"),
    ]
    lost = next((record.step for record in records if not math.isfinite(record.loss)), None)
    if lost is not None:
        rows.insert(1, ("diverged", f"the loss is no finite number from step {lost} on"))
    steps = (
        f"{len(records)} step{'s' if len(records) > 1 else ''} of {count_text(run.recipe.tokens_per_step)} tokens"
    )
    return section(f"Trained {run.name} ({run.hash}): {steps} on {run.layout.world} processes", facts(rows))
