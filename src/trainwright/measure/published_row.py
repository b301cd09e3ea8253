"""One row of a table of published runs: its cells by column, read with care, and what had to be assumed."""

import math
from dataclasses import dataclass, field
from typing import NoReturn

from trainwright.spec.errors import reject

NOTHING = ("", "-", "na", "n/a", "none", "unknown", "?")
"""Cells that say no number."""


class UnreadableRow(ValueError):
    """A row that says no complete run; `str()` is the reason."""


@dataclass
class Row:
    """Cells by column; absent columns are empty. `assumed` collects sentences as cells turn out to be missing."""

    cells: dict[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def lower(self, column: str) -> str:
        return self.text(column).lower()

    def says(self, column: str, *words: str) -> bool:
        """Whether a cell has one of `words`, in any case."""
        text = self.lower(column)
        return any(word in text for word in words)

    def number(self, column: str) -> float | None:
        """The number of a cell; None where it is empty. Raises `InvalidSpec` where it is none."""
        text = self.text(column).replace(",", "")
        if text.lower() in NOTHING:
            return None
        try:
            value = float(text)
        except ValueError:
            reject(column, self.text(column), "must be a number, or empty")
        if not math.isfinite(value) or value < 0:
            reject(column, self.text(column), "must be a finite number of at least 0")
        return value

    def whole(self, column: str) -> int | None:
        """The whole number of a cell, which may be written as 280.0; None where it is empty."""
        value = self.number(column)
        if value is not None and value != int(value):
            reject(column, self.text(column), "must be a whole number")
        return None if value is None else int(value)

    def flag(self, column: str) -> bool | None:
        """Whether a cell says yes: 1, true or yes; None where it is empty."""
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        text = self.lower(column)
        if text in words:
            return words[text]
        value = self.number(column)
        return None if value is None else value > 0

    def required(self, column: str) -> int:
        """The same, of at least 1."""
        value = self.whole(column)
        if value is None:
            reject(column, self.text(column), "must be given")
        if value < 1:
            reject(column, value, "must be at least 1")
        return value

    def count(self, column: str, default: int = 1) -> int:
        """The same, with a default for an empty cell or 0."""
        return self.whole(column) or default

    def assume(self, sentence: str) -> None:
        self.assumed.append(sentence)

    def refuse(self, reason: str) -> NoReturn:
        raise UnreadableRow(reason)
