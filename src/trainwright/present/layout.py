"""A layout as a picture on the terminal: a box for what holds one pipeline rank's layers once, with its ranks and
their nodes, and a table of the groups with the links that they ride.

Up to `DRAWN_RANKS` ranks all boxes are drawn; of a larger world the first replica, and the others are counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from trainwright.present.parts import facts, headline, section, table
from trainwright.present.plans import layout_text
from trainwright.spec.layout import Coordinate, Layout
from trainwright.spec.wiring import AxisGroups, GroupAxis, Ride, Wiring

DRAWN_RANKS = 256
"""Larger worlds show one replica."""
MOST_STAGES, MOST_ROWS = 16, 8
"""Boxes of one replica, and rows of one box, where not all is drawn."""
MOST_LINES = 16
"""Replicas that each have a line of their own; more of them stand side by side."""
MOST_BOXES = 64
"""More of them are drawn flat, each on one line."""
PICTURE_COLUMNS = 78
LISTED_COLUMNS = 40
"""A row of ranks that is wider is said as a range."""
MOST_RUNS = 4
GAP = 2
"""Columns between boxes."""


class Box(NamedTuple):
    """Stage, a text for each cp rank, nodes, and the ranks."""

    title: str
    rows: list[str]
    nodes: str
    ranks: list[int]


AXIS_TEXT: dict[GroupAxis, str] = {
    "dp_shard": "dp shard",
    "dp_replicate": "dp replicate",
    "expert_dp": "expert dp",
}
"""Of axes whose name reads badly."""


def layout_view(wiring: Wiring) -> RenderableType:
    """All of it: the picture, the stages, the groups and what travels in them."""
    run = wiring.run
    nodes = f"{wiring.nodes:,} node{'s' * (wiring.nodes > 1)} of {run.cluster.node.devices}"
    below = f"{layout_text(run.layout, run.model.is_moe)}; {nodes}"
    fabric = run.cluster.fabric
    domain = f"{fabric.link}, among {wiring.domain_ranks:,} neighbouring ranks"
    if wiring.domain_ranks < fabric.link_domain:
        domain += f" ({fabric.link_domain:,} devices, of which so many hold ranks)"
    return Group(
        headline(f"{run.name}: {run.model.name} on {run.layout.world:,} x {run.cluster.device.name}", below),
        section(f"Ranks, counted {run.layout.order}, innermost first", _how_to_read(run.layout), _picture(wiring)),
        section("Layers of each pipeline rank", facts(_stage_rows(wiring))),
        section("Links", facts([("link", domain), ("network", fabric.network)])),
        section("Groups, and the links that they ride", _groups_table(wiring)),
        section("What travels in them", facts(_carried(wiring.axes))),
    )


def axis_text(axis: GroupAxis) -> str:
    """What an axis is called."""
    return AXIS_TEXT.get(axis, axis)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in few words: `0-7`, `0, 8`, or `0, 8 .. 56` where there are many runs of neighbours."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > MOST_RUNS:
        return f"{texts[0]}, {texts[1]} .. {texts[-1]}"
    return ", ".join(texts)


def rides_text(wiring: Wiring, rides: Mapping[Ride, int]) -> str:
    """The link of an axis' groups by name; how many groups ride what, where they differ."""
    link = wiring.run.cluster.fabric.link
    names = {"alone": "-", "link": link, "network": "network", "both": f"both: {link} inside, network between"}
    if len(rides) == 1:
        return names[next(iter(rides))]
    groups = sum(rides.values())
    return "; ".join(f"{count:,} of {groups:,} groups {names[each]}" for each, count in rides.items())


def stage_text(wiring: Wiring, pp: int) -> str:
    """What a pipeline rank is called: a stage where it holds just one."""
    return f"stage {pp}" if wiring.run.layout.vpp == 1 else f"pp {pp}"


def place_text(name: str, numbers: Sequence[int]) -> str:
    """`node 3`, or `nodes 0-1`."""
    return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {ranks_text(numbers)}"


def _how_to_read(layout: Layout) -> RenderableType:
    """What stands side by side and what is joined."""
    cells = {"cp": "rows are cp ranks", "tp": "columns are tp ranks"}
    inside = [text for axis, text in cells.items() if getattr(layout, axis) > 1]
    texts = ["boxes that are joined are one replica"] if layout.dp > 1 and layout.pp > 1 else []
    texts += [f"in a box, {', '.join(inside)}"] if inside else []
    return Text("; ".join(texts), style="dim") if texts else Group()


def _picture(wiring: Wiring) -> RenderableType:
    return Text("\n".join(_drawn(wiring)))


