"""The predicted step of every pipeline rank, event by event: the schedule's acts as they are played, with what
of them is exposed communication, the bubbles between them, sends, and what follows the pipeline.

Of an act's communication is known how long it is and not where in it: it is drawn at the act's end. What sends
add to a step is a difference of two steps (`causes`), so no single gap knows its part: of a rank's gaps those
that waited for a send take it, each as much as a send is long, in proportion.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trainwright.plan import pipeline
from trainwright.plan.acts import EXPOSED as EXPOSED_CAUSES
from trainwright.plan.acts import Acts, Seconds
from trainwright.plan.assembly import assembly
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.pipeline import Pipe, Played
from trainwright.plan.recompute_budget import resolved
from trainwright.plan.shortening import acts_each, most_microbatches, num_microbatches, with_microbatches
from trainwright.plan.table import Table
from trainwright.spec.errors import reject
from trainwright.spec.ledger import SecondsCause
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES, Placement
from trainwright.spec.timeline import ACTS, AFTER, BUBBLE, DP, EXPOSED, SENDS, TRACKS, Event, Timeline

MOST_EVENTS = 200_000
"""A step with more is shown with fewer microbatches, unless it is asked for more."""

MOST_ASKED_EVENTS = 5_000_000
"""However many are asked for."""

AROUND: tuple[SecondsCause, ...] = ("core_sharing", "dp", "optimizer", "straggling", "host", "software")
"""What follows the pipeline, in order. Only dp and the optimizer do so really; the rest is all over the step."""
SPREAD = {"core_sharing", "straggling", "host", "software"}

Causes = Mapping[tuple[str, int], dict[SecondsCause, float]]
"""Seconds by cause of an act of each kind on each stage."""


@dataclass(frozen=True)
class _Gap:
    """Time in which a rank does nothing. `waits`: for an output of another rank."""

    start_s: float
    end_s: float
    waits: bool

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def timeline(run: Run, microbatches: int | None = None) -> Timeline:
    """The run's step, or where it has very many acts a shorter one; `microbatches` says how short.

    Raises `InvalidSpec` where the run, or a step of so many microbatches, can't be.
    """
    run = resolved(run.check()).run
    shown = with_microbatches(run, _shown(run, microbatches))
    evaluation = Evaluation(Table.of_run(shown))
    pipe = evaluation.pipe(0)
    played = by_rank(pipeline.timeline(pipe), pipe.pp)
    with_sends_s = pipeline.makespan(pipe)
    sends_add_s = with_sends_s - pipeline.makespan(evaluation.pipe(0, sends=False)) if pipe.pp > 1 else 0.0
    around = evaluation.around(0, with_sends_s, evaluation.sharing_s(0, with_sends_s))
    causes, stages = _causes(evaluation), SCHEDULES[pipe.schedule].stages(pipe.pp, pipe.vpp)
    hidden_s = _hidden_dp_s(shown, around["dp"])
    events: list[Event] = []
    for rank, turns in enumerate(played):
        mine = [event for turn in turns for event in _act_events(turn, causes)]
        gaps = _gaps(turns, with_sends_s)
        mine += _bubbles(rank, gaps, pipe.send_s * (1 + pipe.blocking_sends), max(sends_add_s, 0.0))
        mine += _sends(pipe, turns, stages)
        mine += _beside(shown, rank, hidden_s, turns[-1][-1].end_s)
        mine += _around(rank, around, with_sends_s)
        events += sorted(mine, key=lambda event: TRACKS.index(event.track))
    return Timeline(
        run_name=run.name,
        step_s=with_sends_s + sum(around.values()),
        num_microbatches=pipe.num_microbatches,
        of_microbatches=num_microbatches(run),
        stages=stages,
        events=tuple(events),
    )


def _shown(run: Run, asked: int | None) -> int:
    """Microbatches of the step that is shown."""
    beside = 2 * (run.layout.pp > 1)  # a bubble and a send
    each = acts_each(run) * (1 + len(EXPOSED_CAUSES) + beside)
    if asked is None:
        return most_microbatches(run, MOST_EVENTS, each)
    if asked * each > MOST_ASKED_EVENTS:
        most = int(MOST_ASKED_EVENTS / each)
        reject("--microbatches", asked, f"makes up to {asked * each:,.0f} events; at most {most:,} can be shown")
    return asked


def by_rank(played: Iterable[Played], pp: int) -> list[list[list[Played]]]:
    """Turns of each rank, in order: an act alone, or two that are paired."""
    ranks: list[list[list[Played]]] = [[] for _ in range(pp)]
    for each in played:
        mine = ranks[each.rank]
        if each.act.paired and mine and mine[-1][0].act.paired and len(mine[-1]) == 1:
            mine[-1].append(each)
        else:
            mine.append([each])
    return ranks


def _causes(evaluation: Evaluation) -> Causes:
    stages = assembly(evaluation.shape(0)).stages
    acts = evaluation.parts.acts[evaluation.table.columns.policy[0]]
    overhead = evaluation.table.cluster.rates.microbatch_overhead_s
    found: dict[tuple[str, int], dict[SecondsCause, float]] = {}
    for stage, counts in enumerate(stages.tolist()):
        forward = _summed(counts, acts, "forward", overhead)
        inputs = _summed(counts, acts, "input", overhead)
        weights = _summed(counts, acts, "weight", 0.0)
        found |= {("F", stage): forward, ("I", stage): inputs, ("W", stage): weights}
        found["B", stage] = _added(inputs, weights)
    return found


def _summed(counts: list[float], acts: list[Acts], half: str, overhead_s: float) -> dict[SecondsCause, float]:
    """Seconds of a stage's pieces by cause; starting an act is the host's."""
    found: dict[SecondsCause, float] = {"host": overhead_s}
    for count, each in zip(counts, acts, strict=True):
        seconds: Seconds = getattr(each, half)
        found = _added(found, {cause: count * float(np.ravel(value)[0]) for cause, value in seconds.items()})
    return {cause: value for cause, value in found.items() if value}


def _added(one: Mapping[SecondsCause, float], other: Mapping[SecondsCause, float]) -> dict[SecondsCause, float]:
    causes: list[SecondsCause] = [*one, *(cause for cause in other if cause not in one)]
    return {cause: one.get(cause, 0.0) + other.get(cause, 0.0) for cause in causes}


def _act_events(turn: list[Played], causes: Causes) -> Iterator[Event]:
    """A turn, and the communication that stays exposed in it."""
    first, last = turn[0], turn[-1]
    seconds = causes[first.act.kind, first.stage]
    args = _told(first)
    if last is not first:
        seconds = _added(seconds, causes[last.act.kind, last.stage])
        args |= _told(last, "second ")
        if seconds.get("ep"):
            args["hidden ep (s)"] = sum(seconds.values()) - (first.end_s - first.start_s)
            seconds["ep"] -= args["hidden ep (s)"]
    name = "+".join(each.act.kind for each in turn)
    yield Event(first.rank, ACTS, name, first.start_s, first.end_s, args, seconds)
    whole_s = first.end_s - first.start_s
    exposed = {cause: seconds[cause] for cause in EXPOSED_CAUSES if seconds.get(cause, 0.0) > 0}
    start_s = first.end_s - sum(exposed.values())
    for cause, value in exposed.items():
        told = {"act": name, "share of the act": value / whole_s, "microbatch": first.act.microbatch}
        yield Event(first.rank, EXPOSED, cause, start_s, start_s + value, told)
        start_s += value


def _told(each: Played, which: str = "") -> dict[str, int | float]:
    """What a reader is told of an act."""
    return {
        f"{which}microbatch": each.act.microbatch,
        f"{which}chunk": each.act.chunk,
        f"{which}stage": each.stage,
    }


def _gaps(turns: list[list[Played]], end_s: float) -> list[_Gap]:
    """What lies between a rank's turns, before the first and after the last until the pipeline ends."""
    gaps, free_s = [], 0.0
    for turn in turns:
        gaps.append(_Gap(free_s, turn[0].start_s, waits=True))
        free_s = turn[0].end_s
    gaps.append(_Gap(free_s, end_s, waits=False))
    return [gap for gap in gaps if gap.duration_s > 0]


