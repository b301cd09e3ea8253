"""What each pipeline rank holds over the time of a step, by cause: `plan/memory.py` at every act as it is played.

A forward adds what its chunk keeps for backward, from its start on. While a backward runs, the working set of
one of its chunk's layers or of the loss is there too; when it is over, what the microbatch kept is gone, or only
what the weight gradient reads is left until that is done. Weights and moments stay as they are; gradients are
there from a chunk's first backward on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainwright.plan import pipeline
from trainwright.plan.assembly import Moments, assembly
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.memory import moment_bytes
from trainwright.plan.pipeline import Played
from trainwright.plan.recompute_budget import resolved
from trainwright.plan.shortening import acts_each, most_microbatches, num_microbatches, with_microbatches
from trainwright.plan.table import Floats, Table
from trainwright.plan.timeline import by_rank
from trainwright.plan.transients import Held
from trainwright.spec.ledger import BYTES_CAUSES, BytesCause
from trainwright.spec.memory import RankMemory, StepMemory
from trainwright.spec.run import Run

MOST_ACTS = 50_000
"""A step with more is shown with fewer microbatches."""

DOES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True)
class _Stretch:
    """A time in which a rank holds the same, with counts of its chunks."""

    end_s: float
    doing: str
    whole: tuple[int, ...]
    """Microbatches of each chunk whose activations are held."""
    weight_only: tuple[int, ...]
    """Those of which only what the weight gradient reads is held."""
    running: tuple[int, ...]
    """Backwards of each chunk that run."""
    grown: tuple[int, ...]
    """Chunks that have gradients."""
    grown_after: tuple[int, ...]
    """Those that have them at its end."""
    there: tuple[int, ...]
    """Chunks whose weights, gathered for a forward, wait for a backward."""
    alone: tuple[int, ...]
    """Weight gradients of each chunk that run by themselves."""


def memory_over_time(run: Run) -> StepMemory:
    """All ranks' bytes over the run's step, or where it has very many acts over a shorter one."""
    run = resolved(run.check()).run
    shown = with_microbatches(run, most_microbatches(run, MOST_ACTS, acts_each(run)))
    evaluation = Evaluation(Table.of_run(shown))
    pipe = evaluation.pipe(0)
    played = by_rank(pipeline.timeline(pipe), pipe.pp)
    makespan_s = pipeline.makespan(pipe)
    around = evaluation.around(0, makespan_s, evaluation.sharing_s(0, makespan_s))
    reduced_s = makespan_s + around["core_sharing"] + around["dp"]
    held = _held(evaluation)
    return StepMemory(
        run_name=run.name,
        step_s=makespan_s + sum(around.values()),
        num_microbatches=pipe.num_microbatches,
        of_microbatches=num_microbatches(run),
        capacity_bytes=float(shown.cluster.device.memory_bytes),
        ranks=tuple(
            _rank(evaluation, held, rank, turns, reduced_s, makespan_s + sum(around.values()))
            for rank, turns in enumerate(played)
        ),
    )


def _rank(
    evaluation: Evaluation, held: Held, rank: int, turns: list[list[Played]], reduced_s: float, step_s: float
) -> RankMemory:
    stretches = [*_stretches(turns, int(evaluation.table.columns.vpp[0]))]
    last = stretches[-1]
    ends_s = max(reduced_s, last.end_s), max(step_s, reduced_s, last.end_s)
    nothing = (0,) * len(last.whole)
    stretches += [
        _Stretch(end_s, doing, nothing, nothing, nothing, nothing, last.grown_after, nothing, nothing)
        for end_s, doing in zip(ends_s, ("reduces gradients", "optimizer and the rest"), strict=True)
    ]
    found = _bytes(evaluation, held, rank, stretches)
    return RankMemory(
        pp_rank=rank,
        borders_s=(0.0, *(each.end_s for each in stretches)),
        doing=tuple(each.doing for each in stretches),
        bytes={cause: tuple(found[cause].tolist()) for cause in BYTES_CAUSES},
    )


ROUNDING = 1e-12
"""Of seconds, relative."""


def _stretches(turns: list[list[Played]], vpp: int) -> Iterator[_Stretch]:
    """A rank's turns and what lies between them, up to the end of its last one."""
    whole, weight_only, grown, there, free_s = [0] * vpp, [0] * vpp, [0] * vpp, [0] * vpp, 0.0
    for turn in turns:
        # Sums of the same seconds in another order may differ in their last digit.
        if turn[0].start_s > free_s * (1 + ROUNDING):
            none, now = (0,) * vpp, tuple(grown)
            held = tuple(whole), tuple(weight_only)
            yield _Stretch(turn[0].start_s, "waits", *held, none, now, now, tuple(there), none)
        drops = [each.act for each in turn if each.act.kind != "F"]
        for each in turn:
            whole[each.act.chunk] += each.act.kind == "F"
            there[each.act.chunk] |= each.act.kind != "W"
        # As in `holding`, a weight gradient has no working set.
        running = tuple(sum(act.chunk == chunk and act.kind != "W" for act in drops) for chunk in range(vpp))
        alone = tuple(sum(act.chunk == chunk and act.kind == "W" for act in drops) for chunk in range(vpp))
        before, free_s = tuple(grown), turn[0].end_s
        for act in drops:
            grown[act.chunk] |= act.kind != "I"
        held = tuple(whole), tuple(weight_only)
        yield _Stretch(free_s, _doing(turn), *held, running, before, tuple(grown), tuple(there), alone)
        for each in turn:
            if each.act.kind != "W":
                there[each.act.chunk] = int(each.act.kind == "F")
        for act in drops:
            (weight_only if act.kind == "W" else whole)[act.chunk] -= 1
            weight_only[act.chunk] += act.kind == "I"


def _doing(turn: list[Played]) -> str:
    return " beside ".join(
        f"{DOES[each.act.kind]} of microbatch {each.act.microbatch} (stage {each.stage})" for each in turn
    )


def _held(evaluation: Evaluation) -> Held:
    figures = evaluation.parts.figures()
    return Held(
        kept_bytes=figures.kept_bytes,
        logits_bytes=figures.logits_bytes,
        weight_bytes=figures.weight_bytes,
        experts_left_bytes=figures.experts_left_bytes,
        working_bytes=figures.working_bytes,
        params=figures.params,
        expert_params=figures.expert_params,
        low_params=figures.low_params,
        low_expert_params=figures.low_expert_params,
        inside=np.zeros(1, dtype=np.int64),
    )


def _bytes(evaluation: Evaluation, held: Held, rank: int, stretches: list[_Stretch]) -> dict[BytesCause, Floats]:
    """By cause, of one rank in each stretch: `memory.moment_bytes` at moments that `holding` doesn't know of."""
    shape = evaluation.shape(0)
    made = assembly(shape)
    chunks = made.stages[made.stage_of[rank]]
    columns = (
        (each.whole, each.weight_only, each.running, each.grown, each.grown_after, each.there, each.alone)
        for each in stretches
    )
    whole, weight_only, *rest = (
        np.array(counts, dtype=np.float64) @ chunks for counts in zip(*columns, strict=True)
    )
    every, pieces = np.full(len(stretches), rank), np.repeat(made.ranks[[rank]], len(stretches), axis=0)
    at = Moments(every, whole, weight_only, pieces, *rest)
    return {cause: value[:, 0] for cause, value in moment_bytes(evaluation.table, shape, at, held).items()}