def _drawn(wiring: Wiring) -> Iterator[str]:
    """The boxes, as many side by side as fit."""
    layout = wiring.run.layout
    whole = layout.world <= DRAWN_RANKS
    stages = range(layout.pp if whole else min(layout.pp, MOST_STAGES))
    replicas = range(layout.dp if whole else 1)
    draw = _flat if len(stages) * len(replicas) > MOST_BOXES else _framed
    boxes = draw({(dp, pp): _box(wiring, dp, pp, whole) for dp in replicas for pp in stages})
    label = len(f"dp {replicas[-1]} ") if layout.dp > 1 else 0
    columns = len(boxes[0, 0][0]) + GAP
    per_line = max(1, (PICTURE_COLUMNS - label) // columns)
    for line in _lines(replicas, stages, per_line, max(1, PICTURE_COLUMNS // (label + columns * len(stages)))):
        parts = [
            _beside([boxes[dp, pp] for pp in held], f"dp {dp} ".ljust(label) if label else "", held[0] > 0)
            for dp, held in line
        ]
        yield from ("".join(row).rstrip() for row in zip(*parts, strict=True))
    if not whole:
        yield from _left_out(wiring, len(stages))


def _lines(replicas: range, stages: range, per_line: int, together: int) -> list[list[tuple[int, range]]]:
    """Which boxes stand on each line: of one replica or, where there are many short ones, of several."""
    if len(stages) > per_line:
        return [[(dp, stages[at : at + per_line])] for dp in replicas for at in stages[::per_line]]
    step = together if len(replicas) > MOST_LINES else 1
    return [[(dp, stages) for dp in replicas[at : at + step]] for at in replicas[::step]]


def _box(wiring: Wiring, dp: int, pp: int, whole: bool) -> Box:
    """What stands in the box of the ranks that hold a pipeline rank's layers in one replica."""
    layout = wiring.run.layout
    rows = [
        [layout.rank(Coordinate(tp=tp, cp=cp, pp=pp, dp=dp)) for tp in range(layout.tp)] for cp in range(layout.cp)
    ]
    ranks = sorted(rank for row in rows for rank in row)
    nodes = sorted({wiring.node_of(rank) for rank in ranks})
    digits = len(str(layout.world - 1))
    listed = whole and layout.tp * (digits + 1) <= LISTED_COLUMNS
    shown = rows if whole else rows[:MOST_ROWS]
    texts = [" ".join(f"{rank:>{digits}}" for rank in row) if listed else ranks_text(row) for row in shown]
    if len(rows) > len(shown):
        texts.append(f"{len(rows) - len(shown):,} more rows")
    return Box(stage_text(wiring, pp), texts, place_text("node", nodes), ranks)


def _framed(boxes: dict[tuple[int, int], Box]) -> dict[tuple[int, int], list[str]]:
    """Frames of one size, with the stage above and the nodes below."""
    inner = 2 + max(len(text) for box in boxes.values() for text in (box.title, *box.rows, box.nodes))
    return {
        at: [
            f"┌{f' {box.title} ':─<{inner}}┐",
            *(f"│{f' {row} ':<{inner}}│" for row in box.rows),
            f"└{f' {box.nodes} ':─<{inner}}┘",
        ]
        for at, box in boxes.items()
    }


def _flat(boxes: dict[tuple[int, int], Box]) -> dict[tuple[int, int], list[str]]:
    """Each on one line: ranks, and nodes."""
    texts = {at: f"[{ranks_text(box.ranks)}: {box.nodes}]" for at, box in boxes.items()}
    columns = max(map(len, texts.values()))
    return {at: [text.ljust(columns)] for at, text in texts.items()}


def _beside(boxes: list[list[str]], label: str, continued: bool) -> list[str]:
    """Boxes in a row, joined where activations pass from one to the next."""
    middle = len(boxes[0]) // 2 if len(boxes[0]) < 4 else 1
    rows = []
    for at in range(len(boxes[0])):
        joint = "─" * GAP if at == middle else " " * GAP
        before = label if at == middle and not continued else " " * len(label)
        rows.append(before + joint.join(box[at] for box in boxes) + " " * GAP)
    return rows


def _left_out(wiring: Wiring, drawn_stages: int) -> Iterator[str]:
    """What is not drawn, and where it is."""
    layout = wiring.run.layout
    if layout.pp > drawn_stages:
        more = layout.pp - drawn_stages
        yield f"and {more:,} more pipeline ranks like these, {_further(layout.stride('pp'))}"
    if layout.dp > 1:
        yield f"and {layout.dp - 1:,} more replicas (dp) like this one, {_further(layout.stride('dp'))}"


def _further(stride: int) -> str:
    return f"each {stride:,} rank{'s' * (stride > 1)} further"


def _stage_rows(wiring: Wiring) -> list[tuple[str, str]]:
    """What each pipeline rank holds; the middle ones left out where they are many."""
    last = len(wiring.layers) - 1
    rows = []
    for pp, chunks in enumerate(wiring.stages):
        text = ", ".join(_layers_text(wiring.layers[stage]) for stage in chunks)
        ends = [name for name, stage in (("embedding", 0), ("head", last)) if stage in chunks]
        rows.append((stage_text(wiring, pp), " + ".join([f"layers {text}", *ends])))
    if len(rows) > MOST_STAGES:
        left_out = len(rows) - MOST_STAGES
        rows = [*rows[: MOST_STAGES - 1], ("...", f"{left_out:,} more"), rows[-1]]
    return rows


def _layers_text(layers: range) -> str:
    if not layers:
        return "none"
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"


def _groups_table(wiring: Wiring) -> RenderableType:
    columns = [("axis", "<"), ("degree", ">"), ("groups", ">"), ("that of rank 0", "<"), ("they ride", "<")]
    rows = []
    for each in wiring.axes:
        first = next(group for group in each.groups if 0 in group)
        rides = rides_text(wiring, each.rides)
        rows.append([axis_text(each.axis), f"{each.degree:,}", f"{len(each.groups):,}", ranks_text(first), rides])
    return table(columns, rows)


def _carried(axes: Sequence[AxisGroups]) -> list[tuple[str, str]]:
    """Of the axes that have any communication."""
    rows = [(axis_text(each.axis), each.carries) for each in axes if each.degree > 1]
    return rows or [("-", "nothing: there is one rank")]
