"""A layout as a drawing: nodes with their ranks, coloured by pipeline rank, and the groups of rank 0 as lines
through their members, solid where they ride the scale-up link and dashed where they cross the network.

Up to `DRAWN_RANKS` ranks all nodes are drawn; of a larger world the first nodes of the first replica.
"""

from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

from trainwright.present.layout import DRAWN_RANKS, axis_text, place_text, rides_text, stage_text
from trainwright.present.plans import layout_text
from trainwright.present.svg import COLOURS, svg
from trainwright.spec.layout import AXES
from trainwright.spec.wiring import AxisGroups, Wiring

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANKS_ABREAST = 16
"""In a row of nodes, at most, where a node is no wider."""
NODE_ABREAST = 8
"""Ranks side by side in one node."""
GAP, TITLE = 0.35, 0.4
"""Between nodes, and above one's ranks, in ranks' widths."""
INCHES = 0.72
"""Of one rank."""
LINE_INCHES, LETTERS_PER_INCH = 0.19, 13.5
"""Of the text below."""
LANES, LANE_TOP, LANE_HEIGHT = 6, 0.64, 0.06
"""Heights inside a rank at which lines run, so that they don't cover one another."""
PASTELS = ("#cfe3f3", "#f9dcc4", "#d3ecdf", "#f2dbe9", "#f8ecc2", "#dbeef9", "#e3e3e3", "#e8d9d4")
"""Of pipeline ranks, in turn."""


def layout_svg(wiring: Wiring) -> str:
    """The drawing as SVG text."""
    nodes = _drawn_nodes(wiring)
    places, width, height = _places(wiring, nodes)
    inches = max(width * INCHES, 9.0)
    key = _key(wiring, nodes, int(inches * LETTERS_PER_INCH))
    below_inches = LINE_INCHES * (len(key) + 1)
    total_inches = height * INCHES + below_inches

    def draw(figure: "Figure") -> None:
        axes = figure.add_axes((0, below_inches / total_inches, 1, 1 - below_inches / total_inches))
        axes.set_xlim(0, inches / INCHES)
        axes.set_ylim(height, 0)
        axes.axis("off")
        for node in nodes:
            _draw_node(axes, wiring, node, places)
        for at, each in enumerate(_lines(wiring)):
            _draw_group(axes, wiring, each, places, at)
        for row, (text, colour, bold) in enumerate(key):
            y = (below_inches - LINE_INCHES * (row + 1)) / total_inches
            figure.text(
                0.15 / inches, y, text, size=8.5, color=colour, weight="bold" if bold else "normal", va="bottom"
            )

    return svg(draw, inches, total_inches)


