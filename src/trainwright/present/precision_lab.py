"""The lab of low precision for people: tables, plots, and one page that holds both and needs nothing else."""

import html
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from rich.console import Group, RenderableType

from trainwright.present.parts import bullets, headline, section, table
from trainwright.present.precision_verdict import MODEL_NAMES, loss_text, verdict
from trainwright.present.svg import COLOURS, svg
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.precision_lab import MODELS, PLAIN, PRODUCTS, Kept, ModelKind, PrecisionLab, Rounding
from trainwright.spec.units import seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("input", "weight", "gradient")
SUMS: tuple[Kept, ...] = ("never", "512", "128", "32", "fp32", "operands")
SUM_NAMES: dict[Kept, str] = {
    "never": "14 bits throughout",
    "512": "out every 512",
    "128": "out every 128",
    "32": "out every 32",
    "fp32": "fp32",
    "operands": "operands' rounding",
}
LEAST_ERROR, MOST_ERROR = 0.01, 1.0
LEAST_SHOWN = 0.005
"""Share of values that became zero from which it is said."""

Columns = list[tuple[str, str]]
Rows = list[list[str]]


class Titled:
    """A table with its title."""

    def __init__(self, title: str, columns: Columns, rows: Rows) -> None:
        self.title, self.columns, self.rows = title, columns, rows


def lab_view(lab: PrecisionLab) -> RenderableType:
    """The verdict, then the tables that it is read from."""
    return Group(
        headline(_title(lab), _subtitle(lab)),
        section("Verdict", bullets(verdict(lab))),
        *(section(each.title, table(each.columns, each.rows)) for each in _tables(lab, whole=False)),
    )


def lab_svgs(lab: PrecisionLab) -> dict[str, str]:
    """Each plot by its file's name."""
    return {
        "losses.svg": svg(_drawn(_draw_losses, lab), 10.0, 6.5),
        "outliers.svg": svg(_drawn(_draw_outliers, lab), 9.0, 3.8),
        **{
            f"rounding_{model}.svg": svg(_drawn(_draw_rounding, lab, model), 11.0, 2.2 + 2.4 * len(lab.factors))
            for model in MODELS
        },
        "sums.svg": svg(_drawn(_draw_sums, lab), 10.0, 3.8),
    }


def lab_page(lab: PrecisionLab, pictures: dict[str, str]) -> str:
    """One HTML page with everything in it."""
    parts = [f"<h1>{html.escape(_title(lab))}</h1><p>{html.escape(_subtitle(lab))}</p><h2>Verdict</h2><ul>"]
    parts += [f"<li>{html.escape(each)}</li>" for each in verdict(lab)]
    parts.append("</ul>")
    parts += [f"<figure>{text[text.index('<svg') :]}</figure>" for text in pictures.values()]
    parts += [_html_table(each) for each in _tables(lab, whole=True)]
    body = "\n".join(parts)
    return f"<!doctype html>\n<meta charset=utf-8>\n<title>{html.escape(_title(lab))}</title>\n{STYLE}\n{body}\n"


STYLE = """<style>
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 10px; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums } tr:nth-child(even) { background: #f4f4f4 }
svg { max-width: 100%; height: auto } figure { margin: 1rem 0 }
</style>"""


def _html_table(each: Titled) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in each.columns)
    kinds = [' class="number"' if flush == ">" else "" for _, flush in each.columns]
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in each.rows
    )
    return f"<h2>{html.escape(each.title)}</h2>\n<table><tr>{head}</tr>\n{rows}</table>"


def _title(lab: PrecisionLab) -> str:
    return f"fp8 lab: bf16 and {len(lab.precisions)} recipes, {len(lab.curves)} trainings of {lab.steps:,} steps"


def _subtitle(lab: PrecisionLab) -> str:
    return (
        "all from the same weights, trained in bf16, on the same text, matmuls emulated; outliers: two channels "
        "behind each norm times a power of two, their weights over it; losses are means of the last "
        f"{lab.averaged:,} steps"
    )


