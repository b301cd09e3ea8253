"""Rows of acts put in an order in which each comes after what it waits for, and played in that order.

What a rank does at once is a turn: an act, or a forward and a backward that are paired. A turn starts when its
rank is free and its inputs have arrived. The order depends on the schedule's shape alone and is kept; seconds come
later.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from trainwright.spec.schedule import SCHEDULES, Row, Rows


class Pass(NamedTuple):
    """An act as its seconds depend on it: what is done, on which stage of the model."""

    kind: str
    stage: int


Work = tuple[Pass, ...]
"""Of a turn: one pass, or a forward and a backward."""

Turn = tuple[int, int, int, int, bool]
"""Its rank; its work's place in `Order.works`; the turns of other ranks whose outputs it needs (a second one where
it is a pair), as places in the order counted from 1, 0 where it waits for nobody; whether another rank needs its
output."""


@dataclass(frozen=True)
class Order:
    """All ranks' turns, each after those that it waits for."""

    turns: tuple[Turn, ...]
    works: tuple[Work, ...]
    rows: tuple[tuple[int, ...], ...]
    """For each rank the places of its turns, counted from 1, in the order of its row."""

    @cached_property
    def has_pairs(self) -> bool:
        return any(len(work) > 1 for work in self.works)

    @cached_property
    def lone_turns(self) -> tuple[tuple[int, int, int], ...]:
        """Of each turn the place of the one before it on its rank, of the one whose output it needs, and its work:
        all that counts where none is paired and nobody waits for sends."""
        before, made = dict[int, int](), []
        for place, (rank, work, waits_for, *_) in enumerate(self.turns, start=1):
            made.append((before.get(rank, 0), waits_for, work))
            before[rank] = place
        return tuple(made)


@lru_cache(maxsize=64)
def rows_of(schedule: str, pp: int, vpp: int, num_microbatches: int) -> Rows:
    """The schedule's rows, kept."""
    return SCHEDULES[schedule].rows(pp, vpp, num_microbatches)


def turns_of(row: Row) -> Iterator[Row]:
    """A row's acts one by one, paired ones together."""
    left = iter(row)
    for act in left:
        yield (act, next(left)) if act.paired else (act,)


@lru_cache(maxsize=64)
def order_of(schedule: str, pp: int, vpp: int, num_microbatches: int) -> Order:
    """The turns of a schedule; AssertionError where its ranks wait for one another in a circle."""
    works: dict[Work, int] = {}
    rows = _asked(schedule, pp, vpp, num_microbatches, works)
    made = {NOTHING: 0}
    """The place of the turn that made an output."""
    turns: list[tuple[int, int, int, int]] = [(-1, -1, 0, 0)]
    sending = set[int]()
    places: list[list[int]] = [[] for _ in rows]
    total = sum(map(len, rows))
    while len(turns) <= total:
        before = len(turns)
        for rank, row in enumerate(rows):
            at = len(places[rank])
            while at < len(row):
                work, needs, needs_too, makes, makes_too = row[at]
                waits_for, waits_too = made.get(needs), made.get(needs_too)
                if waits_for is None or waits_too is None:
                    break
                # What the rank made itself it did before: being free is enough.
                waits_for = 0 if turns[waits_for][0] == rank else waits_for
                waits_too = 0 if turns[waits_too][0] == rank else waits_too
                sending.update((waits_for, waits_too))
                made[makes] = made[makes_too] = len(turns)
                made[NOTHING] = 0
                places[rank].append(len(turns))
                turns.append((rank, work, waits_for, waits_too))
                at += 1
        assert len(turns) > before, f"schedule {schedule} deadlocks at {pp=} {vpp=} {num_microbatches=}"
    played = tuple((*turn, place in sending) for place, turn in enumerate(turns[1:], start=1))
    return Order(played, tuple(works), tuple(map(tuple, places)))


NOTHING = -1
"""In place of an output that is not needed, or not made."""

Asked = tuple[int, int, int, int, int]
"""A turn's work, the outputs that it needs, and those that it makes; up to two of each."""


def _asked(schedule: str, pp: int, vpp: int, num_microbatches: int, works: dict[Work, int]) -> list[list[Asked]]:
    """For each rank what its turns ask for; fills `works`."""
    stages, num_stages = SCHEDULES[schedule].stages(pp, vpp), SCHEDULES[schedule].num_stages(pp, vpp)

    def needs_and_makes(kind: str, microbatch: int, stage: int) -> tuple[int, int]:
        """Outputs as numbers: even ones of backwards, odd ones of forwards."""
        makes = 2 * (microbatch * num_stages + stage) + (kind == "F")
        if kind == "W":
            return NOTHING, NOTHING
        ahead = -1 if kind == "F" else 1
        return makes + 2 * ahead if 0 <= stage + ahead < num_stages else NOTHING, makes

    rows = []
    for held, row in zip(stages, rows_of(schedule, pp, vpp, num_microbatches), strict=True):
        asked: list[Asked] = []
        for turn in turns_of(row):
            kind, microbatch, chunk, _ = turn[0]
            needs, makes = needs_and_makes(kind, microbatch, held[chunk])
            needs_too = makes_too = NOTHING
            work: Work = (Pass(kind, held[chunk]),)
            if len(turn) > 1:
                kind, microbatch, chunk, _ = turn[1]
                needs_too, makes_too = needs_and_makes(kind, microbatch, held[chunk])
                work += (Pass(kind, held[chunk]),)
            asked.append((works.setdefault(work, len(works)), needs, needs_too, makes, makes_too))
        rows.append(asked)
    return rows


def play(
    order: Order, seconds: Sequence[float], send_s: float, *, blocking_sends: bool = False
) -> tuple[list[float], float]:
    """When each turn ends (counted from 1), and when the last rank is free. `seconds` are those of `order.works`.

    An output takes send_s to another rank; with blocking_sends its maker waits for it too.
    """
    # Most schedules wait for one turn at a time, and for no send: the general loop below without its branches.
    if not order.has_pairs and not blocking_sends:
        ends = [0.0]
        for before, waits_for, work in order.lone_turns:
            start = ends[before]
            arrival = ends[waits_for] + send_s
            if arrival > start and waits_for:
                start = arrival
            ends.append(start + seconds[work])
        return ends, max(ends[row[-1]] for row in order.rows)
    free = [0.0] * len(order.rows)
    ends = [-math.inf]
    blocked_s = send_s if blocking_sends else 0.0
    for rank, work, waits_for, waits_too, sends in order.turns:
        start = free[rank]
        arrival = ends[waits_for] + send_s
        if arrival > start:
            start = arrival
        if waits_too:
            arrival = ends[waits_too] + send_s
            if arrival > start:
                start = arrival
        end = start + seconds[work]
        ends.append(end)
        free[rank] = end + blocked_s if sends else end
    return ends, max(free)
