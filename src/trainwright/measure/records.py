"""Lines of JSON into nouns: what a program wrote down (`spec/record.py`), checked line by line."""

import json
from typing import TypeVar

from trainwright.spec.base import Noun
from trainwright.spec.errors import InvalidSpec, shown
from trainwright.spec.record import RankRecord, Sample, StepSeconds

N = TypeVar("N", bound=Noun)


def parse_rank_records(text: str, name: str) -> tuple[RankRecord, ...]:
    """The ranks of a finished run from the text of its ledger.jsonl, by rank; `name` is the file's."""
    records = sorted(_parse_lines(text, RankRecord, name), key=lambda record: record.rank)
    ranks = [record.rank for record in records]
    if ranks != list(range(len(records))):
        raise InvalidSpec(f"{name}: holds ranks {shown(ranks)}; each rank must be there once, from 0 on")
    return tuple(records)


def parse_step_seconds(text: str, name: str) -> tuple[StepSeconds, ...]:
    """Seconds by cause of each step of one rank, from the text of a causes/rank-N.jsonl."""
    return _parse_lines(text, StepSeconds, name)


def parse_samples(text: str, name: str) -> tuple[Sample, ...]:
    """Micro-measurements from the text of a samples.jsonl."""
    return _parse_lines(text, Sample, name)


def _parse_lines(text: str, noun: type[N], name: str) -> tuple[N, ...]:
    """The nouns of a text, one per line; blank lines don't count. `InvalidSpec` names the first wrong line."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            ended = "; it ends early, as if its writer had been stopped" if _is_truncated(text, line) else ""
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "can't be read"
            raise InvalidSpec(f"{name}, line {number}: not JSON: {reason}{ended}") from None
        if not isinstance(values, dict):
            raise InvalidSpec(f"{name}, line {number}: {shown(line)} is not a JSON object")
        try:
            found.append(noun.parse(values))
        except InvalidSpec as error:
            raise InvalidSpec(f"{name}, line {number}: {error}") from None
    if not found:
        raise InvalidSpec(f"{name}: has no lines; the program that writes it did not finish")
    return tuple(found)


def _is_truncated(text: str, line: str) -> bool:
    return text.endswith(line) and line.lstrip().startswith("{")
