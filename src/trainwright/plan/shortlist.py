"""The fastest plans of a question without judging every candidate: for a search that is one of many.

The bound of the pipeline needs neither memory nor what stands around the pipeline, so it is cheap. The candidates
of the lowest bounds are judged; the fastest of them that fits says which others could still be faster; those are
judged too. So the answer is that of the whole search, in a part of its time. How many fit is not known.
"""

import numpy as np

from trainwright.plan.assembly import bounds, shape_of
from trainwright.plan.candidates import candidates
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.figures import PAIRED, Parts, insides
from trainwright.plan.race import ROUNDING, Race
from trainwright.plan.table import SCHEDULE, Floats, Ints, Table
from trainwright.spec.question import Question

FIRST_JUDGED = 4096
"""Candidates that are judged first; four times as many where too few of them fit."""


def shortlisted(question: Question, top: int = 1) -> tuple[Evaluation, list[int]]:
    """Judged candidates, and the fastest rows among them, fastest first: those of all; none where nothing fits.

    Raises `InvalidSpec` where no layout is legal.
    """
    return shortlist(candidates(question), top)


def shortlist(table: Table, top: int = 1, within: float = 1.0) -> tuple[Evaluation, list[int]]:
    """The same for a table of candidates. All are judged that may take up to `within` times the fastest step."""
    least_s, size = least_makespans(table), FIRST_JUDGED
    while True:
        size = min(size, len(least_s))
        first = np.sort(np.argpartition(least_s, size - 1)[:size])
        evaluation = Evaluation(table.take(first))
        best = Race(evaluation).fastest(evaluation.fits, top)
        if size == len(least_s):
            return evaluation, best
        if len(best) == top:
            break
        size *= 4
    slowest_s = max(evaluation.step_s(best[-1]), within * evaluation.step_s(best[0]))
    # Rows keep their order, so that equally fast ones rank as in the whole table.
    rows = np.flatnonzero(least_s * _stretch(evaluation) <= slowest_s)
    evaluation = Evaluation(table.take(rows))
    return evaluation, Race(evaluation).fastest(evaluation.fits, top)


def _stretch(evaluation: Evaluation) -> float:
    """How much longer a step gets by each second of its makespan: the same for all rows of as many devices."""
    longer, shorter = (sum(evaluation.around(0, makespan_s, 0.0).values()) for makespan_s in (1.0, 0.0))
    return (1 + longer - shorter) * (1 - ROUNDING)


def least_makespans(table: Table) -> Floats:
    """A lower bound of each candidate's makespan, in seconds, without sends."""
    firsts, inside = insides(table)
    figures = Parts.of(table.take(firsts)).figures()
    columns, rates = table.columns, table.cluster.rates
    at = columns.policy * len(firsts) + inside
    hidden_s = rates.overlap.ep * (figures.forward_ep_s + figures.backward_ep_s)
    work_s = figures.forward_s + figures.input_s + figures.weight_s
    layers = np.array([-1 if policy.layers is None else policy.layers for policy in table.policies])[
        columns.policy
    ]
    least_s = np.empty(len(columns))
    for rows in _groups(columns.schedule, columns.pp, columns.vpp, layers):
        schedule, pp, vpp = (int(each[rows[0]]) for each in (columns.schedule, columns.pp, columns.vpp))
        again = table.policies[columns.policy[rows[0]]].layers
        counts = bounds(shape_of(table, SCHEDULE[schedule], pp, vpp, again))
        own_s = work_s - hidden_s if SCHEDULE[schedule] in PAIRED else work_s
        acts_s = rates.microbatch_overhead_s * counts.acts[:, None]
        ways_s = counts.forward_before @ figures.forward_s + counts.backward_after @ figures.input_s
        each_s = counts.work @ own_s + acts_s
        places = at[rows]
        least_s[rows] = (table.num_microbatches[rows] * each_s[:, places] + ways_s[:, places]).max(axis=0)
    return least_s


def _groups(*columns: Ints) -> list[Ints]:
    """Rows that are alike in all columns."""
    order = np.lexsort(columns)
    differs = [column[order][1:] != column[order][:-1] for column in columns]
    return np.split(order, np.flatnonzero(np.any(differs, axis=0)) + 1)
