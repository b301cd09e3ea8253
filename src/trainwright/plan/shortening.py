"""Steps with very many acts, shortened: the same step with fewer microbatches, as its schedule would do it.

What a pipeline does in its middle it does over and over. With fewer microbatches it fills and drains as before, so
that a picture of every act stays one that can be looked at.
"""

from trainwright.plan.playing import rows_of
from trainwright.spec.errors import reject
from trainwright.spec.run import Run

FILLING_ROUNDS = 4
"""Times pp microbatches: no step is made shorter by itself, as they fill every pipe."""


def num_microbatches(run: Run) -> int:
    """Microbatches of the run's step, on each data-parallel rank."""
    return run.recipe.global_batch // (run.recipe.micro_batch * run.layout.dp)


def with_microbatches(run: Run, count: int) -> Run:
    """The run with a step of `count` microbatches; `InvalidSpec` where its own has fewer, or the schedule
    can't."""
    whole = num_microbatches(run)
    if count == whole:
        return run
    if not 1 <= count <= whole:
        reject("--microbatches", count, f"the step has {whole:,} microbatches; it may be 1 to {whole:,}")
    return run.with_value("recipe.global_batch", count * run.recipe.micro_batch * run.layout.dp).check()


def acts_each(run: Run) -> float:
    """Acts of all pipeline ranks for each microbatch, over the step."""
    pp = run.layout.pp
    count = min(num_microbatches(run), FILLING_ROUNDS * pp)
    return sum(map(len, rows_of(run.recipe.schedule, pp, run.layout.vpp, count))) / count


def most_microbatches(run: Run, most: float, each: float) -> int:
    """Microbatches that a step of at most `most` may have at `each` for each of them: all, or whole rounds."""
    whole, round_ = num_microbatches(run), 2 * run.layout.pp if run.layout.pp > 1 else 1
    rounds = max(int(most / each) // round_, FILLING_ROUNDS // 2 if run.layout.pp > 1 else 1)
    return whole if whole * each <= most else min(whole, rounds * round_)
