"""The parts that views are put together from: headings, lists of facts, bars, tables.

Views are read on 80 columns and without colour: a bar stands beside its number, never instead of it.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainwright.spec.units import seconds_text

BAR_COLUMNS = 30
EIGHTHS = " ▏▎▍▌▋▊▉"
SPARKS = "▁▂▃▄▅▆▇█"
NO_NUMBER = "×"


def headline(text: str, below: str = "") -> RenderableType:
    """The first line of a view, and a line that explains it."""
    return Group(Text(text, style="bold cyan"), *([Text(below, style="dim")] if below else []))


def step_heading(place: str, what: str, seconds: float) -> RenderableType:
    """The beginning of one of several steps of something long, with the time that has gone by."""
    return Group(Text(""), Rule(f"{place}  {what}  ({seconds_text(seconds)})", align="left", characters="─"))


def section(title: str, *content: RenderableType) -> RenderableType:
    """A title, and below it indented content."""
    return Group(
        Text(""), Text(title, style="bold"), *(Padding(part, (0, 0, 0, 2), expand=False) for part in content)
    )


def facts(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and what is to be said of them; long texts wrap within their column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def bars(rows: Sequence[tuple[str, float, str]], whole: float) -> RenderableType:
    """Names with a value each: its text, its share of `whole`, and a bar as long as the share."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, style="cyan")
    for name, value, text in rows:
        share = value / whole if whole > 0 else 0.0
        grid.add_row(name, text, f"{share:.1%}", bar(share))
    return grid


def bar(share: float, columns: int = BAR_COLUMNS) -> str:
    """A bar of `share` of `columns`, to an eighth of a column; cut at `columns`."""
    eighths = round(min(max(share, 0.0), 1.0) * columns * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float], columns: int = 60) -> str:
    """A row of values as block characters, lowest to highest; the mean of its share where there are more
    values than columns. What is no finite number is a cross."""
    if not values:
        return ""
    columns = min(columns, len(values))
    edges = [round(at * len(values) / columns) for at in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        SPARKS[round((mean - low) / span * (len(SPARKS) - 1))] if math.isfinite(mean) else NO_NUMBER
        for mean in means
    )


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str | Text]]) -> RenderableType:
    """A table; a column is its title and "<" or ">" for where it is flushed to. Numbers are never cut."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", collapse_padding=True)
    for title, flush in columns:
        numeric = flush == ">"
        made.add_column(title, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def bullets(lines: Iterable[str]) -> RenderableType:
    """Sentences, one below the other."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    return grid
