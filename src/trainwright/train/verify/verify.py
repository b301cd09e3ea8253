"""Step a run and the plain program side by side on every rank, and say whether they are equal."""

import logging
from typing import Any

import torch.distributed as dist

from trainwright.spec.run import Run
from trainwright.spec.verdict import BOUND, QUANTITIES, Divergence, StepErrors, Verdict
from trainwright.train.clock import Clock
from trainwright.train.door import require_trainable
from trainwright.train.mesh import Mesh
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import parallelize
from trainwright.train.verify.compare import RankErrors, compared_step
from trainwright.train.verify.faults import require_fault
from trainwright.train.verify.plain import PlainProgram
from trainwright.train.verify.subject import Subject, random_tokens

LARGEST = 1e300
"""Stands for an error that is no number."""


def verify(run: Run, mesh: Mesh, steps: int, fault: str = "") -> Verdict:
    """Hold `steps` steps of `run`, in float64, against the plain program; all ranks of `mesh` call it, and get the
    same verdict. Raises `InvalidSpec` for a run that can't be trained, or can't have the fault."""
    require_trainable(run.check())
    assert run.recipe.precision == "fp64"
    # It warns that whole tensors are put together in two gathers, which nobody here minds.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    trainer = parallelize(run, mesh, Clock())
    subject = Subject(trainer, random_tokens(run, steps), mesh.coordinate.dp)
    if fault:
        require_fault(fault, run).plant(subject)
    plain = PlainProgram(run)
    found = []
    for step in range(steps):
        lr = learning_rate(run.recipe.optimizer, step, max(steps, run.steps or 0))
        expected = plain.step(subject.samples(step), lr)
        mine = compared_step(trainer, subject.batch(step), lr, expected)
        found.append(_of_all_ranks(mine, mesh))
    order = [name for name, _ in plain.model.named_parameters()]
    return Verdict(
        steps=tuple(_worst(step, ranks) for step, ranks in enumerate(found, start=1)),
        first=next(filter(None, (_divergence(step, ranks, order) for step, ranks in enumerate(found, 1))), None),
    )


def _of_all_ranks(mine: RankErrors, mesh: Mesh) -> list[RankErrors]:
    if mesh.layout.world == 1:
        return [mine]
    everyone: list[Any] = [None] * mesh.layout.world
    dist.all_gather_object(everyone, mine)
    return everyone


def _worst(step: int, ranks: list[RankErrors]) -> StepErrors:
    worst = [rank.worst() for rank in ranks]
    return StepErrors(
        step=step, errors={each: min(max(rank[each] for rank in worst), LARGEST) for each in QUANTITIES}
    )


def _divergence(step: int, ranks: list[RankErrors], order: list[str]) -> Divergence | None:
    """Where the step differs; None where it doesn't."""
    quantities = _worst(step, ranks).beyond
    if not quantities:
        return None
    kind = next((each for each in ("gradients", "weights") if each in quantities), None)
    if kind is None:
        differing = tuple(at for at, rank in enumerate(ranks) if rank.worst()[quantities[0]] > BOUND)
        return Divergence(step=step, quantities=tuple(quantities), ranks=differing)
    tensors: list[dict[str, float]] = [getattr(rank, kind) for rank in ranks]
    wrong = [name for name in order if any(each.get(name, 0.0) > BOUND for each in tensors)]
    return Divergence(
        step=step,
        quantities=tuple(quantities),
        parameter=wrong[0],
        error=min(max(each.get(wrong[0], 0.0) for each in tensors), LARGEST),
        num_parameters=len(wrong),
        of_parameters=len(order),
        ranks=tuple(at for at, each in enumerate(tensors) if each.get(wrong[0], 0.0) > BOUND),
    )
