"""What every noun is: a frozen record that rejects unknown fields and wrong types when it is made.

A field is a choice; all that follows from it is a property. Nothing is filled in later. Nouns parse from and
turn into plain dicts, so that TOML and JSON are one step away (`spec/toml.py`).
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from trainwright.spec.errors import InvalidSpec, from_validation, reject

T = TypeVar("T")

Sequence = Annotated[tuple[T, ...], Strict(False)]
"""A tuple that may be read from a list, as TOML and JSON write it."""

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
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
        values = self.model_dump(mode="python")
        *parents, last = path.split(".")
        at: Any = values
        for part in parents:
            key: Any = int(part) if isinstance(at, (list, tuple)) and part.isdigit() else part
            try:
                at = at[key]
            except (KeyError, IndexError, TypeError):
                reject(path, value, f"there is no {part!r} on the way to it; look at the run file for the names")
            if isinstance(at, tuple):
                reject(path, value, "a list's items can't be set one by one; set the field that holds the list")
        if not isinstance(at, dict):
            reject(path, value, f"{'.'.join(parents)} holds a plain value, not fields")
        at[last] = value
        return self.parse(values)
