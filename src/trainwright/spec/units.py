"""Prefixes live here and nowhere else: SI inside the program, GB and GiB never confused on the way out.

Every number of the program is in seconds, bytes, FLOPs, tokens or dollars. This file turns them into text
for people (`bytes_text(80 * GIB) == "80.0 GiB"`) and nothing else scales a number by a power of ten.
"""

from decimal import Decimal

from trainwright.spec.errors import reject

KILO, MEGA, GIGA, TERA, PETA = 1e3, 1e6, 1e9, 1e12, 1e15
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86400.0


COUNT_SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
"""Powers of ten of a count as people write it: 100B tokens are 100 billion."""


def parse_count(text: str, field: str) -> int:
    """A count above zero from `"15.6T"`, `"100B"`, `"15.6e12"` or `"1_000"`; `field` is named in the error."""
    number = text.strip().replace("_", "").replace(",", "")
    suffix = number[-1:].upper() if number[-1:].isalpha() else ""
    try:
        count = Decimal(number[: len(number) - len(suffix)]).scaleb(COUNT_SUFFIXES[suffix])
        whole = int(count) if count.adjusted() < 30 else 0
    except (KeyError, ArithmeticError, ValueError):
        whole, count = 0, Decimal(0)
    if whole < 1 or whole != count:
        reject(field, text, "must be a whole number above zero, such as 15.6T, 100B, 2M or 15.6e12")
    return whole


def count_text(count: float) -> str:
    """A count as people say it: `count_text(15.6e12) == "15.6 T"`, `count_text(8192) == "8,192"`."""
    for suffix, power in reversed(COUNT_SUFFIXES.items()):
        if power > 3 and abs(count) >= 10**power:
            return f"{_significant(count / 10**power, 4)} {suffix}"
    return f"{count:,.0f}"


def scaled(value: float, unit: str, digits: int = 3) -> str:
    """`value` with an SI prefix: `scaled(4.0e14, "FLOP/s") == "400 TFLOP/s"`."""
    magnitude = abs(value)
    for scale, prefix in ((1e18, "E"), (PETA, "P"), (TERA, "T"), (GIGA, "G"), (MEGA, "M"), (KILO, "k")):
        if magnitude >= scale:
            return f"{_significant(value / scale, digits)} {prefix}{unit}"
    return f"{_significant(value, digits)} {unit}"


def bytes_text(num_bytes: float) -> str:
    """Binary prefixes, as memory is sold to programs: `bytes_text(3 * MIB) == "3.00 MiB"`."""
    magnitude = abs(num_bytes)
    for scale, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= scale:
            return f"{_significant(num_bytes / scale, 3)} {name}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """`seconds_text(0.0123) == "12.3 ms"`; days from two days on."""
    magnitude = abs(seconds)
    if magnitude >= 2 * SECONDS_PER_DAY:
        return f"{_significant(seconds / SECONDS_PER_DAY, 3)} days"
    if magnitude >= 2 * SECONDS_PER_HOUR:
        return f"{_significant(seconds / SECONDS_PER_HOUR, 3)} h"
    if magnitude >= 1:
        return f"{_significant(seconds, 3)} s"
    if magnitude >= 1e-3:
        return f"{_significant(seconds * 1e3, 3)} ms"
    return f"{_significant(seconds * 1e6, 3)} us"


def _significant(value: float, digits: int) -> str:
    """Plain decimals with `digits` significant figures, never an exponent: 0.1234 -> 0.123, 4321 -> 4321."""
    if value == 0:
        return "0"
    whole_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(digits - whole_digits, 0)}f}"
