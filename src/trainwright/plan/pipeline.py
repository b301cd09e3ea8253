"""How long a pipeline's step takes: its schedule's rows, played with the seconds of every stage.

`makespan` plays as much as needs to be played (`plan/repetition.py`), `timeline` all of it. What a search needs
first, a lower bound for many candidates at once, is in `plan/bounds.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainwright.plan.flow import flow_makespan
from trainwright.plan.playing import Order, Work, order_of, play, rows_of, turns_of
from trainwright.plan.repetition import steady_of
from trainwright.spec.schedule import SCHEDULES, Act

FIRST_ROUNDS = 4
"""Times pp microbatches that are played before looking for repetition; doubled until it is found."""

MOST_ROUNDS = 256
"""The same where all forwards come first: from then on the rest goes at the last round's rate."""

MOST_ACTS = 1 << 17
"""Where no repetition is found in that many acts, the rest goes at the rate of the last pp microbatches."""


@dataclass(frozen=True)
class Pipe:
    """A schedule, and the seconds of its acts on each stage of the model."""

    schedule: str
    pp: int
    vpp: int
    num_microbatches: int
    forward_s: Sequence[float]
    input_s: Sequence[float]
    """Of the input gradient; a whole backward takes input_s + weight_s."""
    weight_s: Sequence[float]
    send_s: float
    """Of an activation's (or gradient's) way to another rank."""
    blocking_sends: bool = False
    """The sender waits for it too."""
    forward_ep_s: Sequence[float] = ()
    """Of forward_s, what is communication that another act may hide if paired; empty: nothing."""
    backward_ep_s: Sequence[float] = ()
    """Of input_s + weight_s, the same."""
    pair_hides: float = 0.0
    """Of what two paired acts could hide of each other's communication, the part that they do."""

    def seconds_of(self, works: Sequence[Work]) -> list[float]:
        """Of each turn's work."""
        by_kind = {
            "F": self.forward_s,
            "I": self.input_s,
            "W": self.weight_s,
            "B": [one + other for one, other in zip(self.input_s, self.weight_s, strict=True)],
        }
        return [
            by_kind[work[0].kind][work[0].stage]
            if len(work) == 1
            else sum(by_kind[kind][stage] for kind, stage in work) - self._hidden_s(work)
            for work in works
        ]

    def _hidden_s(self, pair: Work) -> float:
        """A pair is as long as both its acts, less what communication of either runs beside compute."""
        whole = communication = 0.0
        for kind, stage in pair:
            forward = kind == "F"
            part = self.forward_ep_s if forward else self.backward_ep_s
            communication += part[stage] if part else 0.0
            whole += self.forward_s[stage] if forward else self.input_s[stage] + self.weight_s[stage]
        return self.pair_hides * min(communication, whole - communication)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(sum(self.forward_s) + sum(self.input_s) + sum(self.weight_s) + self.send_s)


class Played(NamedTuple):
    """An act of a step in time; two that are paired have the same."""

    rank: int
    stage: int
    act: Act
    start_s: float
    end_s: float


def makespan(pipe: Pipe) -> float:
    """Seconds from the first act to the last, infinite where an act is."""
    if not pipe.is_finite:
        return math.inf
    rounds, rest = divmod(pipe.num_microbatches, pipe.pp)
    if SCHEDULES[pipe.schedule].forwards_first:
        return extrapolated(pipe, lambda count: _flown(pipe, count), MOST_ROUNDS)
    played = FIRST_ROUNDS
    while played < rounds and _num_acts(pipe, played * pipe.pp + rest) <= MOST_ACTS:
        seconds = _repeated(pipe, played * pipe.pp + rest)
        if seconds is not None:
            return seconds
        played *= 2
    return extrapolated(pipe, lambda count: _played(pipe, count)[2], played)


def _flown(pipe: Pipe, num_microbatches: int) -> float:
    """The whole makespan where all forwards come first."""
    backward_s = [one + other for one, other in zip(pipe.input_s, pipe.weight_s, strict=True)]
    return flow_makespan(
        pipe.pp,
        num_microbatches,
        pipe.forward_s,
        backward_s,
        pipe.send_s,
        blocking_sends=pipe.blocking_sends,
    )


def _num_acts(pipe: Pipe, num_microbatches: int) -> int:
    return 3 * pipe.pp * pipe.vpp * num_microbatches


def _played(pipe: Pipe, num_microbatches: int) -> tuple[Order, list[float], float]:
    order = order_of(pipe.schedule, pipe.pp, pipe.vpp, num_microbatches)
    seconds = pipe.seconds_of(order.works)
    return order, *play(order, seconds, pipe.send_s, blocking_sends=pipe.blocking_sends)


def _repeated(pipe: Pipe, played: int) -> float | None:
    """The makespan, by playing so many microbatches and adding rounds; None where they don't repeat."""
    among: tuple[int, ...] = ()
    while steady := steady_of(pipe.schedule, pipe.pp, pipe.vpp, played):
        _, ends, last = _played(pipe, played)
        period = steady.period(ends, among)
        if period is None:
            return None
        rounds, shift_s = period
        missing, odd = divmod(pipe.num_microbatches - played, rounds * steady.microbatches)
        if not odd:
            return last + missing * shift_s
        # Play as many more as don't fill a period.
        played, among = played + odd, (rounds,)
    return None


def extrapolated(pipe: Pipe, played_s: Callable[[int], float], rounds: int) -> float:
    """`played_s` of all microbatches: played, or from `rounds` times pp on at the last pp's rate."""
    wanted, rest = divmod(pipe.num_microbatches, pipe.pp)
    if wanted <= rounds + 1:
        return played_s(pipe.num_microbatches)
    shorter, longer = (played_s(count * pipe.pp + rest) for count in (rounds, rounds + 1))
    return longer + (wanted - rounds - 1) * (longer - shorter)


def timeline(pipe: Pipe) -> tuple[Played, ...]:
    """Every act of the step, in an order in which each comes after what it waits for; all of it is played."""
    order, ends, _ = _played(pipe, pipe.num_microbatches)
    seconds = pipe.seconds_of(order.works)
    rows = rows_of(pipe.schedule, pipe.pp, pipe.vpp, pipe.num_microbatches)
    acts = [turns_of(row) for row in rows]
    return tuple(
        Played(rank, stage, act, end - seconds[work], end)
        for (rank, work, *_), end in zip(order.turns, ends[1:], strict=True)
        for act, (_, stage) in zip(next(acts[rank]), order.works[work], strict=True)
    )
