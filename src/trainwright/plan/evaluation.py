"""A table's candidates judged: which fit, and which are fastest.

Memory and a lower bound of the step are known for all of them at once; a schedule is played only where the bound
leaves a candidate in the race, best bound first, so the answer is that of playing every one.
"""

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.evaluate import Group, groups, lower_bounds, step_s, step_seconds
from trainwright.plan.table import Floats, Table
from trainwright.spec.ledger import SecondsCause


class Evaluation:
    """Judgement of a table. Arrays have one entry per row of the table."""

    def __init__(self, table: Table) -> None:
        rows = len(table.columns)
        self.table = table
        self.groups: list[Group] = []
        self.group_of = np.zeros(rows, dtype=np.intp)
        self.place: NDArray[np.intp] = np.zeros(rows, dtype=np.intp)
        """Where the row stands in its group."""
        self.peak_bytes: Floats = np.zeros(rows)
        self.bound_s: Floats = np.full(rows, np.inf)
        for group in groups(table):
            self.group_of[group.rows] = len(self.groups)
            self.place[group.rows] = np.arange(len(group.rows))
            self.peak_bytes[group.rows] = group.memory.total.max(axis=1)
            self.bound_s[group.rows] = lower_bounds(group)
            self.groups.append(group)
        self.fits: NDArray[np.bool_] = self.peak_bytes <= table.cluster.device.memory_bytes
        self._step_s: dict[int, float] = {}

    def seconds(self, row: int) -> dict[SecondsCause, float]:
        """Seconds of the row's step by cause."""
        return step_seconds(self.groups[self.group_of[row]], int(self.place[row]))

    def step_s(self, row: int) -> float:
        """Seconds of the row's step, its schedule played."""
        if row not in self._step_s:
            self._step_s[row] = step_s(self.groups[self.group_of[row]], int(self.place[row]))
        return self._step_s[row]

    def fastest(self, among: NDArray[np.bool_], top: int) -> list[int]:
        """The `top` fastest rows of `among`, fastest first; equals go by row."""
        order = np.flatnonzero(among)
        order = order[np.argsort(self.bound_s[order], kind="stable")]
        best: list[tuple[float, int]] = []
        for row in order.tolist():
            if len(best) == top and self.bound_s[row] > best[-1][0]:
                break
            best = sorted([*best, (self.step_s(row), row)])[:top]
        return [row for _, row in best]