def _drawn_nodes(wiring: Wiring) -> list[int]:
    """All, or those of the first replica, as many as hold `DRAWN_RANKS`."""
    layout = wiring.run.layout
    if layout.world <= DRAWN_RANKS:
        return list(range(wiring.nodes))
    nodes = dict.fromkeys(wiring.node_of(rank) for rank in range(layout.world) if layout.coordinate(rank).dp == 0)
    most = max(1, DRAWN_RANKS // wiring.run.cluster.node.devices)
    return list(nodes)[:most]


def _places(wiring: Wiring, nodes: list[int]) -> tuple[dict[int, tuple[float, float]], float, float]:
    """Top left corner of each rank that is drawn, in ranks' widths, and width and height of it all."""
    devices, world = wiring.run.cluster.node.devices, wiring.run.layout.world
    across = min(devices, NODE_ABREAST, world)
    down = -(-min(devices, world) // across)
    abreast = max(1, RANKS_ABREAST // across)
    places = {}
    for at, node in enumerate(nodes):
        x = GAP + at % abreast * (across + GAP)
        y = GAP + at // abreast * (down + TITLE + GAP) + TITLE
        for slot in range(devices):
            if node * devices + slot < world:
                places[node * devices + slot] = (x + slot % across, y + slot // across)
    width = GAP + min(len(nodes), abreast) * (across + GAP)
    return places, width, GAP + -(-len(nodes) // abreast) * (down + TITLE + GAP)


def _draw_node(axes: "Axes", wiring: Wiring, node: int, places: dict[int, tuple[float, float]]) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    devices = wiring.run.cluster.node.devices
    ranks = [rank for rank in range(node * devices, (node + 1) * devices) if rank in places]
    left, top = places[ranks[0]]
    right, bottom = (max(places[rank][axis] for rank in ranks) + 1 for axis in (0, 1))
    outline = FancyBboxPatch(
        (left, top - TITLE),
        right - left,
        bottom - top + TITLE,
        boxstyle="round,pad=0.08,rounding_size=0.1",
        facecolor="#f7f7f7",
        edgecolor="#555555",
        linewidth=0.8,
        zorder=1,
    )
    axes.add_patch(outline)
    domains = sorted({wiring.domain_of(rank) for rank in ranks})
    title = f"node {node}" + ("" if _domain_is_node(wiring) else f" ({place_text('link domain', domains)})")
    axes.text(left + 0.05, top - TITLE / 2, title, size=8, va="center", zorder=3)
    for rank in ranks:
        x, y = places[rank]
        at = wiring.run.layout.coordinate(rank)
        colour = PASTELS[at.pp % len(PASTELS)]
        square = Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="#999999", linewidth=0.5)
        axes.add_patch(square)
        square.set_zorder(2)
        axes.text(x + 0.09, y + 0.18, str(rank), size=8.5, weight="bold", va="center", zorder=5)
        degrees = [f"{axis} {getattr(at, axis)}" for axis in AXES if wiring.run.layout.degree(axis) > 1]
        for row in range(0, len(degrees), 2):
            text = "  ".join(degrees[row : row + 2])
            axes.text(x + 0.09, y + 0.38 + 0.07 * row, text, size=5.5, va="center", zorder=5)


def _domain_is_node(wiring: Wiring) -> bool:
    return wiring.domain_ranks == wiring.run.cluster.node.devices


def _lines(wiring: Wiring) -> list[AxisGroups]:
    """Axes that are drawn as a line: all whose groups have members to join."""
    return [each for each in wiring.axes if each.degree > 1]


def _draw_group(
    axes: "Axes", wiring: Wiring, each: AxisGroups, places: dict[int, tuple[float, float]], at: int
) -> None:
    """A line through the members of rank 0's group, as far as they are drawn; each axis at its own height."""
    from matplotlib.lines import Line2D

    members = [rank for rank in _group_of_first(each) if rank in places]
    lane = at % LANES
    x_of = {rank: places[rank][0] + 0.92 - 0.07 * lane for rank in members}
    y_of = {rank: places[rank][1] + LANE_TOP + LANE_HEIGHT * lane for rank in members}
    colour = COLOURS[at % len(COLOURS)]
    for one, other in pairwise(members):
        style = "-" if wiring.hop(one, other) == "link" else (0, (3, 2))
        ends = ([x_of[one], x_of[other]], [y_of[one], y_of[other]])
        axes.add_line(Line2D(*ends, color=colour, linestyle=style, linewidth=1.3, alpha=0.85, zorder=4))
    axes.plot(list(x_of.values()), list(y_of.values()), "o", color=colour, markersize=3, zorder=6)


def _group_of_first(each: AxisGroups) -> tuple[int, ...]:
    return next(group for group in each.groups if 0 in group)


def _key(wiring: Wiring, nodes: list[int], letters: int) -> list[tuple[str, str, bool]]:
    """Lines of text below the drawing, each with its colour and whether it is bold."""
    run = wiring.run
    title = f"{run.name}: {run.model.name} on {run.layout.world:,} x {run.cluster.device.name}"
    degrees = f"{layout_text(run.layout, run.model.is_moe)}; ranks count {run.layout.order}, innermost first"
    rows = [(title, "black", True), (degrees, "black", False)]
    if len(nodes) < wiring.nodes:
        more = wiring.nodes - len(nodes)
        rows.append((f"Drawn: the first nodes of the first replica; {more:,} more are like these", "black", False))
    rows.append((_lines_text(wiring), "black", False))
    for at, each in enumerate(_lines(wiring)):
        text = f"{axis_text(each.axis)} {each.degree}, {rides_text(wiring, each.rides)}; {each.carries}"
        colour = COLOURS[at % len(COLOURS)]
        rows += [
            (part, colour, False) for part in wrap(text, letters, subsequent_indent="    ", break_on_hyphens=False)
        ]
    return rows


def _lines_text(wiring: Wiring) -> str:
    fabric = wiring.run.cluster.fabric
    held = stage_text(wiring, 0).split()[0]
    return (
        f"Fill: {'stage' if held == 'stage' else 'pipeline rank'}. Lines: the groups of rank 0, solid over "
        f"{fabric.link} ({wiring.domain_ranks} neighbouring ranks), dashed over the network ({fabric.network})"
    )
