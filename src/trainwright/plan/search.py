"""The search: all candidates judged, those that fit ranked by step time, and why the first one is first."""

from typing import NamedTuple

from trainwright.plan.candidates import candidates
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import prediction
from trainwright.plan.race import Race
from trainwright.plan.table import Table
from trainwright.plan.why import why, why_nothing_fits
from trainwright.spec.answers import Answer
from trainwright.spec.question import Question


class Ranking(NamedTuple):
    """Candidates of a question, judged, and the fastest of them that fit."""

    race: Race
    rows: list[int]
    """Fastest first; empty where nothing fits."""
    considered: int
    """Candidates in all."""

    @property
    def is_whole(self) -> bool:
        """Whether all of them are judged."""
        return len(self.evaluation.fits) == self.considered

    @property
    def evaluation(self) -> Evaluation:
        return self.race.evaluation


def ranked(table: Table, top: int) -> Ranking:
    """The fastest candidates of a table, all of them judged."""
    race = Race(Evaluation(table))
    return Ranking(race, race.fastest(race.evaluation.fits, top), len(race.evaluation.fits))


def search(question: Question) -> Answer:
    """The fastest plans for a question, fastest first, with reasons; none where nothing fits.

    Raises `InvalidSpec` where no layout is legal. What else `plan` answers is in `plan/answer.py`.
    """
    ranking = ranked(candidates(question), question.top)
    evaluation = ranking.evaluation
    plans = tuple(prediction(evaluation, row, question.tokens) for row in ranking.rows)
    if plans:
        reasons = why(question, ranking.race, ranking.rows[0], plans[0])
    else:
        reasons = why_nothing_fits(question, evaluation)
    return Answer(
        considered=ranking.considered,
        judged=len(evaluation.fits),
        feasible=int(evaluation.fits.sum()),
        plans=plans,
        why=tuple(reasons),
    )
