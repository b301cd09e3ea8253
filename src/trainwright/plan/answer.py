"""What `plan` answers: the ranking, its layers balanced, the plans that no other beats, and what would change it.

The ranking is that of `plan/search.py`, with layers assigned evenly. Then those plans that are to be shown get the
best assignment that is found (`plan/balance.py`), visibly: a plan that gained says by how much. A plan further
down might overtake with its own best assignment; it is not looked at.
"""

import math
from typing import NamedTuple

from trainwright.plan.balance import balance
from trainwright.plan.candidates import candidates
from trainwright.plan.changes import changes
from trainwright.plan.predict import prediction
from trainwright.plan.race import Race
from trainwright.plan.search import Ranking, ranked
from trainwright.plan.shortlist import shortlist
from trainwright.plan.why import why, why_nothing_fits
from trainwright.spec.answers import Answer, Balanced, Prediction
from trainwright.spec.question import Question
from trainwright.spec.stages import sizes_text

SLOWEST = 1.25
"""Times the fastest step: slower plans are no alternative, however little memory they need."""

WHOLE = 200_000
"""Candidates that are all judged; of more, those that may take up to `SLOWEST` times the fastest step."""

MOST_SHOWN = 8
"""Plans of the front that are shown."""


class Shown(NamedTuple):
    """A plan of the ranking, its layers balanced where that helps."""

    row: int
    even: Prediction
    plan: Prediction

    @property
    def balanced(self) -> Balanced | None:
        """What it gained; None for an even one."""
        if self.plan is self.even:
            return None
        return Balanced(layout=self.plan.layout, step_s=self.plan.step_s, even_step_s=self.even.step_s)


def answer(question: Question) -> Answer:
    """The fastest plans for a question, fastest first, and what is to be said of them; none where nothing fits.

    Raises `InvalidSpec` where no layout is legal.
    """
    ranking = _ranking(question)
    evaluation = ranking.evaluation
    found = Answer(
        considered=ranking.considered,
        judged=len(evaluation.fits),
        feasible=int(evaluation.fits.sum()),
        plans=(),
        why=(),
    )
    if not ranking.rows:
        return found.changed(why=tuple(why_nothing_fits(question, evaluation)))
    shown = _shown(question, ranking)
    first = shown[0]
    changed = tuple(changes(question, ranking, first.even))
    slowest = math.inf if ranking.is_whole else SLOWEST
    reasons = [*_balanced_text(first), *why(question, ranking.race, first.row, first.even, slowest)]
    return found.changed(
        plans=tuple(each.plan for each in shown),
        why=(*reasons, *(each.text for each in changed)),
        pareto=tuple(_pareto(question, ranking, shown)),
        balanced=tuple(each.balanced for each in shown if each.balanced),
        changes=changed,
    )


def best_plan(question: Question) -> Prediction | None:
    """The first of the answer's plans, without what there is to say of it; None where nothing fits."""
    ranking = _ranking(question.changed(top=1))
    return _shown(question, ranking)[0].plan if ranking.rows else None


def _ranking(question: Question) -> Ranking:
    """That of `search`, though of a great many candidates not all are judged."""
    table = candidates(question)
    if len(table.columns) <= WHOLE:
        return ranked(table, question.top)
    evaluation, rows = shortlist(table, question.top, SLOWEST)
    return Ranking(Race(evaluation), rows, len(table.columns))


def _shown(question: Question, ranking: Ranking) -> list[Shown]:
    """The ranked plans with their layers balanced, fastest first."""
    shown = []
    for row in ranking.rows:
        even = plan = prediction(ranking.evaluation, row, question.tokens)
        found = balance(ranking.evaluation.table, row)
        if found is not None:
            plan = prediction(found.evaluation, 0, question.tokens)
        shown.append(Shown(row, even, plan))
    return sorted(shown, key=lambda each: each.plan.step_s)


def _balanced_text(first: Shown) -> list[str]:
    if first.balanced is None:
        return []
    sizes = sizes_text(first.plan.layout.stage_layers)
    return [f"stages of {sizes} layers: {first.balanced.saves:.1%} faster than even ones, compared below"]


def _pareto(question: Question, ranking: Ranking, shown: list[Shown]) -> list[Prediction]:
    """Some plans that no other beats in both step time and memory, the balanced ones among them."""
    evaluation, known = ranking.evaluation, {each.row: each.plan for each in shown}
    front = ranking.race.front(evaluation.fits, SLOWEST * evaluation.step_s(ranking.rows[0]))
    chosen = _spread([float(evaluation.peak_bytes[row]) for row in front])
    rows = [front[at] for at in chosen if front[at] not in known]
    plans = [*known.values(), *(prediction(evaluation, row, question.tokens) for row in rows)]
    plans.sort(key=lambda plan: (plan.step_s, plan.peak_bytes))
    kept: list[Prediction] = []
    for plan in plans:
        if not kept or plan.peak_bytes < kept[-1].peak_bytes:
            kept.append(plan)
    return kept


def _spread(peaks: list[float]) -> list[int]:
    """Places of `MOST_SHOWN` of falling peaks, the first, the last, and others about as far from one another."""
    wanted = [peaks[0] + (peaks[-1] - peaks[0]) * step / (MOST_SHOWN - 1) for step in range(MOST_SHOWN)]
    return sorted({min(range(len(peaks)), key=lambda at: abs(peaks[at] - peak)) for peak in wanted})
