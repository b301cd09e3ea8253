"""The waterfall from a device's peak to its MFU, for people: what each thing takes, and what is left after it."""

from rich.console import RenderableType

from trainwright.present.parts import bar, section, table
from trainwright.spec.answers import Prediction
from trainwright.spec.units import scaled
from trainwright.spec.waterfall import waterfall_of

BAR_COLUMNS = 20
COLUMNS = [("", "<"), ("points", ">"), ("per device", ">"), ("left", ">"), ("", "<")]


def waterfall_section(prediction: Prediction) -> RenderableType:
    """From peak to MFU, in percentage points of MFU and FLOP/s of a device; stands below what MFU counts."""
    fell = waterfall_of(prediction)
    left = 1.0
    rows = [_row("peak", "", scaled(fell.peak_flops_per_s, "FLOP/s"), left)]
    for each in fell.bars:
        left += each.share
        rows.append(_row(each.name, f"{100 * each.share:+.2f}", scaled(each.flops_per_s, "FLOP/s"), left))
    rows.append(_row("MFU", "", scaled(prediction.flops_per_s_per_device, "FLOP/s"), left))
    return section(f"From the dense {prediction.peak_format} peak to MFU, counted as above", table(COLUMNS, rows))


def _row(name: str, points: str, rate: str, left: float) -> list[str]:
    return [name, points, rate, f"{left:.1%}", bar(left, BAR_COLUMNS)]
