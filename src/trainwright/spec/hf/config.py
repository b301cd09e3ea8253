"""The values of a config.json, each checked as it is read, so that no file makes a KeyError or a TypeError.

`families.py` asks for keys by the kind that it needs; what is missing or of another kind ends in one line with
the key, its value and the remedy.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from trainwright.spec.errors import InvalidSpec, reject

REQUIRED: Any = object()


class Config:
    """The values of a config.json, each checked as it is read; `null` counts as absent unless said otherwise."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return key in self._values

    def with_absent(self, values: Mapping[str, Any]) -> "Config":
        """A copy where `values` stand for the keys that are absent or null."""
        missing = {key: value for key, value in values.items() if self._values.get(key) is None}
        return Config({**self._values, **missing}, self._prefix)

    def reject(self, key: str, remedy: str) -> NoReturn:
        reject(f"{self._prefix}{key}", self._values.get(key), remedy)

    def find(self, *keys: str) -> tuple[str, Any]:
        """The first of `keys` that is there, with its value; the first key and None where none is."""
        return next(
            ((key, self._values[key]) for key in keys if self._values.get(key) is not None), (keys[0], None)
        )

    def whole(self, *keys: str, absent: Any = REQUIRED, least: int = 1) -> Any:
        """An integer of at least `least`; several keys are names of one thing."""
        key, value = self.find(*keys)
        if value is None:
            return self._absent(key, absent, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.reject(key, f"must be a whole number of at least {least}")
        if value > 10**15:
            self.reject(key, "is too large to be meant")
        return value

    def whole_or_none(self, key: str, *, absent: int | None) -> int | None:
        """As `whole`, where null says "none" and only a missing key means `absent`."""
        if not self.has(key):
            return absent
        return self.whole(key, absent=None)

    def number(self, key: str, *, absent: Any = REQUIRED) -> Any:
        """A number above zero."""
        value = self._values.get(key)
        if value is None:
            return self._absent(key, absent, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            self.reject(key, "must be a number above zero")
        return float(value)

    def number_or_none(self, key: str, *, absent: float | None) -> float | None:
        return absent if not self.has(key) else self.number(key, absent=None)

    def flag(self, key: str, *, absent: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return absent
        if not isinstance(value, bool):
            self.reject(key, "must be true or false")
        return value

    def word(self, key: str, known: Mapping[str, str] | tuple[str, ...], *, absent: str) -> str:
        """One of the `known` words, or what it stands for."""
        value = self._values.get(key)
        value = absent if value is None else value
        if not isinstance(value, str) or value not in known:
            self.reject(key, f"may be {', '.join(known)}")
        return known[value] if isinstance(known, Mapping) else value

    def words(self, key: str) -> list[str] | None:
        value = self._values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            self.reject(key, "must be a list of texts")
        return value

    def table(self, key: str) -> "Config | None":
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.reject(key, "must be a table {...}")
        return Config(value, f"{self._prefix}{key}.")

    def refuse(self, key: str, why: str) -> None:
        """Reject a switch that is on and that ModelSpec can't say."""
        if self.flag(key, absent=False):
            self.reject(key, why)

    def _absent(self, key: str, absent: Any, what: str) -> Any:
        if absent is REQUIRED:
            raise InvalidSpec(f"{self._prefix}{key}: missing; a config.json of this family gives {what}")
        return absent
