"""What every noun is: a frozen record that rejects unknown fields and wrong types when it is made.

A field is a choice; all that follows from it is a property. Nothing is filled in later. Nouns parse from and
turn into plain dicts, so that TOML and JSON are one step away (`spec/toml.py`).
"""

from collections.abc import Iterable
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from trainwright.spec.errors import InvalidSpec, from_validation, reject

T = TypeVar("T")

Sequence = Annotated[tuple[T, ...], Strict(False)]
"""A tuple that may be read from a list, as TOML and JSON write it."""

LARGEST_INTEGER = 2**53
"""Whole numbers up to it are exact as floats too; no count of this field comes near."""


def _whole(value: object) -> object:
    """141e9 is an integer that is written as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=LARGEST_INTEGER)]
Natural = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=LARGEST_INTEGER)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Noun(BaseModel):
    """A frozen record. `parse` checks a plain dict; `changed` gives a copy with other choices, checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def parse(cls, values: object, prefix: str = "") -> Self:
        """The noun that `values` (a plain dict) says, or `InvalidSpec` naming the first wrong field.

        `prefix` is put before the field's name in the message.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise from_validation(error, cls, prefix) from None
        except RecursionError:
            raise InvalidSpec(f"{prefix or cls.__name__}: nested too deeply to read") from None

    def changed(self, **choices: Any) -> Self:
        """A copy with some fields chosen otherwise; checked like a new one."""
        return type(self).parse({**{name: getattr(self, name) for name in type(self).model_fields}, **choices})

    def plain(self) -> dict[str, Any]:
        """As plain dicts, lists and scalars, without fields that are None (TOML has no null)."""
        return self.model_dump(mode="json", exclude_none=True)

    def with_value(self, path: str, value: object) -> Self:
        """A copy with the field at the dotted `path` set, checked: `run.with_value("layout.tp", 4)`."""
        return self.with_values([(path, value)])

    def with_values(self, choices: Iterable[tuple[str, object]]) -> Self:
        """A copy with the fields at dotted paths set, in turn, and checked when all are."""
        values = self.model_dump(mode="python")
        for path, value in choices:
            _set(values, path, value)
        return self.parse(values)


def _set(values: dict[str, Any], path: str, value: object) -> None:
    """Set the field at `path` in nested tables."""
    *parents, last = path.split(".")
    at: Any = values
    for part in parents:
        if not isinstance(at, dict) or part not in at:
            reject(path, value, f"there is no {part!r} on the way to it; the run file shows the names")
        if at[part] is None:
            at[part] = {}  # a table that is absent so far
        at = at[part]
        if isinstance(at, (tuple, list)):
            reject(path, value, "a list's items can't be set one by one; set the field that holds the list")
    if not isinstance(at, dict):
        reject(path, value, f"{'.'.join(parents)} holds a plain value, not fields")
    at[last] = value
