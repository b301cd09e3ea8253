"""A step's communication for people: a rank's collectives in order, the sums by axis, and a trace of all ranks."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from trainwright.present.parts import section, table
from trainwright.present.trace import events_json
from trainwright.spec.run import Run
from trainwright.spec.timeline import Event
from trainwright.spec.traffic import Collective, Traffic
from trainwright.spec.units import bytes_text, seconds_text

COMPUTE, COMMUNICATION, WAITING = TRACKS = ("compute", "communication", "waiting")
"""A rank's tracks: acts and what follows them, with the collectives that nothing runs beside inside; from each
call to when it was waited for; and the waits."""
MOST_BESIDE = 3


def traffic_view(traffic: Traffic, rank: int) -> RenderableType:
    """A rank's rows and sums."""
    columns = [("phase", "<"), ("where", "<"), ("operation", "<"), ("axis", "<"), ("ranks", "<"), ("type", "<")]
    columns += [("bytes", ">"), ("times", ">"), ("beside", "<")]
    rows = [
        [
            row.first.phase,
            row.first.where or "-",
            row.first.operation,
            row.first.axis,
            ranks_text(row.first),
            row.first.dtype,
            f"{row.first.bytes:,}",
            str(row.count),
            beside_text(row.beside),
        ]
        for row in traffic.rows(rank)
    ]
    if not rows:
        return section(f"Rank {rank} talks to nobody")
    return Group(
        section(f"What rank {rank} sends, in order; those that are alike on one row", table(columns, rows)),
        section("In all", table(*_totals(traffic, rank))),
    )


def ranks_text(collective: Collective) -> str:
    """`0 1`, or of a send `0>2`; the ends of a long row."""
    ranks = collective.ranks
    if collective.operation in ("send", "receive"):
        return ">".join(map(str, ranks))
    return " ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def beside_text(beside: Sequence[str]) -> str:
    """What it overlaps, the first few."""
    more = len(beside) - MOST_BESIDE
    return "; ".join(beside[:MOST_BESIDE]) + (f"; {more} more" if more > 0 else "") if beside else "-"


def _totals(traffic: Traffic, rank: int) -> tuple[list[tuple[str, str]], list[list[str]]]:
    columns = [("axis", "<"), ("operation", "<"), ("times", ">"), ("bytes", ">")]
    rows = [
        [axis, operation, f"{count:,}", bytes_text(total)]
        for (axis, operation), (count, total) in traffic.totals(rank).items()
    ]
    return columns, rows


def traffic_json(run: Run, traffic: Traffic) -> str:
    """The whole step of every rank, as a trace."""
    layout = run.layout
    processes = [f"rank {rank}, {_place_text(run, rank)}" for rank in range(layout.world)]
    end_s = max(each.end_s for each in traffic.acts)
    head = {"run": run.name, "step": seconds_text(end_s), "ranks": layout.world}
    events = sorted(_events(traffic), key=lambda event: (event.rank, TRACKS.index(event.track), event.start_s))
    return events_json(head, processes, TRACKS, events)


def _place_text(run: Run, rank: int) -> str:
    """`tp 0, pp 1` of the axes that there are."""
    at = run.layout.coordinate(rank)._asdict()
    return ", ".join(f"{axis} {place}" for axis, place in at.items() if getattr(run.layout, axis) > 1) or "alone"


def _events(traffic: Traffic) -> Iterator[Event]:
    for act in traffic.acts:
        yield Event(act.rank, COMPUTE, act.name, act.start_s, act.end_s, {})
    for each in traffic.collectives:
        args = {
            "phase": each.phase,
            "act": each.act,
            "where": each.where,
            "ranks": list(each.ranks),
            "dtype": each.dtype,
            "bytes": each.bytes,
            "beside": list(each.beside),
        }
        name = f"{each.axis} {each.operation}"
        yield Event(each.rank, COMMUNICATION, name, each.start_s, each.end_s, args)
        yield Event(each.rank, WAITING, f"for {name}", each.end_s - each.waited_s, each.end_s, {})
