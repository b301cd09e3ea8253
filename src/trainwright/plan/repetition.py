"""Where a full pipe repeats itself, so that most of a long step need not be played.

In the middle of a schedule every rank's row is the same piece again and again, a round. Play a few rounds: once
every act ends just as much later than its like some rounds before, as far back as anything later waits for,
whatever is inserted there takes that time too, exactly. Rounds are left out in the middle, so the drain is played
as it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trainwright.plan.playing import Order, order_of, rows_of, turns_of
from trainwright.plan.table import Ints
from trainwright.spec.schedule import SCHEDULES, Row

TOLERANCE = 1e-12
"""Of shifts that count as equal, relative to the last end: rounding of sums of a few hundred."""


@dataclass(frozen=True)
class Steady:
    """The part of an order in which all rows repeat."""

    microbatches: int
    """Of one round."""
    places: Ints
    """Of the acts of all ranks, (rounds, acts), the last round last; beyond it the pipe drains."""
    reach: int
    """Rounds that an act's input may lie back."""

    def period(self, ends: list[float], among: Iterable[int] = ()) -> tuple[int, float] | None:
        """The fewest rounds (of `among`, or any) after which all repeats, and their seconds; None where none do.

        It does where acts end as much later than their likes so many rounds before, as far back as inputs reach.
        """
        round_ends = np.asarray(ends)[self.places]
        for rounds in among or range(1, len(round_ends) - self.reach + 1):
            shifts = round_ends[-self.reach :] - round_ends[-self.reach - rounds : -rounds]
            least, most = float(shifts.min()), float(shifts.max())
            if most - least <= TOLERANCE * ends[-1]:
                return rounds, most
        return None


@lru_cache(maxsize=64)
def steady_of(schedule: str, pp: int, vpp: int, num_microbatches: int) -> Steady | None:
    """The steady part of a schedule's order; None where it is too short to tell."""
    rows = rows_of(schedule, pp, vpp, num_microbatches)
    coded = [_codes(row) for row in rows]
    for microbatches in sorted({1, 2, pp}):
        # Where stages are held twice, a chunk of a rank sees only every other microbatch.
        shift, half = divmod(microbatches * SCHEDULES[schedule].num_stages(pp, vpp), pp * vpp)
        spans = [] if half else [_repeating(codes, shift) for codes in coded]
        if spans and all(span.stop - span.start >= 2 * span.acts for span in spans):
            order = order_of(schedule, pp, vpp, num_microbatches)
            return _cut(order, list(map(_turn_of_acts, rows)), spans, microbatches)
    return None


def _codes(row: Row) -> Ints:
    """Of each act what it is, and its microbatch, (2, acts)."""
    kinds, microbatches, chunks, paired = zip(*row, strict=True)
    what = list(zip(kinds, chunks, paired, strict=True))
    number = {each: code for code, each in enumerate(dict.fromkeys(what))}
    return np.array([[number[each] for each in what], microbatches])


class Span(NamedTuple):
    """The part of a row in which the same piece comes again and again."""

    start: int
    stop: int
    acts: int
    """Of a piece."""


def _repeating(codes: Ints, shift: int) -> Span:
    """The span around the row's middle whose pieces differ by `shift` microbatches alone; empty where none do."""
    later = np.array([0, shift])
    middle = codes.shape[1] // 2
    again = np.flatnonzero((codes == (codes[:, middle] + later)[:, None]).all(axis=0))
    acts = int(again[0]) - middle if len(again) else 0
    if acts <= 0:
        return Span(0, 0, 1)
    differs = (codes[:, :-acts] + later[:, None] != codes[:, acts:]).any(axis=0)
    before, after = np.flatnonzero(differs[:middle]), np.flatnonzero(differs[middle:])
    start = int(before[-1]) + 1 if len(before) else 0
    stop = middle + int(after[0]) if len(after) else len(differs)
    return Span(start, stop + acts, acts)


def _turn_of_acts(row: Row) -> Ints:
    """Of each act its turn's place in the row."""
    return np.array([at for at, turn in enumerate(turns_of(row)) for _ in turn])


def _cut(order: Order, turn_of_acts: list[Ints], spans: list[Span], microbatches: int) -> Steady | None:
    """The rounds that all rows' spans have in common; None where something in them waits for what comes after."""
    rows = [np.array(places)[turns] for places, turns in zip(order.rows, turn_of_acts, strict=True)]
    """For each rank the turn of each of its acts."""
    last_act = np.full(len(order.turns) + 1, -1)
    """Of each turn the place of its last act in its rank's row; turn 0 is the beginning."""
    for row in rows:
        last_act[row] = np.arange(len(row))
    table = np.array([(0, 0, 0, 0, 0), *order.turns])
    rank, waits = table[:, 0], table[:, 2:4]
    # Rounds before the end of the spans, 1 for the last one, 0 for all that comes after it.
    stops, acts = np.array([span.stop for span in spans]), np.array([span.acts for span in spans])
    back = np.maximum((stops[rank] - last_act - 1) // acts[rank] + 1, 0)
    reach = np.where(waits > 0, back[waits] - back[:, None], 0)
    rounds = min((span.stop - span.start) // span.acts for span in spans)
    if (reach[back > 0] + back[back > 0, None] < 1).any():
        return None
    pieces = [
        row[span.stop - rounds * span.acts : span.stop].reshape(rounds, span.acts)
        for row, span in zip(rows, spans, strict=True)
    ]
    return Steady(microbatches, np.concatenate(pieces, axis=1), max(1, int(reach[back <= 1].max())))