def _bubbles(rank: int, gaps: list[_Gap], send_s: float, sends_add_s: float) -> Iterator[Event]:
    """Each gap as bubble, and as the part of it that sends made."""
    parts = _made_by_sends(gaps, send_s, sends_add_s)
    for gap, part_s in zip(gaps, parts, strict=True):
        between_s = gap.end_s - part_s
        if between_s > gap.start_s:
            seconds: dict[SecondsCause, float] = {"bubble": between_s - gap.start_s}
            yield Event(rank, BUBBLE, "bubble", gap.start_s, between_s, {}, seconds)
        if part_s > 0:
            yield Event(rank, BUBBLE, "pp", between_s, gap.end_s, {}, {"pp": gap.end_s - between_s})


def _made_by_sends(gaps: list[_Gap], send_s: float, sends_add_s: float) -> list[float]:
    """Of `sends_add_s`, the part that lies in each gap; all of it where the gaps are long enough."""
    waited = [min(gap.duration_s, send_s) if gap.waits else 0.0 for gap in gaps]
    rest = [gap.duration_s - wait for gap, wait in zip(gaps, waited, strict=True)]
    share = min(sends_add_s / sum(waited), 1.0) if sum(waited) > 0 else 0.0
    more_s = max(sends_add_s - sum(waited), 0.0)
    more = min(more_s / sum(rest), 1.0) if sum(rest) > 0 else 0.0
    return [share * wait + more * left for wait, left in zip(waited, rest, strict=True)]


