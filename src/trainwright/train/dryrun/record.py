"""One rank's step, recorded: on fake tensors in a world of any size, or on the real tensors of a real one.

Both go through `recorded`: the same recorder of collectives that `trace` has, and the counters of `counting`. What
a step before this one leaves (moments, tables of positions) is there already.
"""

from collections import Counter
from datetime import timedelta

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainwright.spec.counts import ActBytes, CollectiveCount, Counts, FlopsCount, SavedCount, part_of
from trainwright.spec.run import Run
from trainwright.train.data import Batch
from trainwright.train.dryrun.counting import Counting
from trainwright.train.dryrun.fabric import Fabric, fake_world
from trainwright.train.dryrun.program import begin, fake_batch, fake_mode, fake_trainer
from trainwright.train.mesh import build_mesh
from trainwright.train.parallel.local import bytes_of, local_of
from trainwright.train.parallelize import Trainer
from trainwright.train.trace.recorder import Recorder

PHASES = {"after backward": "update"}


def dry_run(run: Run, rank: int) -> Counts:
    """A step of `run`, which is checked and trainable, on one rank without the others."""
    with fake_world(run.layout.world, rank):
        mesh = build_mesh(
            run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, timedelta(seconds=60)
        )
        mode = fake_mode()
        trainer = fake_trainer(run, mesh, mode)
        with mode, Fabric(mode):
            begin(trainer)
            return recorded(trainer, fake_batch(run, mesh), mode)


def recorded(trainer: Trainer, batch: Batch, fake: FakeTensorMode | None = None) -> Counts:
    """A step of a trainer on a batch."""
    recorder = Recorder(trainer)
    counting = Counting([], recorder.places, fake)
    for tensor in _held(trainer):
        counting._watch(tensor.untyped_storage())
    plain = recorder.places._on_act

    def on_act(name: str | None) -> None:
        counting.on_act(name)
        plain(name)

    recorder.places._on_act = on_act
    with counting, recorder:
        result = trainer.gradients(batch)
        gradient_bytes = sum(bytes_of(each.grad) for _, each in trainer.data_parallel.parameters())
        recorder.begin_update()
        trainer.update(result, trainer.run.recipe.optimizer.lr)
    counting.on_act(None)
    mesh = trainer.mesh
    return Counts(
        rank=mesh.rank,
        pp_rank=mesh.coordinate.pp,
        num_microbatches=trainer.run.num_microbatches,
        flops=_flops(counting),
        collectives=_collectives(recorder),
        states={
            "parameters": sum(bytes_of(each) for _, each in trainer.data_parallel.parameters()),
            "gradients": gradient_bytes,
            "optimizer": _optimizer_bytes(trainer),
        },
        saved=_saved(counting),
        acts=tuple(ActBytes(name=name, end_bytes=end, most_bytes=most) for name, end, most in counting.acts),
        peak_bytes=counting.peak_bytes,
    )


def _held(trainer: Trainer) -> list[torch.Tensor]:
    """What is there before the step: parameters, their copies, moments."""
    found = [local_of(each) for _, each in trainer.data_parallel.parameters()]
    found += [local_of(each) for piece in trainer.pieces for each in piece.parameters()]
    found += [
        local_of(each)
        for state in trainer.optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    ]
    return [each for each in found if not each.is_meta or isinstance(each, FakeTensor)]


def _optimizer_bytes(trainer: Trainer) -> int:
    """Of moments; numbers of steps are left out (`spec.left_out`)."""
    return sum(
        bytes_of(each)
        for state in trainer.optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor) and each.ndim
    )


def _flops(counting: Counting) -> tuple[FlopsCount, ...]:
    found: Counter[tuple[str, str, str]] = Counter()
    for key, flops in counting.flops.items():
        found[PHASES.get(key.phase, key.phase), part_of(key.where), key.operation] += flops
    return tuple(
        FlopsCount.parse({"phase": phase, "part": part, "kind": kind, "flops": flops})
        for (phase, part, kind), flops in sorted(found.items())
    )


def _collectives(recorder: Recorder) -> tuple[CollectiveCount, ...]:
    found = Counter(
        (each.axis, each.operation, each.dtype, len(each.ranks), each.bytes) for each in recorder.collectives
    )
    return tuple(
        CollectiveCount(axis=axis, operation=operation, dtype=dtype, ranks=ranks, bytes=size, count=count)
        for (axis, operation, dtype, ranks, size), count in sorted(found.items())
    )


def _saved(counting: Counting) -> tuple[SavedCount, ...]:
    found: Counter[tuple[str, str]] = Counter()
    for key, size in counting.saved_bytes.items():
        found[part_of(key.where), key.operator] += size
    return tuple(
        SavedCount(part=part, operator=operator, bytes=size) for (part, operator), size in sorted(found.items())
    )
