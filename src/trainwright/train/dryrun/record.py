"""One rank's step, recorded: on fake tensors in a world of any size, or on the real tensors of a real one.

Both go through `recorded`: the same recorder of collectives that `trace` has, and the counters of `counting`. What
a step before this one leaves (moments, tables of positions) is there already.
"""

from collections import Counter
from datetime import timedelta
from fractions import Fraction

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainwright.spec.counts import ActBytes, CollectiveCount, Counts, FlopsCount, SavedCount, part_of
from trainwright.spec.run import Run
from trainwright.train.data import Batch
from trainwright.train.dryrun.counting import GATHERED, HELD, INPUT, QUANTIZED, Counting, SavedKey
from trainwright.train.dryrun.fabric import Fabric, fake_world
from trainwright.train.dryrun.passes import extended
from trainwright.train.dryrun.program import begin, fake_batch, fake_mode, fake_trainer
from trainwright.train.mesh import build_mesh
from trainwright.train.parallel.local import bytes_of, local_of
from trainwright.train.parallelize import Trainer
from trainwright.train.trace.recorder import Recorder

PHASES = {"after backward": "update"}


def dry_run(run: Run, rank: int, passes: int | None = None) -> Counts:
    """A step of `run`, which is checked and trainable, on one rank without the others.

    passes: run no more than so many microbatches of each chunk, and then twice as many; what a step has of all is
    what the second time had more, once for every `passes` (`extended`). Bytes over time are then of the second.
    """
    with fake_world(run.layout.world, rank):
        mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, timedelta(seconds=60))
        mode = fake_mode()
        trainer = fake_trainer(run, mesh, mode)
        with mode, Fabric(mode):
            begin(trainer)
            batch = fake_batch(run, mesh)
            every = max(trainer.pipeline._passes.values())
            if passes is None or 2 * passes >= every:
                return recorded(trainer, batch, mode)
            with trainer.pipeline.shortened(passes):
                once = recorded(trainer, batch, mode)
            with trainer.pipeline.shortened(2 * passes):
                twice = recorded(trainer, batch, mode)
            return extended(once, twice, Fraction(every - 2 * passes, passes))


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
    with counting, counting.watching(trainer.pieces), recorder:
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
        saved=_saved(counting, in_chunks=trainer.run.recipe.loss_chunks > 1),
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


def _saved(counting: Counting, *, in_chunks: bool) -> tuple[SavedCount, ...]:
    found: Counter[tuple[str, str, str]] = Counter()
    for key, size in counting.saved_bytes().items():
        if key.operator == HELD:
            continue  # A state, which was made in this act.
        part = part_of(key.where)
        found[tensors_of(part, key, in_chunks=in_chunks), part, key.operator] += size
    return tuple(
        SavedCount.parse({"tensors": tensors, "part": part, "operator": operator, "bytes": size})
        for (tensors, part, operator), size in sorted(found.items())
        if size
    )


BY_PART = {
    "residual": "residual stream",
    "embedding": "residual stream",
    "positions": "residual stream",
    **dict.fromkeys(("attention", "query", "key", "value"), "attention's core"),
    "up": "up and gate",
    "gate": "up and gate",
    "shared up": "up and gate",
    "shared gate": "up and gate",
    "shared down": "shared experts",
    "mlp": "product",
    "q_down": "latents",
    "mtp join": "residual stream",
    "kv_down": "latents",
    # Of blocks with a norm behind them, which reads it.
    "out": "residual stream",
    "down": "residual stream",
}


MAKES_LOGITS = ("mm", "addmm", "new_empty", "div")
"""A product, what it is written to in parts, or what caps it."""
ACTIVATIONS = ("silu", "gelu", "relu")
OF_MIXTURES = {
    "_softmax": "scores of experts",
    "sigmoid": "scores of experts",
    "index_select": "rows of experts",
    "new_empty": "rows of experts",
    # Their sum, without shared experts and with them, which a norm behind them reads.
    "index_add": "residual stream",
    "add": "residual stream",
}


def tensors_of(part: str, key: SavedKey, *, in_chunks: bool) -> str:
    """What a part has made, as planner and program both name it (`spec.counts.Tensors`)."""
    if key.operator == GATHERED:
        return "gathered parameters"
    if key.operator == QUANTIZED:
        return "quantized"
    if key == INPUT:
        return "residual stream"
    if not key.is_floating:
        return "dropout's masks" if key.operator == "ge" else "numbers of tokens"
    if part == "head":
        if key.operator == "mul" and not key.is_number:
            return "residual stream"  # Embeddings, scaled.
        if in_chunks:
            return "numbers of tokens" if key.is_number else "gradients of the loss"
        return "logits" if key.operator in MAKES_LOGITS else "numbers of tokens"
    if part.endswith("norm") or (part == "residual" and key.operator == "cat"):
        return "normed"
    if part == "mlp" and key.operator not in ACTIVATIONS:
        # Of a mixture of experts: a token's weights are numbers of tokens.
        return OF_MIXTURES.get(key.operator, "numbers of tokens") if not key.is_number else "numbers of tokens"
    if part in ("experts", "mlp.shared"):
        return "product" if key.operator in ACTIVATIONS else "up and gate"
    return BY_PART.get(part, "other")
