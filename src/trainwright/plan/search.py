"""The search: all candidates evaluated, those that fit ranked by step time, and why the first one is first."""

from trainwright.plan.candidates import candidates
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import prediction
from trainwright.plan.why import why, why_nothing_fits
from trainwright.spec.answers import Answer
from trainwright.spec.question import Question


def search(question: Question) -> Answer:
    """The fastest plans for a question, fastest first, with reasons; none where nothing fits.

    Raises `InvalidSpec` where no layout is legal.
    """
    evaluation = Evaluation(candidates(question))
    best = evaluation.fastest(evaluation.fits, question.top)
    plans = tuple(prediction(evaluation, row, question.tokens) for row in best)
    reasons = why(question, evaluation, best[0], plans[0]) if best else why_nothing_fits(question, evaluation)
    return Answer(
        considered=len(evaluation.fits), feasible=int(evaluation.fits.sum()), plans=plans, why=tuple(reasons)
    )
