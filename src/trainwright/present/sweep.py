"""A sweep for people: a row for each legal point, what the others broke, and lines of step time and MFU as SVG."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from trainwright.present.parts import bar, headline, section, table
from trainwright.present.svg import COLOURS, svg
from trainwright.spec.answers import Prediction
from trainwright.spec.model import CONVENTION_TEXT
from trainwright.spec.sweep import GPUS, Sweep, SweepPoint
from trainwright.spec.units import bytes_text, count_text, scaled, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BAR_COLUMNS = 8
MOST_NAMED_LINES = 24
MARKERS = "osD^v"
WIDE_RANGE = 8.0
"""Largest over smallest value from which on an axis is logarithmic."""


def sweep_view(sweep: Sweep) -> RenderableType:
    """Headline, table, budget, and the points that are no legal runs."""
    points = len(sweep.points) + len(sweep.illegal)
    counted = f"{points:,} points: {len(sweep.points):,} legal, of which {len(sweep.fitting):,} fit"
    parts = [
        headline(f"{sweep.run_name} over {', '.join(sweep.fields)}", counted + _best_text(sweep)),
        "",
        table(*_scaling_table(sweep) if sweep.is_over_gpus else _table(sweep)),
        _counted(sweep),
    ]
    if any(each.prediction.days is not None for each in sweep.points):
        parts.append(section("The whole budget", table(*_budget_table(sweep))))
    if sweep.illegal:
        rows = [[*_values(sweep, each.values), each.reason] for each in sweep.illegal]
        columns = [*_value_columns(sweep), ("reason", "<")]
        parts.append(
            section(
                f"Not legal ({len(sweep.illegal):,} of {len(sweep.points) + len(sweep.illegal):,})",
                table(columns, rows),
            )
        )
    return Group(*parts)


def _best_text(sweep: Sweep) -> str:
    """The fastest point; on more and more devices that is the first one and says nothing."""
    if sweep.is_over_gpus or sweep.fastest is None:
        return ""
    return f"; fastest per device: {values_text(sweep, sweep.fastest.values)}"


def field_text(sweep: Sweep, field: str) -> str:
    """The last part of a dotted field, where no other field ends alike."""
    name = field.rpartition(".")[2]
    alike = [each for each in sweep.fields if each.rpartition(".")[2] == name]
    return ("devices" if field == GPUS else name) if len(alike) == 1 else field


def values_text(sweep: Sweep, values: dict[str, Any]) -> str:
    """`micro_batch 2, recompute full`."""
    return ", ".join(f"{field_text(sweep, field)} {value_text(values[field])}" for field in sweep.fields)


def value_text(value: Any) -> str:
    """A value as `--set` takes it, but thousands told apart."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def _value_columns(sweep: Sweep) -> list[tuple[str, str]]:
    return [(field_text(sweep, field), "<") for field in sweep.fields]


def _values(sweep: Sweep, values: dict[str, Any]) -> list[str]:
    return [value_text(values[field]) for field in sweep.fields]


Table = tuple[list[tuple[str, str]], list[list[str]]]
"""Columns and rows."""


def _table(sweep: Sweep) -> Table:
    """With a bar for the step's time, and the number of devices where it differs."""
    differ = len({each.prediction.layout.world for each in sweep.points}) > 1
    columns = [*_value_columns(sweep), *([("devices", ">")] if differ else []), ("fits", "<"), ("step", ">")]
    columns += [("", "<"), ("tok/s/device", ">"), ("MFU", ">"), ("peak", ">")]
    longest_s = max(each.prediction.step_s for each in sweep.points)
    rows = [
        [
            *_values(sweep, each.values),
            *([f"{each.prediction.layout.world:,}"] if differ else []),
            _fits(each.prediction),
            seconds_text(each.prediction.step_s),
            bar(each.prediction.step_s / longest_s, BAR_COLUMNS),
            f"{each.prediction.tokens_per_s_per_device:,.1f}",
            f"{each.prediction.mfu:.1%}",
            bytes_text(each.prediction.peak_bytes),
        ]
        for each in sweep.points
    ]
    return columns, rows


def _scaling_table(sweep: Sweep) -> Table:
    """With a bar for the MFU, and the cause whose part of the step grew most since the point before."""
    columns = [*_value_columns(sweep), ("fits", "<"), ("step", ">"), ("tokens/s", ">")]
    columns += [("per device", ">"), ("MFU", ">"), ("", "<"), ("grows most", "<")]
    growths = sweep.growths()
    rows = []
    for place, each in enumerate(sweep.points):
        growth = growths.get(place)
        rows.append(
            [
                *_values(sweep, each.values),
                _fits(each.prediction),
                seconds_text(each.prediction.step_s),
                count_text(each.tokens_per_s),
                f"{each.prediction.tokens_per_s_per_device:,.1f}",
                f"{each.prediction.mfu:.1%}",
                bar(each.prediction.mfu, BAR_COLUMNS),
                f"{growth.cause} {growth.before:.1%} to {growth.after:.1%}" if growth else "-",
            ]
        )
    return columns, rows