def _tables(lab: PrecisionLab, *, whole: bool) -> Iterator[Titled]:
    """whole: with errors of each linear, where else those of a layer are put together."""
    for model in MODELS:
        yield _losses(lab, model)
    for model in MODELS:
        for factor in lab.factors:
            yield _errors(lab, model, factor, "layer" if whole else "block")
    yield _sums(lab)


def _losses(lab: PrecisionLab, model: ModelKind) -> Titled:
    """A row for each precision: loss over bf16's, by size of outliers."""
    columns: Columns = [("", "<"), ("scales", "<"), ("loss", ">")]
    columns += [(f"outliers of {factor:,.0f}" if factor > 1 else "no outliers", ">") for factor in lab.factors]
    columns += [("step", ">")]
    rows = []
    for name in (PLAIN, *lab.precisions):
        curve = lab.curve(model, name, lab.factors[0])
        scales = LOW_PRECISION[name].activation.text if name in LOW_PRECISION else "none"
        if name == PLAIN:
            against = [f"{_last(lab, model, factor):.4f}" for factor in lab.factors]
        else:
            against = [loss_text(lab.worse(model, name, factor)) for factor in lab.factors]
        last = fmean(curve.losses[-lab.averaged :])
        rows.append([name, scales, f"{last:.4f}", *against, seconds_text(curve.step_s)])
    return Titled(f"Loss of {MODEL_NAMES[model]}: bf16's, and how far others are above it", columns, rows)


def _last(lab: PrecisionLab, model: ModelKind, factor: float) -> float:
    return fmean(lab.curve(model, PLAIN, factor).losses[-lab.averaged :])


def _errors(lab: PrecisionLab, model: ModelKind, factor: float, by: Literal["layer", "block"]) -> Titled:
    """A row for each tensor of each linear, or of each layer, a column for each recipe: error, and what became
    zero."""
    columns: Columns = [("", "<"), ("tensor", "<"), *((name, ">") for name in lab.precisions)]
    places = dict.fromkeys((_name(layer, by), role) for layer, role in _places(lab, model))
    rows = []
    for place in places:
        row = [*place]
        for name in lab.precisions:
            found = lab.of_tensors(model, name, factor, place[1])
            row.append(_error_text([each for each in found if _name(each.layer, by) == place[0]]))
        rows.append(row)
    size = f"outliers of {factor:,.0f}" if factor > 1 else "no outliers"
    title = f"Error of rounding in {MODEL_NAMES[model]}, {size} (and values that became zero)"
    return Titled(title, columns, rows)


def _name(layer: str, by: Literal["layer", "block"]) -> str:
    """`layers.0.mlp.up`, or of the block that it is in, `layers.0.mlp`."""
    return layer if by == "layer" else ".".join(layer.split(".")[:3])


def _error_text(found: list[Rounding]) -> str:
    """Means."""
    if not found:
        return "-"
    flushed = fmean(each.flushed for each in found)
    return f"{fmean(each.error for each in found):.1%}" + (f" ({flushed:.0%})" if flushed >= LEAST_SHOWN else "")


def _places(lab: PrecisionLab, model: ModelKind) -> list[tuple[str, str]]:
    """Layers and tensors, in the model's order."""
    found = dict.fromkeys((each.layer, each.role) for each in lab.roundings if each.model == model)
    layers = list(dict.fromkeys(layer for layer, _ in found))
    return [(layer, role) for layer in layers for role in ROLES if (layer, role) in found]


def _sums(lab: PrecisionLab) -> Titled:
    columns: Columns = [("product", "<"), ("K", ">"), *((SUM_NAMES[kept], ">") for kept in SUMS)]
    rows = [
        [name, f"{summed:,}", *(f"{lab.sum_error(name, summed, kept).worst:.2g}" for kept in SUMS)]
        for name in PRODUCTS
        for summed in _lengths(lab)
    ]
    return Titled("Worst error of the three products' results, over their root mean square", columns, rows)


def _lengths(lab: PrecisionLab) -> list[int]:
    return sorted({each.summed for each in lab.sums})


def _drawn(draw: Callable[..., None], *what: object) -> "Callable[[Figure], None]":
    return lambda figure: draw(figure, *what)


