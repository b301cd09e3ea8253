"""A finished run against its prediction, for people: predicted, seen, and the residual by cause."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType

from trainwright.present.parts import headline, section, table
from trainwright.spec.answers import ComparedQuantity, Comparison, RankBytes
from trainwright.spec.units import bytes_text, count_text, seconds_text

QUANTITY_TEXT: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step", seconds_text),
    "tokens_per_s": ("tokens/s", count_text),
    "mfu": ("MFU", lambda value: f"{value:.1%}"),
    "parameter_bytes": ("parameters", bytes_text),
    "gradient_bytes": ("gradients", bytes_text),
    "optimizer_bytes": ("optimizer", bytes_text),
    "peak_bytes": ("peak memory", bytes_text),
}
"""What a quantity is called, and how its values are written."""


def comparison_view(comparison: Comparison) -> RenderableType:
    """All of a comparison as tables."""
    return Group(
        headline(f"{comparison.run_name} ({comparison.run_hash}): predicted against seen"),
        section(f"The run; seen: median of {comparison.steps_timed} steps", _table(comparison.quantities, None)),
        section("Time of a step by cause", _table(comparison.seconds, seconds_text))
        if comparison.seconds
        else section("Time by cause was not seen: the run was too short for an instrumented step"),
        section("Memory of each rank: predicted, seen", _ranks_table(comparison.ranks)),
        section("Memory by cause at the peak of the rank with the largest", _table(comparison.bytes, bytes_text)),
    )


def verdict_view(comparison: Comparison, tolerance: float, accepted: bool) -> RenderableType:
    """Whether the step's time was predicted well enough, in one sentence."""
    step = next(each for each in comparison.quantities if each.name == "step_s")
    return section(
        f"The step took {_relative_text(step)} against its prediction: "
        f"{'within' if accepted else 'OUT OF'} the tolerance of {tolerance * 100:g}%"
    )


def _table(quantities: Sequence[ComparedQuantity], text: Callable[[float], str] | None) -> RenderableType:
    columns = [("", "<"), ("predicted", ">"), ("seen", ">"), ("residual", ">"), ("", ">")]
    rows = []
    for each in quantities:
        name, as_text = (each.name, text) if text else QUANTITY_TEXT[each.name]
        if each.predicted or each.seen:
            residual = ("+" if each.residual >= 0 else "") + as_text(each.residual)
            rows.append([name, as_text(each.predicted), as_text(each.seen), residual, _relative_text(each)])
    return table(columns, rows)


def _ranks_table(ranks: Sequence[RankBytes]) -> RenderableType:
    """One row a rank, or one for ranks that are alike."""
    names = [QUANTITY_TEXT[each.name][0] for each in ranks[0].quantities]
    columns = [("ranks", "<"), *((name, ">") for name in names), ("", ">")]
    alike: dict[tuple[str, ...], list[int]] = {}
    for each in ranks:
        cells = tuple(f"{bytes_text(one.predicted)}, {bytes_text(one.seen)}" for one in each.quantities)
        alike.setdefault((*cells, _relative_text(each.quantities[-1])), []).append(each.rank)
    return table(columns, [[", ".join(map(str, at)), *cells] for cells, at in alike.items()])


def _relative_text(quantity: ComparedQuantity) -> str:
    relative = quantity.relative_residual
    return "not predicted" if relative is None else f"{relative:+.1%}"