def _budget_table(sweep: Sweep) -> Table:
    columns = [*_value_columns(sweep), ("device-hours", ">"), ("days", ">"), ("USD", ">")]
    rows = []
    for each in sweep.points:
        hours, days, usd = each.prediction.gpu_hours, each.prediction.days, each.prediction.cost_usd
        texts = (
            count_text(hours) if hours is not None else "-",
            f"{days:,.1f}" if days is not None else "-",
            count_text(usd) if usd is not None else "-",
        )
        rows.append([*_values(sweep, each.values), *texts])
    return columns, rows


def _fits(prediction: Prediction) -> str:
    return "yes" if prediction.fits else "NO"


def _counted(sweep: Sweep) -> str:
    """What MFU is a fraction of, beside the absolute rate, and what it counts."""
    predictions = [each.prediction for each in sweep.points]
    peaks = {(each.peak_flops_per_s, each.peak_format) for each in predictions}
    rates = [each.flops_per_s_per_device for each in predictions]
    of = " or ".join(f"{scaled(peak, 'FLOP/s')} (dense {name} peak)" for peak, name in sorted(peaks))
    span = " to ".join(dict.fromkeys(scaled(rate, "FLOP/s") for rate in (min(rates), max(rates))))
    return f"MFU of {of}: {span} per device; counted: {CONVENTION_TEXT[predictions[0].convention]}"


def sweep_svg(sweep: Sweep) -> str:
    """Step time above and MFU below against the first field, a line for each choice of the other fields."""
    lines = sweep.lines()
    named = len(sweep.fields) > 1 and len(lines) <= MOST_NAMED_LINES

    def draw(figure: "Figure") -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for (others, places), (marker, colour) in zip(lines.items(), _looks(), strict=False):
            points = [sweep.points[place] for place in places]
            label = ", ".join(
                f"{field_text(sweep, field)} {each}" for field, each in zip(sweep.fields[1:], others, strict=True)
            )
            for axes, values in (
                (upper, [each.prediction.step_s for each in points]),
                (lower, [100 * each.prediction.mfu for each in points]),
            ):
                _line(axes, sweep, points, values, marker, colour).set_label(label)
        if named:
            upper.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
        elif len(lines) > 1:
            upper.set_title(f"{len(lines):,} lines", fontsize=8, loc="right")
        _dress(figure, upper, lower, sweep)

    return svg(draw, 9.0 if named else 7.0, 6.0)


def _looks() -> Iterator[tuple[str, str]]:
    """Marker and colour of line after line."""
    for at in cycle(range(len(MARKERS) * len(COLOURS))):
        yield MARKERS[at // len(COLOURS)], COLOURS[at % len(COLOURS)]


def _line(
    axes: "Axes", sweep: Sweep, points: Sequence[SweepPoint], values: list[float], marker: str, colour: str
) -> "Line2D":
    """A line with a mark for each point, hollow where it doesn't fit."""
    places = [_abscissa(sweep, each) for each in points]
    (line,) = axes.plot(places, values, linewidth=1.3, markersize=5, marker=marker, color=colour)
    for x, y, each in zip(places, values, points, strict=True):
        if not each.prediction.fits:
            axes.plot([x], [y], marker=marker, color=colour, markerfacecolor="white", markersize=5)
    return line


def _categories(sweep: Sweep) -> list[str]:
    """The first field's values, in order, as texts."""
    return list(dict.fromkeys(value_text(each.values[sweep.fields[0]]) for each in sweep.points))


def _abscissa(sweep: Sweep, point: SweepPoint) -> float:
    value = point.values[sweep.fields[0]]
    return value if sweep.is_numeric else _categories(sweep).index(value_text(value))


def _dress(figure: "Figure", upper: "Axes", lower: "Axes", sweep: Sweep) -> None:
    """Titles, names of axes, and a tick at each value."""
    first = sweep.fields[0]
    figure.suptitle(f"{sweep.run_name} over {', '.join(sweep.fields)}", fontsize=10)
    upper.set_ylabel("step (s)")
    lower.set_ylabel("MFU (%)")
    lower.set_xlabel("devices, at the same global batch" if first == GPUS else first)
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    categories = _categories(sweep)
    places = sorted({_abscissa(sweep, each) for each in sweep.points})
    if sweep.is_numeric and places[0] > 0 and places[-1] / places[0] >= WIDE_RANGE:
        lower.set_xscale("log")
    lower.set_xticks(
        places, [value_text(place) for place in places] if sweep.is_numeric else categories, fontsize=8
    )
    lower.set_xticks([], minor=True)
    hollow = len(sweep.fitting) < len(sweep.points)
    counted = _counted(sweep) + ("\nhollow: does not fit" if hollow else "")
    figure.text(0.01, 0.01, counted, fontsize=6)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
