"""Who hangs, and where: rules over what is seen of all ranks at one moment.

A rank that hangs stops all others at their next collective with it, so most of those that stand still only wait.
A process that is stopped, or whose thread is silent, names itself. Where all threads beat, the program of every
rank has been in one place for long: one that waits in no collective is it; and where all wait, those are it that
have not come to a collective of their group which others have entered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.spec.supervision import HANG_FACTOR
from trainwright.train.faults.sights import Answer, Collective, Sight

STOPPED_S = 1.0
"""A process that stays stopped so long was not stopped for a moment, as a debugger or a full terminal does."""
FIRST_STEPS = 2
"""Of which nothing is known yet, in the first start: what compiles or connects in them takes its time."""


@dataclass(frozen=True)
class Hang:
    """What is said of it; no ranks where none could be told."""

    ranks: tuple[int, ...]
    text: str
    still_s: float


def limit_s(sights: Sequence[Sight], hang_s: float, patience_s: float, known_s: float = 0.0) -> float:
    """How long all may stand still; `patience_s` where it isn't the steps that decide. `known_s`: the longest act
    of an earlier start of the same processes, first steps included; 0 where there was none."""
    are_first = any(each.steps_done < FIRST_STEPS for each in sights)
    if any(not each.is_in_step for each in sights) or (are_first and not known_s):
        return patience_s
    return max(hang_s, HANG_FACTOR * max(known_s, *(each.longest_s for each in sights)))


def learned_s(sights: Sequence[Sight]) -> float:
    """The longest act of all ranks, for the next start of these processes; 0 where not even the first steps were
    done."""
    if any(each.steps_done < FIRST_STEPS for each in sights):
        return 0.0
    return max((each.longest_s for each in sights), default=0.0)


def stopped(sights: Sequence[Sight], since_s: Mapping[int, float]) -> Hang | None:
    """Processes that have been stopped for long; `since_s` says for how long they have been seen so."""
    found = [each for each in sights if each.is_stopped and since_s.get(each.rank, 0.0) >= STOPPED_S]
    if not found:
        return None
    still_s = max(each.silent_s for each in found)
    texts = [f"rank {each.rank} hangs {each.place}: its process is stopped" for each in found]
    return Hang(tuple(each.rank for each in found), "; ".join(texts), still_s)


def stands_still(sights: Sequence[Sight], hang_s: float, patience_s: float, known_s: float = 0.0) -> bool:
    """Whether no rank has got on for so long that one must hang."""
    return bool(sights) and min(each.still_s for each in sights) > limit_s(sights, hang_s, patience_s, known_s)


def named(sights: Sequence[Sight], answers: Mapping[int, Answer], silence_s: float) -> Hang:
    """Who it is, when all stand still and those that could have answered."""
    still_s = min(each.still_s for each in sights)
    found = [each for each in sights if each.rank not in answers and each.silent_s > silence_s]
    why = "its process runs, and no other thread of it gets to run"
    if not found:
        found = [each for each in sights if each.rank in answers and not answers[each.rank].waits]
        why = ""
    if not found:
        behind, collective = _behind(answers)
        found = [each for each in sights if each.rank in behind]
        if found and collective is not None:
            others = ", ".join(str(rank) for rank in sorted(answers) if rank not in behind)
            why = f"it has not come to {_text(collective)}, in which {others} wait"
    if not found:
        places = {f"{each.place}{_at(answers.get(each.rank))}" for each in sights}
        return Hang((), f"all ranks wait {'; '.join(sorted(places))}", still_s)
    texts = []
    for each in found:
        more = [why, _waited_for(answers, each.rank)]
        tail = "; ".join(filter(None, more))
        at = _at(answers.get(each.rank))
        texts.append(f"rank {each.rank} hangs {each.place}{at}{': ' + tail if tail else ''}")
    return Hang(tuple(each.rank for each in found), "; ".join(texts), still_s)


def _at(answer: Answer | None) -> str:
    return f" ({answer.where})" if answer is not None and answer.where else ""


def _waited_for(answers: Mapping[int, Answer], rank: int) -> str:
    """In which collective others stand meanwhile."""
    waiting: dict[str, list[int]] = {}
    for other, answer in sorted(answers.items()):
        if other != rank and answer.waits and answer.collectives:
            waiting.setdefault(_text(answer.collectives[-1]), []).append(other)
    return "; ".join(f"{', '.join(map(str, ranks))} wait in {text}" for text, ranks in waiting.items())


def _behind(answers: Mapping[int, Answer]) -> tuple[set[int], Collective | None]:
    """Ranks that lack a collective which others of the same group have entered."""
    furthest: dict[str, Collective] = {}
    for answer in answers.values():
        for each in answer.collectives:
            if each.group not in furthest or furthest[each.group].number < each.number:
                furthest[each.group] = each
    lacking = {
        (rank, each.group)
        for rank, answer in answers.items()
        for each in answer.collectives
        if each.number < furthest[each.group].number
    }
    if not lacking:
        return set(), None
    return {rank for rank, _ in lacking}, furthest[min(group for _, group in lacking)]


def _text(collective: Collective) -> str:
    return f"{collective.name} number {collective.number} over {collective.axis}"
