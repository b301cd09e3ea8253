"""What each pipeline rank holds over the time of a step, by cause: `plan/memory.py` at every act as it is played.

A forward adds what its chunk keeps for backward, from its start on. While a backward runs, the working set of
one of its chunk's layers or of the loss is there too; when it is over, what the microbatch kept is gone, or only
what the weight gradient reads is left until that is done. States, framework and buffers stay as they are; after
a rank's last act its activations are gone, and the gradients of what stands around the layers are reduced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trainwright.plan import pipeline
from trainwright.plan.assembly import Moments, assembly
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.memory import Held, moment_bytes
from trainwright.plan.pipeline import Played
from trainwright.plan.recompute_budget import resolved
from trainwright.plan.shortening import acts_each, most_microbatches, num_microbatches, with_microbatches
from trainwright.plan.table import Floats, Table
from trainwright.plan.timeline import by_rank
from trainwright.spec.ledger import BYTES_CAUSES, BytesCause
from trainwright.spec.memory import RankMemory, StepMemory
from trainwright.spec.run import Run

MOST_ACTS = 50_000
"""A step with more is shown with fewer microbatches."""

BOUNDLESS_BYTES = 1e18
"""A working set beside which no other time can be the peak."""

STAY: tuple[BytesCause, ...] = ("parameters", "gradients", "optimizer", "communication")
"""Causes whose bytes are the same while acts run."""

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
    last_s = stretches[-1].end_s
    after = [
        ("reduces gradients", max(reduced_s, last_s)),
        ("optimizer and the rest", max(step_s, reduced_s, last_s)),
    ]
    states, reducing_bytes = _states(evaluation, held, rank)
    columns = {cause: np.full(len(stretches) + 2, value) for cause, value in states.items()}
    columns["communication"][-2] = reducing_bytes
    columns |= _activations(evaluation, held, rank, stretches, len(after))
    tensors = sum(columns.values(), np.zeros(1))
    cluster = evaluation.table.cluster
    columns["framework"] = cluster.framework_bytes + cluster.allocator_fraction * tensors
    return RankMemory(
        pp_rank=rank,
        borders_s=(0.0, *(each.end_s for each in stretches), *(end_s for _, end_s in after)),
        doing=(*(each.doing for each in stretches), *(doing for doing, _ in after)),
        bytes={cause: tuple(columns[cause].tolist()) for cause in BYTES_CAUSES},
    )


ROUNDING = 1e-12
"""Of seconds, relative."""


def _stretches(turns: list[list[Played]], vpp: int) -> Iterator[_Stretch]:
    """A rank's turns and what lies between them, up to the end of its last one."""
    whole, weight_only, free_s = [0] * vpp, [0] * vpp, 0.0
    for turn in turns:
        # Sums of the same seconds in another order may differ in their last digit.
        if turn[0].start_s > free_s * (1 + ROUNDING):
            yield _Stretch(turn[0].start_s, "waits", tuple(whole), tuple(weight_only), (0,) * vpp)
        drops = [each.act for each in turn if each.act.kind != "F"]
        for each in turn:
            whole[each.act.chunk] += each.act.kind == "F"
        # As in `holding`, a weight gradient has no working set.
        running = tuple(sum(act.chunk == chunk and act.kind != "W" for act in drops) for chunk in range(vpp))
        free_s = turn[0].end_s
        yield _Stretch(free_s, _doing(turn), tuple(whole), tuple(weight_only), running)
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
        working_bytes=figures.working_bytes,
        params=figures.params,
        expert_params=figures.expert_params,
        inside=np.zeros(1, dtype=np.int64),
    )


def _activations(
    evaluation: Evaluation, held: Held, rank: int, stretches: list[_Stretch], after: int
) -> dict[BytesCause, Floats]:
    """Bytes of activations, and of the loss's working set, in each stretch; none in those `after` them."""
    made = assembly(evaluation.shape(0))
    chunks = made.stages[made.stage_of[rank]]
    whole, weight_only, running = (
        np.array(counts, dtype=np.float64) @ chunks
        for counts in zip(*((each.whole, each.weight_only, each.running) for each in stretches), strict=True)
    )
    # The working set is that of the pieces whose backward runs.
    found = _moment_bytes(evaluation, held, rank, whole, weight_only, running)
    gone = np.zeros(after)
    return {cause: np.concatenate([found[cause], gone]) for cause in ("activations", "logits")}


def _states(evaluation: Evaluation, held: Held, rank: int) -> tuple[dict[BytesCause, float], float]:
    """Bytes that stay as they are while acts run; and those of communication when activations are gone."""
    pieces = assembly(evaluation.shape(0)).ranks[[rank]]
    nothing = np.zeros_like(pieces)
    while_acting, when_gone = (
        _moment_bytes(
            evaluation,
            replace(held, working_bytes=np.full_like(held.params, working)),
            rank,
            nothing,
            nothing,
            pieces,
        )
        for working in (BOUNDLESS_BYTES, 0.0)
    )
    return {cause: float(while_acting[cause][0]) for cause in STAY}, float(when_gone["communication"][0])


def _moment_bytes(
    evaluation: Evaluation, held: Held, rank: int, whole: Floats, weight_only: Floats, pieces: Floats
) -> dict[BytesCause, Floats]:
    """`memory.moment_bytes` of one rank at moments that `holding` doesn't know of, each (moments,)."""
    shape = evaluation.shape(0)
    around = pieces.shape[1] - 2 * shape.num_kinds
    at = Moments(np.full(len(whole), rank), whole, weight_only, pieces, pieces, around)
    return {cause: value[:, 0] for cause, value in moment_bytes(evaluation.table, shape, at, held).items()}
