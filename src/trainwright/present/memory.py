"""Memory over the time of a step for people: each rank's peak with its cause and its moment, the course of one
rank as a row of blocks, and as SVG the bytes by cause, stacked over time."""

from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from trainwright.present.parts import facts, headline, section, sparkline, table
from trainwright.present.svg import COLOURS, svg
from trainwright.spec.ledger import BYTES_CAUSES, BytesCause
from trainwright.spec.memory import RankMemory, StepMemory
from trainwright.spec.units import GIB, bytes_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN: tuple[BytesCause, ...] = (
    *("parameters", "gradients", "optimizer", "framework", "communication", "activations", "logits"),
)
"""From the bottom up: what stays, below what comes and goes."""

TITLES = {"parameters": "parame-\nters", "activations": "activa-\ntions", "communication": "communi-\ncation"}
"""Of columns, where a name is wider than its numbers."""

SPARK_COLUMNS = 40
MOST_DRAWN = 2_000
"""Columns; of more the fullest in each part of the step are drawn."""
NEAR = 0.4
"""The device's memory is drawn where the peak comes to this share of it."""


def memory_view(memory: StepMemory, rank: RankMemory) -> RenderableType:
    """Peaks of all ranks, and the course of `rank`."""
    fullest = memory.fullest
    room = memory.capacity_bytes - fullest.peak_bytes
    fits = f"{bytes_text(room)} stay free" if room >= 0 else f"{bytes_text(-room)} are missing"
    told = f"fullest: rank {fullest.pp_rank} with {bytes_text(fullest.peak_bytes)} of "
    told += f"{bytes_text(memory.capacity_bytes)}; {fits}"
    parts = [
        headline(
            f"{memory.run_name}: memory over a step of {seconds_text(memory.step_s)}", told + _shortened(memory)
        ),
        section("When each pipeline rank is fullest", table(*_moments(memory))),
        section("What it holds then", table(*_causes(memory))),
        section(f"Pipeline rank {rank.pp_rank} over the step", facts(_course(rank))),
    ]
    return Group(*parts)


def _shortened(memory: StepMemory) -> str:
    if memory.num_microbatches == memory.of_microbatches:
        return ""
    return f"\na step of {memory.num_microbatches:,} microbatches, instead of the run's {memory.of_microbatches:,}"


Table = tuple[list[tuple[str, str]], list[list[str]]]
"""Columns and rows."""


def _moments(memory: StepMemory) -> Table:
    rows = [
        [
            str(each.pp_rank),
            bytes_text(each.peak_bytes),
            seconds_text(each.borders_s[each.peak]),
            each.doing[each.peak],
        ]
        for each in memory.ranks
    ]
    return [("rank", ">"), ("peak", ">"), ("from", ">"), ("in", "<")], rows


def _causes(memory: StepMemory) -> Table:
    ledgers = [each.peak_ledger.bytes for each in memory.ranks]
    shown: list[BytesCause] = [cause for cause in BYTES_CAUSES if any(ledger[cause] for ledger in ledgers)]
    rows = [[str(rank), *(bytes_text(ledger[cause]) for cause in shown)] for rank, ledger in enumerate(ledgers)]
    return [("rank", ">"), *((TITLES.get(cause, cause), ">") for cause in shown)], rows


def _course(rank: RankMemory) -> list[tuple[str, str]]:
    """The total, and each cause that changes, from its least to its most."""
    places = rank.fullest(SPARK_COLUMNS)
    courses: list[tuple[str, tuple[float, ...]]] = [("total", rank.total_bytes)]
    courses += [(cause, values) for cause, values in rank.bytes.items() if min(values) < max(values)]
    return [
        (
            name,
            f"{sparkline([values[at] for at in places])}  {bytes_text(min(values))} to {bytes_text(max(values))}",
        )
        for name, values in courses
    ]


def memory_svg(memory: StepMemory, rank: RankMemory) -> str:
    """Bytes by cause of a rank, stacked over the step."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        borders_s, columns = _drawn(rank)
        causes: list[BytesCause] = [cause for cause in DRAWN if any(rank.bytes[cause])]
        # Each column twice, at its beginning and at its end: steps, not slopes.
        times_s = [time_s for border in pairwise(borders_s) for time_s in border]
        stacks = [[rank.bytes[cause][at] / GIB for at in columns for _ in range(2)] for cause in causes]
        axes.stackplot(times_s, *stacks, labels=causes, colors=COLOURS[: len(causes)], linewidth=0)
        _dress(axes, memory, rank)
        figure.tight_layout()

    return svg(draw, 9.0, 4.5)


def _drawn(rank: RankMemory) -> tuple[list[float], list[int]]:
    """Borders and columns: all, or the fullest of each part of the step."""
    count = len(rank.doing)
    if count <= MOST_DRAWN:
        return list(rank.borders_s), list(range(count))
    end_s = rank.borders_s[-1]
    return [end_s * at / MOST_DRAWN for at in range(MOST_DRAWN + 1)], list(rank.fullest(MOST_DRAWN))


def _dress(axes: "Axes", memory: StepMemory, rank: RankMemory) -> None:
    """Titles, names of axes, the peak, and the device's memory."""
    peak_bytes, peak_s = rank.peak_bytes, rank.borders_s[rank.peak]
    told = f"peak {bytes_text(peak_bytes)} of {bytes_text(memory.capacity_bytes)} at {seconds_text(peak_s)}"
    axes.set_title(f"{memory.run_name}, pipeline rank {rank.pp_rank}: {told}", fontsize=9)
    if peak_bytes > NEAR * memory.capacity_bytes:
        axes.axhline(memory.capacity_bytes / GIB, color="black", linestyle="--", linewidth=1, label="memory")
    axes.axvline(peak_s, color="black", linewidth=0.6, linestyle=":")
    axes.set_xlim(0, rank.borders_s[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time in the step (s)")
    axes.set_ylabel("GiB")
    handles, labels = axes.get_legend_handles_labels()
    # The topmost cause first, as it lies.
    axes.legend(
        handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0
    )
