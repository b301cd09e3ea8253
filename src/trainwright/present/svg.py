"""Drawings as SVG text that is the same to the byte each time: no date, no random names, texts kept as texts.

matplotlib is imported here and where a drawing is made, inside functions: only `--svg` needs it.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#000000")
"""Told apart by the colour-blind too (Okabe and Ito), and on paper."""


def svg(draw: Callable[["Figure"], None], width_inches: float, height_inches: float) -> str:
    """The SVG of what `draw` puts on an empty figure. The reader's own matplotlib settings have no say."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "trainwright"
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["font.family"] = "DejaVu Sans"
        figure = Figure(figsize=(width_inches, height_inches))
        FigureCanvasSVG(figure)
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
