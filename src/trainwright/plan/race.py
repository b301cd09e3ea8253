"""Which candidates are worth playing: the fastest ones, and those that no other beats in both time and memory.

A table's bounds are cheap and loose. They say in which order to look; before a schedule is played, a bound that
knows its rows (`plan/bounds.py`) says whether it can still win. What is left is played, so the answer is that of
playing every candidate.
"""

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.bounds import bounds
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.pipeline import Pipe
from trainwright.plan.table import Floats

FIRST_BLOCK, LARGEST_BLOCK = 32, 512
"""Candidates whose bounds are sharpened at once: few at first, as often the first ones win."""

SORTED_FIRST = 4096
"""Candidates that are put in order first; seldom more are looked at."""

ROUNDING = 1e-9
"""What a sum of seconds may be off by, relative to it: a bound is lowered so much."""

Rows = NDArray[np.intp]


class Race:
    """A race among the candidates of one table; what was played or bounded is kept for the next."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self._bound_s: Floats = evaluation.bound_s.copy()
        self._sharp = np.zeros(len(self._bound_s), dtype=bool)

    def fastest(self, among: NDArray[np.bool_], top: int, slowest_s: float = math.inf) -> list[int]:
        """The `top` fastest rows of `among` up to a step of `slowest_s`, fastest first; equals go by row."""
        best: list[tuple[float, int]] = []

        def worst_s() -> float:
            return min(best[-1][0], slowest_s) if len(best) == top else slowest_s

        for block in self._blocks(among):
            if self.evaluation.bound_s[block[0]] > worst_s():
                break
            for row in self._sharpened(block[self.evaluation.bound_s[block] <= worst_s()]):
                if self._bound_s[row] > worst_s():
                    break
                best = sorted([*best, (self.evaluation.step_s(row), row)])[:top]
        return [row for step_s, row in best if step_s <= slowest_s]

    def front(self, among: NDArray[np.bool_], slowest_s: float) -> list[int]:
        """The rows of `among`, up to a step of `slowest_s`, that no other equals in memory and step and beats in
        one of them; fastest first. Of equal ones the first row."""
        front = _Front()
        peak_bytes, bound_s = self.evaluation.peak_bytes, self.evaluation.bound_s
        for block in self._blocks(among):
            if bound_s[block[0]] > slowest_s:
                break
            alive = front.open(bound_s[block], peak_bytes[block])
            for row in self._sharpened(block[alive & (bound_s[block] <= slowest_s)]):
                bound, peak = self._bound_s[[row]], peak_bytes[[row]]
                if bound[0] <= slowest_s and front.open(bound, peak)[0]:
                    front.add(self.evaluation.step_s(row), float(peak[0]), row)
        return [row for step_s, _, row in front.members if step_s <= slowest_s]

    def leanest(self, among: NDArray[np.bool_], slowest_s: float) -> int | None:
        """The row of `among` with the least memory whose step is at most `slowest_s`; None where none is."""
        peak_bytes = self.evaluation.peak_bytes
        rows = np.flatnonzero(among & (self._bound_s <= slowest_s))
        rows = rows[np.argsort(peak_bytes[rows], kind="stable")]
        for start in range(0, len(rows), LARGEST_BLOCK):
            block = rows[start : start + LARGEST_BLOCK]
            self._sharpened(block)
            for row in block[self._bound_s[block] <= slowest_s].tolist():
                if self.evaluation.step_s(row) <= slowest_s:
                    return row
        return None

    def _blocks(self, among: NDArray[np.bool_]) -> Iterator[Rows]:
        """The rows of `among` by bound, lowest first, in blocks that grow."""
        rows, size, done = np.flatnonzero(among), FIRST_BLOCK, 0
        bound_s = self.evaluation.bound_s
        if len(rows) > SORTED_FIRST:
            first = np.argpartition(bound_s[rows], SORTED_FIRST)
            parts = [rows[np.sort(first[:SORTED_FIRST])], rows[np.sort(first[SORTED_FIRST:])]]
        else:
            parts = [rows]
        for part in parts:
            order, done = part[np.argsort(bound_s[part], kind="stable")], 0
            while done < len(order):
                yield order[done : done + size]
                done, size = done + size, min(2 * size, LARGEST_BLOCK)

    def _sharpened(self, rows: Rows) -> list[int]:
        """Rows with sharper bounds, lowest first."""
        kinds: dict[tuple[str, int, int, int], list[tuple[int, Pipe]]] = defaultdict(list)
        for row in rows[~self._sharp[rows]].tolist():
            pipe = self.evaluation.pipe(row)
            if pipe.pp > 1:
                kinds[pipe.schedule, pipe.pp, pipe.vpp, pipe.num_microbatches].append((row, pipe))
        for pipes in kinds.values():
            for (row, _), least_s in zip(pipes, _least_s([pipe for _, pipe in pipes]), strict=True):
                step_s = least_s + sum(self.evaluation.around(row, least_s, 0.0).values())
                self._bound_s[row] = max(self._bound_s[row], step_s * (1 - ROUNDING))
        self._sharp[rows] = True
        return sorted(rows.tolist(), key=lambda row: (self._bound_s[row], row))


def _least_s(pipes: list[Pipe]) -> list[float]:
    """Lower bounds of the makespans of pipes of one schedule, in seconds."""
    one = pipes[0]

    def stacked(values: Iterable[Iterable[float]]) -> Floats:
        return np.array([list(each) for each in values])

    least = bounds(
        one.schedule,
        one.pp,
        one.vpp,
        one.num_microbatches,
        stacked(pipe.forward_s for pipe in pipes),
        stacked(pipe.input_s for pipe in pipes),
        stacked(pipe.weight_s for pipe in pipes),
        np.array([pipe.send_s for pipe in pipes]),
        forward_ep_s=stacked(pipe.forward_ep_s for pipe in pipes) if one.forward_ep_s else None,
        backward_ep_s=stacked(pipe.backward_ep_s for pipe in pipes) if one.backward_ep_s else None,
        pair_hides=one.pair_hides,
    )
    return least.tolist()


class _Front:
    """Played candidates that no other beats: ever slower ones with ever less memory."""

    def __init__(self) -> None:
        self.members: list[tuple[float, float, int]] = []
        """Step seconds, peak bytes, row."""

    def open(self, bound_s: Floats, peak_bytes: Floats) -> NDArray[np.bool_]:
        """Whether candidates may be on the front: none that is as fast as their bound has as little memory."""
        if not self.members:
            return np.ones(len(bound_s), dtype=bool)
        steps, peaks, _ = (np.array(column) for column in zip(*self.members, strict=True))
        at = np.searchsorted(steps, bound_s, side="right") - 1
        return (at < 0) | (peaks[np.maximum(at, 0)] > peak_bytes)

    def add(self, step_s: float, peak_bytes: float, row: int) -> None:
        """Take a candidate in, unless one beats or equals it, and drop those that it beats."""
        faster = self.members[: bisect_right(self.members, (step_s, math.inf, 0))]
        equal = [each for each in faster if each[:2] == (step_s, peak_bytes)]
        if equal and row < equal[0][2]:
            self.members.remove(equal[0])
            insort(self.members, (step_s, peak_bytes, row))
        elif not faster or faster[-1][1] > peak_bytes:
            self.members = [each for each in self.members if each[0] < step_s or each[1] < peak_bytes]
            insort(self.members, (step_s, peak_bytes, row))
