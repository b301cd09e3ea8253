"""A run with failures for people: how often it fails, three ways to save side by side, replicas, what would change
it; and as SVG the time that counts over intervals and over numbers of devices."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from trainwright.present.parts import bullets, facts, headline, section, table
from trainwright.present.svg import COLOURS, svg
from trainwright.spec.goodput import Goodput, Judged, MttfRow
from trainwright.spec.saving import SAVING_TEXT
from trainwright.spec.units import SECONDS_PER_DAY, bytes_text, count_text, scaled, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = "Ways to save, to storage or to other nodes' memory"

NEAR_LINE = 0.25
"""How far off its line a published point may be without a word."""


def goodput_view(found: Goodput) -> RenderableType:
    """All that `goodput` answers."""
    below = (
        f"a failure every {seconds_text(found.mttf_s)} (mean); {seconds_text(found.useful_s)} of work in steps of "
        f"{seconds_text(found.step_s)}"
    )
    parts = [
        headline(f"{found.run_name} on {found.devices:,} x {found.device}, with failures", below),
        section("Failures", facts(_failure_facts(found))),
        section(WAYS, table(*_ways(found.judged)), bullets(_ways_notes(found))),
        section("The whole run, simulated", *_whole(found)),
    ]
    if found.placement is not None:
        parts.append(section("Replicas in memory", *_placement(found)))
    parts.append(section("Mean time to failure by size", table(*_mttf(found.mttf)), bullets(_mttf_notes(found))))
    changes = [f"{each.text}: {each.ettr:.2%} of the time counts" for each in found.changes]
    parts.append(section("What would change it (the best way to save, at its best interval)", bullets(changes)))
    return Group(*parts)


def _failure_facts(found: Goodput) -> list[tuple[str, str]]:
    rate = f"{1000 * found.failures_per_node_day:.2f} in 1,000 days of a node, {found.nodes:,} nodes"
    return [
        ("rate", rate),
        ("", f"({found.failures_source})"),
        ("restart", _restart_text(found)),
        (
            "spares",
            f"{found.spares:,} are enough at 99% of moments; {found.nodes_in_repair:.1f} nodes are in repair",
        ),
        ("state", f"{bytes_text(found.saved_bytes)}, {bytes_text(found.saved_bytes / found.devices)} a device"),
        ("storage", f"{scaled(found.storage_bytes_per_s, 'B/s')} from all nodes together"),
    ]


def _restart_text(found: Goodput) -> str:
    """Its parts, each with the kind of source that it has."""
    recovery = found.recovery
    parts = [
        ("detect_s", f"noticed after {seconds_text(recovery.detect_s)}"),
        ("restart_s", f"ready to load after {seconds_text(recovery.restart_s)} more"),
        ("repair_s", f"a node is back after {seconds_text(recovery.repair_s)}"),
    ]
    return ", ".join(f"{text} ({found.recovery_sources[name].partition(':')[0]})" for name, text in parts)


Table = tuple[list[tuple[str, str]], list[list[str]]]
"""Columns and rows."""


def _ways(judged: tuple[Judged, ...]) -> Table:
    """One row a quantity, one column a way: they are to be compared."""
    rows = [
        ("a step waits for a save", [seconds_text(each.saving.blocked_s) for each in judged]),
        ("and it counts after", [seconds_text(_lag_s(each)) for each in judged]),
        ("restart", [seconds_text(_restart_s(each)) for each in judged]),
        ("recovered from memory", [f"{each.saving.memory_share:.4%}" for each in judged]),
        ("interval", [seconds_text(each.interval_s) for each in judged]),
        ("in steps", [f"{each.interval_steps:,}" for each in judged]),
        ("Young", [seconds_text(each.young_s) for each in judged]),
        ("Daly", [seconds_text(each.daly_s) for each in judged]),
        ("exact optimum", [seconds_text(each.exact_s) for each in judged]),
        ("CheckFreq, in steps", [f"{each.checkfreq_steps:,}" for each in judged]),
        ("storage gets", [_every(each) for each in judged]),
        ("lost with a failure", [seconds_text(each.lost_s) for each in judged]),
        ("ETTR, failures alone", [f"{each.failures_alone:.3%}" for each in judged]),
        (
            "ETTR, first order",
            [f"{each.first_order:.3%}{'' if each.first_order_holds else ' *'}" for each in judged],
        ),
        ("ETTR, complete form", [f"{each.complete:.3%}" for each in judged]),
        ("ETTR, simulated", [_simulated(each) for each in judged]),
    ]
    columns = [("", "<"), *((SAVING_TEXT[each.saving.kind], ">") for each in judged)]
    return columns, [[name, *texts] for name, texts in rows]


def _lag_s(judged: Judged) -> float:
    saving = judged.saving
    return saving.memory_durable_s if saving.kind == "memory" else saving.durable_s


def _restart_s(judged: Judged) -> float:
    saving = judged.saving
    return saving.memory_recover_s if saving.kind == "memory" else saving.recover_s


def _every(judged: Judged) -> str:
    return "each" if judged.storage_every == 1 else f"one in {judged.storage_every:,}"


def _simulated(judged: Judged) -> str:
    seen = judged.simulated
    return "-" if seen is None else f"{seen.ettr:.2%} ± {seen.ettr_error:.2%}"


def _ways_notes(found: Goodput) -> list[str]:
    notes = [f"{SAVING_TEXT[each.saving.kind]}: {note}" for each in found.judged for note in each.notes]
    rates = ", ".join(scaled(found.average_bytes_per_s(each), "B/s") for each in found.judged)
    notes.append(f"storage takes {rates} in the mean")
    return [*found.notes, *notes]


def _whole(found: Goodput) -> list[RenderableType]:
    columns = [("", "<"), ("failures", ">"), ("P10 days", ">"), ("P50", ">"), ("P90", ">")]
    priced = found.usd_per_s is not None
    columns += [("P10 USD", ">"), ("P50", ">"), ("P90", ">")] if priced else []
    days = found.useful_s / SECONDS_PER_DAY
    rows = []
    for each in found.judged:
        seen = each.simulated
        if seen is None:
            continue
        row = [SAVING_TEXT[each.saving.kind], f"{seen.failures:,.1f}"]
        row += [f"{seen.wall_s[name] / SECONDS_PER_DAY:,.1f}" for name in ("p10", "p50", "p90")]
        row += (
            [count_text(each.usd(name, found.usd_per_s) or 0.0) for name in ("p10", "p50", "p90")]
            if priced
            else []
        )
        rows.append(row)
    hours = count_text(found.useful_s * found.devices / 3600.0)
    usd = "" if found.usd_per_s is None else f", {count_text(found.useful_s * found.usd_per_s)} USD"
    told = f"without failures and saves: {days:,.1f} days, {hours} device-hours{usd}; spares are not in the price"
    seen = next((each.simulated for each in found.judged if each.simulated is not None), None)
    if seen is None:
        return [bullets([told])]
    return [table(columns, rows), bullets([told, f"{seen.runs:,} runs of each, seed {seen.seed}"])]


def _placement(found: Goodput) -> list[RenderableType]:
    placed = found.placement
    assert placed is not None
    groups = " and ".join(f"{count:,} groups of {size}" for size, count in placed.groups.items())
    apart = "in different racks" if placed.is_spread else "some in one rack, as a rack has more nodes than groups"
    bounds = any(each.bound is not None for each in placed.lost)
    columns = [
        ("nodes lost at once", ">"),
        ("nothing is lost", ">"),
        *([("GEMINI's bound", ">")] if bounds else []),
    ]
    rows = [
        [f"{each.nodes:,}", f"{each.recovered:.4%}", *([f"{each.bound:.4%}"] if each.bound is not None else [])]
        for each in placed.lost
    ]
    told = f"{placed.replicas} replicas: {groups}, members {apart} (of {placed.nodes_per_rack:,} nodes)"
    return [bullets([told]), table(columns, rows)]


def _mttf(rows: tuple[MttfRow, ...]) -> Table:
    columns = [("devices", ">"), ("this run's rate", ">"), ("RSC-1, 1/N", ">"), ("published", ">"), ("", "<")]
    texts = []
    for each in rows:
        point = each.published
        texts.append(
            [
                f"{each.devices:,}",
                seconds_text(each.mttf_s),
                seconds_text(each.published_line_s),
                "" if point is None else seconds_text(point.mttf_s),
                "" if point is None else point.kind + _off_line(each),
            ]
        )
    return columns, texts


def _off_line(row: MttfRow) -> str:
    assert row.published is not None
    ratio = row.published.mttf_s / row.published_line_s
    return "" if abs(ratio - 1) <= NEAR_LINE else f", {ratio:.2f} of the line"


def _mttf_notes(found: Goodput) -> list[str]:
    return [found.mttf_source]


def goodput_svg(found: Goodput) -> str:
    """The time that counts against the interval, and against the number of devices."""

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        for at, judged in enumerate(found.judged):
            kind, colour = judged.saving.kind, COLOURS[at]
            over = found.over_interval
            # Where a save has no time to end there is no value.
            known = [(x, 100 * y) for x, y in zip(over.x, over.ettr[kind], strict=True) if y > 0]
            # Dashed, as the one below may be the same line.
            look = "--" if kind == "memory" else "-"
            left.plot(*zip(*known, strict=True), look, color=colour, label=SAVING_TEXT[kind])
            left.plot([judged.interval_s], [100 * judged.complete], "o", color=colour, markersize=5)
            if judged.simulated is not None:
                seen = judged.simulated
                left.errorbar(
                    [judged.interval_s], [100 * seen.ettr], [200 * seen.ettr_error], color="black", capsize=3
                )
            if kind in found.over_devices.ettr:
                values = [100 * y for y in found.over_devices.ettr[kind]]
                right.plot(found.over_devices.x, values, look, color=colour, marker="o", markersize=3)
        _dress(left, "work between two saves (s)")
        _dress(right, "devices, each at its best interval")
        right.axvline(found.devices, color="0.7", linewidth=0.8)
        left.set_ylabel("time that counts, ETTR (%)")
        left.legend(fontsize=8, loc="lower center")
        figure.suptitle(
            f"{found.run_name}: {found.devices:,} x {found.device}, a failure every {seconds_text(found.mttf_s)}",
            fontsize=10,
        )
        told = "lines: complete form; bars: simulation, two standard errors; grey: this run"
        figure.text(0.01, 0.01, told, fontsize=6)
        figure.tight_layout(rect=(0, 0.03, 1, 1))

    return svg(draw, 10.0, 4.5)


def _dress(axes: "Axes", name: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(name)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
