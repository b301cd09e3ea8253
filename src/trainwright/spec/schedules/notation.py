"""A row of acts written as papers draw it: "F0 F1" twice, then "I1 W1", then "F0&B1" ten times.

A word is a kind of act and a chunk. Each takes the next microbatch: of forwards, and of backwards, whole or not.
"W0" takes the oldest input gradient of chunk 0 that waits for its weight gradient, "W" the oldest of any chunk;
"F0&B1" are two acts that are paired.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count

from trainwright.spec.schedules.acts import Act, Row


def written(phrases: Iterable[tuple[str, int]]) -> Row:
    """The row of phrases that are each done a number of times; a phrase is words with spaces between."""
    row: list[Act] = []
    numbers: defaultdict[tuple[bool, int | None], Iterator[int]] = defaultdict(count)
    """Microbatches to come, of forwards and of backwards of each chunk."""
    waiting: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
    """Input gradients whose weight gradient is still to come, by chunk: place in the row, and microbatch."""
    for phrase, times in phrases:
        words = [(*word, numbers[word[0] == "F", word[1]]) for word in _words(phrase)]
        for kind, chunk, paired, number in words * times:
            if kind == "W":
                of = chunk if chunk is not None else min(waiting, key=lambda each: waiting[each] or NEVER)
                row.append(_act("W", waiting[of].popleft()[1], of))
                continue
            assert chunk is not None, f"{kind} of {phrase!r} says no chunk"
            microbatch = next(number)
            if kind == "I":
                waiting[chunk].append((len(row), microbatch))
            row.append(_act(kind, microbatch, chunk, paired))
    return tuple(row)


_act = lru_cache(maxsize=1 << 12)(Act)
"""An act; ranks do the same ones, at other times."""

NEVER = deque([(1 << 62, 0)])
"""After every input gradient."""


def _words(phrase: str) -> list[tuple[str, int | None, bool]]:
    """Kind, chunk (None: any), and whether it is paired, of each act of a phrase."""
    acts = []
    for word in phrase.split():
        parts = word.split("&")
        acts += [(part[0], int(part[1:]) if part[1:] else None, len(parts) > 1) for part in parts]
    return acts