def _sends(pipe: Pipe, turns: list[list[Played]], stages: Placement) -> Iterator[Event]:
    """Outputs on their way to other ranks, beside what the rank does next."""
    if pipe.send_s <= 0:
        return
    places: dict[int, list[tuple[int, int]]] = {}
    for rank, chunks in enumerate(stages):
        for chunk, stage in enumerate(chunks):
            places.setdefault(stage, []).append((chunk, rank))
    for each in (each for turn in turns for each in turn if each.act.kind != "W"):
        forward = each.act.kind == "F"
        there = places.get(each.stage + (1 if forward else -1), [])
        # Of two that hold the next stage the one that has it in the same chunk is on this way through the pipe.
        to = min(there, key=lambda place: place[0] != each.act.chunk, default=None)
        if to is not None and to[1] != each.rank:
            args = {"microbatch": each.act.microbatch, "from stage": each.stage, "to rank": to[1]}
            name = "activation" if forward else "gradient"
            yield Event(each.rank, SENDS, name, each.end_s, each.end_s + pipe.send_s, args)


def _hidden_dp_s(run: Run, exposed_s: float) -> float:
    """Seconds of the fullest rank's dp communication that compute hides."""
    alone = Evaluation(Table.of_run(run.with_value("recipe.overlap.dp", False)))
    return alone.around(0, 0.0, 0.0)["dp"] - exposed_s


def _beside(run: Run, rank: int, hidden_s: float, end_s: float) -> Iterator[Event]:
    """The rank's dp communication that compute hides, drawn up to the end of its last act."""
    start_s = max(end_s - hidden_s, 0.0)
    if start_s < end_s:
        spread = "all acts" if run.recipe.zero >= 2 else "the last microbatch's acts"
        yield Event(rank, DP, "dp, hidden", start_s, end_s, {"hides behind": spread, "hidden (s)": hidden_s})


def _around(rank: int, around: Mapping[SecondsCause, float], start_s: float) -> Iterator[Event]:
    """What stands around the pipeline, one after another."""
    ordered: list[SecondsCause] = [*AROUND, *(cause for cause in around if cause not in AROUND)]
    for cause in ordered:
        value = around.get(cause, 0.0)
        if value:
            args = {"drawn here": "it is spread over the step"} if cause in SPREAD else {}
            yield Event(rank, AFTER, cause, start_s, start_s + value, args, {cause: value})
            start_s += value
