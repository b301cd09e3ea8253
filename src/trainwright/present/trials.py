"""Trials for people: a row for each value that was trained, and the reason for each that could not be."""

from rich.console import Group, RenderableType

from trainwright.present.parts import headline, section, table
from trainwright.present.sweep import value_text
from trainwright.spec.answers import ComparedQuantity
from trainwright.spec.trials import Trials
from trainwright.spec.units import bytes_text, count_text


def trials_view(trials: Trials) -> RenderableType:
    """All trials."""
    columns = [("", "<"), ("tokens/s predicted", ">"), ("seen", ">"), ("", ">")]
    columns += [("peak predicted", ">"), ("seen", ">"), ("", ">")]
    rows = [
        [
            _values_text(each.values),
            count_text(each.tokens_per_s.predicted),
            count_text(each.tokens_per_s.seen),
            _relative(each.tokens_per_s),
            bytes_text(each.peak_bytes.predicted),
            bytes_text(each.peak_bytes.seen),
            _relative(each.peak_bytes),
        ]
        for each in trials.trials
    ]
    steps = f"{trials.steps} step{'s' if trials.steps > 1 else ''} each"
    parts = [
        headline(f"{trials.run_name}, one field toggled at a time", f"trained on this machine, {steps}"),
        "",
        table(columns, rows),
    ]
    if trials.untrained:
        reasons = [[_values_text(each.values), each.reason] for each in trials.untrained]
        parts.append(section("Not trained", table([("", "<"), ("reason", "<")], reasons)))
    return Group(*parts)


def _values_text(values: dict) -> str:
    return ", ".join(f"{field}={value_text(value)}" for field, value in values.items())


def _relative(quantity: ComparedQuantity) -> str:
    relative = quantity.relative_residual
    return "-" if relative is None else f"{relative:+.1%}"
