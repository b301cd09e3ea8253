"""What a user said that can't be: one exception, one line, with the field, its value and the remedy.

`InvalidSpec` is raised by every check of every noun and turned by `cli` into one line on stderr and exit
status 2. `from_validation` rewrites pydantic's report in the same form, with the nearest known name where a
key is unknown.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError


class InvalidSpec(ValueError):
    """A field that can't have the value it was given. `str()` is one line for the user."""


class LacksHardware(InvalidSpec):
    """A recipe whose precision the run's device doesn't have. Which devices do, the catalogue knows."""

    def __init__(self, precision: str, message: str) -> None:
        super().__init__(message)
        self.precision = precision


def reject(field: str, value: object, remedy: str) -> NoReturn:
    """Raise `InvalidSpec`: `reject("layout.ep", 3, "must divide 8; it may be 1, 2, 4 or 8")`."""
    raise InvalidSpec(f"{field}={shown(value)}: {remedy}")


def shown(value: object) -> str:
    """A value as text on one line, cut to a length that leaves the message readable."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the list of what is known where nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.55)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "known are " + ", ".join(names[:24]) + (" ..." if len(names) > 24 else "")


def from_validation(error: ValidationError, noun: type[BaseModel], prefix: str = "") -> InvalidSpec:
    """One complaint of pydantic as an `InvalidSpec`: an unknown field where there is one, as a misspelt name
    makes another one missing; else the first. `prefix` is the field that `noun` stands in."""
    complaints = error.errors()
    first = next((each for each in complaints if each["type"] == "extra_forbidden"), complaints[0])
    location = [part for part in first["loc"] if not _is_union_tag(part)]
    field = ".".join([*([prefix] if prefix else []), *(str(part) for part in location)])
    kind, value = first["type"], first["input"]
    if kind == "value_error":
        # Raised by one of our own checks: it names its field already, relative to the noun it stands in.
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        return InvalidSpec(f"{field}.{message}" if field else message)
    if kind == "extra_forbidden":
        known = _fields_at(noun, [str(part) for part in location[:-1]])
        return InvalidSpec(f"{field}: unknown field; {nearest(str(location[-1]), known)}")
    if kind == "missing":
        return InvalidSpec(f"{field}: missing; give it a value")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return InvalidSpec(f"{field}.kind: {first['msg'].rstrip('.')}")
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return InvalidSpec(f"{field}={shown(value)}: must be a table of fields")
    if kind in ("bool_parsing", "bool_type"):
        return InvalidSpec(f"{field}={shown(value)}: must be true or false")
    if kind == "tuple_type":
        return InvalidSpec(f"{field}={shown(value)}: must be a list{_as_a_list(value)}")
    if kind in ("too_short", "too_long"):
        name, how = ("min_length", "at least") if kind == "too_short" else ("max_length", "at most")
        count = first["ctx"][name]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        return InvalidSpec(f"{field}={shown(value)}: must have {how} {count} item{'s' * (count != 1)}")
    return InvalidSpec(f"{field}={shown(value)}: {first['msg'][0].lower()}{first['msg'][1:]}")


def _as_a_list(value: object) -> str:
    """How what was given may have been meant: `norm,activation` as `["norm", "activation"]`."""
    items: list[object] = [value] if isinstance(value, (bool, int, float)) else []
    if isinstance(value, str):
        texts = [part.strip(" \"'[]()") for part in value.split(",")]
        items = [int(text) if text.isdecimal() else text for text in texts if text]
    return f", such as {shown(json.dumps(items, ensure_ascii=False))[1:-1]}" if items else ""


def _is_union_tag(part: int | str) -> bool:
    return part in ("gqa", "mla", "dense", "moe")


def _fields_at(noun: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the fields that may stand at `path` inside `noun`."""
    current: list[type[BaseModel]] = [noun]
    for part in path:
        if part.isdigit():
            continue
        current = [
            inner
            for outer in current
            if part in outer.model_fields
            for inner in _nouns_in(outer.model_fields[part].annotation)
        ]
    return sorted({name for model in current for name in model.model_fields})


def _nouns_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        found += _nouns_in(argument)
    return found


def require_positive(values: Mapping[str, float]) -> None:
    """Reject the first of `values` that is not above zero."""
    for field, value in values.items():
        if not value > 0:
            reject(field, value, "must be above zero")
