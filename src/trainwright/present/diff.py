"""Two runs for people: a sentence that says which is faster and by what, the fields that differ, and seconds and
bytes by cause, A, B and difference."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType

from trainwright.present.parts import facts, headline, section, table
from trainwright.spec.difference import Difference, ValueDifference
from trainwright.spec.errors import shown
from trainwright.spec.model import CONVENTION_TEXT
from trainwright.spec.units import bytes_text, count_text, scaled, seconds_text

QUANTITY_TEXT: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step", seconds_text),
    "gpus": ("devices", count_text),
    "tokens_per_step": ("tokens per step", count_text),
    "tokens_per_s_per_gpu": ("tokens/s per device", lambda value: f"{value:,.1f}"),
    "flops_per_s_per_gpu": ("work per device", lambda value: scaled(value, "FLOP/s")),
    "mfu": ("MFU", lambda value: f"{value:.1%}"),
    "peak_flops_per_s": ("peak that MFU is of", lambda value: scaled(value, "FLOP/s")),
    "peak_bytes": ("peak memory", bytes_text),
    "capacity_bytes": ("memory of a device", bytes_text),
    "gpu_hours": ("device-hours", count_text),
    "days": ("days", lambda value: f"{value:,.1f}"),
    "cost_usd": ("USD", count_text),
}
"""What a quantity is called, and how its values are written."""
LIKELY_SAME = ("gpus", "tokens_per_step", "peak_flops_per_s", "capacity_bytes")
"""Shown only where they differ."""


def diff_view(difference: Difference, a_label: str, b_label: str) -> RenderableType:
    """All of it; the labels say where the two runs come from."""
    quantities = [each for each in difference.quantities if each.name not in LIKELY_SAME or each.difference]
    rows = [_row(each, *QUANTITY_TEXT[each.name]) for each in quantities]
    return Group(
        headline(sentence(difference)),
        facts([("A", a_label), ("B", b_label)]),
        _fields(difference),
        section("What follows", table(_columns(""), rows), f"counted: {CONVENTION_TEXT[difference.convention]}"),
        section(
            "Seconds of a step by cause", _causes(difference.seconds, difference.quantity("step_s"), seconds_text)
        ),
        section(
            "Bytes of the fullest rank at its peak by cause",
            _causes(difference.bytes, difference.quantity("peak_bytes"), bytes_text),
        ),
        *_too_full(difference),
    )


def sentence(difference: Difference) -> str:
    """Which is faster, and what makes most of it. Where the steps are of different work, which is longer."""
    ratio, same_work = difference.ratio("step_s"), difference.ratio("tokens_per_step") == 1
    if difference.is_alike:
        return f"A and B take the same time for a step{_conditions(difference)}"
    words = ("faster", "slower") if same_work else ("shorter", "longer")
    what = "B is" if same_work else "B's step is"
    text = f"{what} {abs(ratio - 1):.1%} {words[ratio > 1]}{_conditions(difference)}"
    return f"{text}; {_reason(difference)}"


def _conditions(difference: Difference) -> str:
    """How much work the steps are and how many devices do it, where that differs."""
    ratios = {"tokens_per_step": "for {:.3g} times the tokens", "gpus": "on {:.3g} times the devices"}
    texts = [text.format(difference.ratio(name)) for name, text in ratios.items() if difference.ratio(name) != 1]
    if not texts:
        return ""
    return f" {' '.join(texts)} ({difference.ratio('tokens_per_s_per_gpu') - 1:+.1%} tokens/s per device)"


def _reason(difference: Difference) -> str:
    total_s = difference.quantity("step_s").difference
    along, against = difference.causes(along=True), difference.causes(along=False)
    most = "most of it" if along[0].difference / total_s >= 0.5 else "the largest part of it"
    text = f"{most} is {along[0].name} ({signed(along[0].difference, seconds_text)})"
    if against and abs(against[0].difference) >= abs(total_s) / 2:
        text += f", against {against[0].name} ({signed(against[0].difference, seconds_text)})"
    return text


def signed(value: float, text: Callable[[float], str]) -> str:
    """With its sign, also where it is above zero."""
    return f"+{text(value)}" if value > 0 else text(value)


def _fields(difference: Difference) -> RenderableType:
    if not difference.fields:
        return section("The runs differ in no field")
    rows = [[each.field, _value_text(each.a), _value_text(each.b)] for each in difference.fields]
    return section("Fields that differ", table([("field", "<"), ("A", "<"), ("B", "<")], rows))


def _value_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else shown(value)


def _columns(name: str) -> list[tuple[str, str]]:
    return [(name, "<"), ("A", ">"), ("B", ">"), ("difference", ">"), ("", ">")]


def _causes(
    causes: Sequence[ValueDifference], total: ValueDifference, text: Callable[[float], str]
) -> RenderableType:
    """Causes that either has, and their sum."""
    rows = [_row(each, each.name, text) for each in causes if each.a or each.b]
    return table(_columns("cause"), [*rows, _row(total, "sum", text)])


def _row(each: ValueDifference, name: str, text: Callable[[float], str]) -> list[str]:
    relative = each.relative_difference
    share = "new" if relative is None and each.b else f"{relative or 0:+.1%}"
    change = signed(each.difference, text) if each.difference else "0"
    return [name, text(each.a), text(each.b), change, share if each.difference else "-"]


def _too_full(difference: Difference) -> list[RenderableType]:
    """Which of the two doesn't fit."""
    peak, capacity = difference.quantity("peak_bytes"), difference.quantity("capacity_bytes")
    return [
        section(f"{name} does not fit: {bytes_text(needs - has)} are missing on the fullest rank")
        for name, needs, has in (("A", peak.a, capacity.a), ("B", peak.b, capacity.b))
        if needs > has
    ]