def _draw_losses(figure: "Figure", lab: PrecisionLab) -> None:
    """Losses over bf16's, step by step: a row for each model, a column for each size of outliers."""
    grid = figure.subplots(len(MODELS), len(lab.factors), sharex=True, squeeze=False)
    for model, row in zip(MODELS, grid, strict=True):
        for factor, axes in zip(lab.factors, row, strict=True):
            plain = lab.curve(model, PLAIN, factor).losses
            for name, colour in zip(lab.precisions, COLOURS, strict=False):
                pairs = zip(lab.curve(model, name, factor).losses, plain, strict=True)
                shares = [100 * (loss / of - 1) for loss, of in pairs]
                axes.plot(shares, color=colour, linewidth=1.0, label=name)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_title(
                f"{model}, outliers of {factor:,.0f}" if factor > 1 else f"{model}, no outliers", fontsize=9
            )
            axes.grid(alpha=0.3)
        row[0].set_ylabel("loss above bf16's (%)")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    grid[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    figure.tight_layout()


def _draw_outliers(figure: "Figure", lab: PrecisionLab) -> None:
    """Loss over bf16's against the size of outliers."""
    for model, axes in zip(MODELS, figure.subplots(1, len(MODELS), sharey=True), strict=True):
        for name, colour in zip(lab.precisions, COLOURS, strict=False):
            shares = [100 * lab.worse(model, name, factor) for factor in lab.factors]
            axes.plot(lab.factors, shares, marker="o", markersize=4, linewidth=1.2, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_title(MODEL_NAMES[model], fontsize=9)
        axes.set_xlabel("size of planted outliers")
        axes.grid(alpha=0.3)
        axes.axhline(0, color="black", linewidth=0.8)
    figure.axes[0].set_ylabel("loss above bf16's (%)")
    figure.axes[0].legend(fontsize=7)
    figure.tight_layout()


def _draw_rounding(figure: "Figure", lab: PrecisionLab, model: ModelKind) -> None:
    """Relative error of each tensor of each layer under each recipe: a panel for each size of outliers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    places = _places(lab, model)
    shades = ScalarMappable(LogNorm(LEAST_ERROR, MOST_ERROR), "viridis")
    for factor, axes in zip(
        lab.factors, figure.subplots(1, len(lab.factors), sharey=True, squeeze=False)[0], strict=True
    ):
        found = [
            {(e.layer, e.role): e.error for e in lab.of_tensors(model, name, factor)} for name in lab.precisions
        ]
        values = [[each.get(place, float("nan")) for each in found] for place in places]
        axes.pcolormesh(values, norm=shades.norm, cmap=shades.cmap)
        axes.set_title(f"outliers of {factor:,.0f}" if factor > 1 else "no outliers", fontsize=9)
        axes.set_xticks([at + 0.5 for at in range(len(lab.precisions))], lab.precisions, rotation=60, fontsize=7)
        axes.set_yticks(
            [at + 0.5 for at in range(len(places))], [f"{layer} {role}" for layer, role in places], fontsize=6
        )
    figure.axes[0].invert_yaxis()
    figure.suptitle(f"Relative error of rounding in {MODEL_NAMES[model]}", fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.93, 1))
    bar = figure.add_axes((0.94, 0.25, 0.012, 0.5))
    figure.colorbar(shades, cax=bar)


def _draw_sums(figure: "Figure", lab: PrecisionLab) -> None:
    """Worst error against K, a line for each way to sum, a panel for each product."""
    lengths = _lengths(lab)
    for name, axes in zip(PRODUCTS, figure.subplots(1, len(PRODUCTS), sharey=True), strict=True):
        for kept, colour in zip(SUMS, COLOURS, strict=False):
            errors = [lab.sum_error(name, summed, kept).worst for summed in lengths]
            axes.plot(
                lengths, errors, marker="o", markersize=4, linewidth=1.2, color=colour, label=SUM_NAMES[kept]
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("K: values that are summed")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("worst error over the results' size")
    figure.axes[-1].legend(fontsize=7)
    figure.tight_layout()
