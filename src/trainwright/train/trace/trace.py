"""One step of a run with every collective recorded, on random samples; the step before it is not looked at, as
what is made once would stand in it."""

from typing import Any

import torch.distributed as dist

from trainwright.spec.run import Run
from trainwright.spec.traffic import Traffic
from trainwright.train.clock import Clock
from trainwright.train.door import require_trainable
from trainwright.train.mesh import Mesh
from trainwright.train.parallelize import parallelize
from trainwright.train.trace.recorder import Recorder
from trainwright.train.verify.subject import Subject, random_tokens


def trace(run: Run, mesh: Mesh) -> Traffic:
    """The second step of `run`, forward to update, of all ranks; every rank of `mesh` calls it, and gets the same.
    Raises `InvalidSpec` for a run that can't be trained."""
    require_trainable(run.check())
    trainer = parallelize(run, mesh, Clock())
    subject = Subject(trainer, random_tokens(run, 2), mesh.coordinate.dp)
    trainer.step(subject.batch(0), run.recipe.optimizer.lr)
    batch = subject.batch(1)
    mesh.barrier()
    with Recorder(trainer) as recorder:
        result = trainer.gradients(batch)
        recorder.begin_update()
        trainer.update(result, run.recipe.optimizer.lr)
    mine = Traffic(collectives=tuple(recorder.collectives), acts=tuple(recorder.acts))
    everyone: list[Any] = [mine]
    if mesh.layout.world > 1:
        everyone = [None] * mesh.layout.world
        dist.all_gather_object(everyone, mine)
    return Traffic(
        collectives=tuple(each for rank in everyone for each in rank.collectives),
        acts=tuple(each for rank in everyone for each in rank.acts),
    )
