"""Nouns as TOML text and back, and `--set path=value`. Pure: reading and writing files is for `cli`.

The standard library's tomllib reads (its messages carry line and column), tomlkit writes.
"""

import tomllib
from typing import TypeVar

import tomlkit

from trainwright.spec.base import Noun
from trainwright.spec.errors import InvalidSpec, reject

N = TypeVar("N", bound=Noun)


def read(text: str, noun: type[N], name: str) -> N:
    """The noun that a TOML text says. `name` is the file's, for the message of `InvalidSpec`."""
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python converts
        raise InvalidSpec(f"{name}: not TOML: {error}") from None
    except RecursionError:
        raise InvalidSpec(f"{name}: not TOML: nested too deeply") from None
    try:
        return noun.parse(values)
    except InvalidSpec as error:
        raise InvalidSpec(f"{name}: {error}") from None


def write(noun: Noun) -> str:
    """The noun as TOML text, which `read` turns into an equal noun."""
    return tomlkit.dumps(noun.plain())


def parse_assignment(text: str) -> tuple[str, object]:
    """`"layout.tp=4"` as its path and value; the value is read as TOML, or as a string where it is none."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        reject("--set", text, "must be field=value, such as recipe.seq_len=8192")
    try:
        return path.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except (ValueError, RecursionError):
        return path.strip(), value.strip()


def with_assignments(noun: N, assignments: list[str]) -> N:
    """A copy with `field=value` texts applied in turn, and checked when all are."""
    return noun.with_values(map(parse_assignment, assignments))
