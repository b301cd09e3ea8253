"""The training loop: every rank runs it alike; rank 0 writes and tells."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.spec.errors import reject
from trainwright.spec.model import FlopConvention
from trainwright.spec.record import PrecisionRecord, RankRecord, StepRecord, StepSeconds
from trainwright.spec.run import Run
from trainwright.spec.window import StepWindow
from trainwright.train.checkpoint.identity import mark_of
from trainwright.train.checkpoint.keeper import Keeper, Position, directory_of, keeping
from trainwright.train.clock import Clock
from trainwright.train.data import Batch, PackedDataset
from trainwright.train.device_clock import DeviceClock
from trainwright.train.door import require_recordable, require_trainable
from trainwright.train.faults.attendant import Attendant, Watched
from trainwright.train.faults.reasons import RollBack
from trainwright.train.instrument import waits_charged
from trainwright.train.journal import Journal
from trainwright.train.mesh import Mesh, failing_in_turn, joined
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import StepResult, parallelize
from trainwright.train.precision.recipes import engine_of
from trainwright.train.profiling import Recorders
from trainwright.train.shards import INDEX, open_shards
from trainwright.train.telemetry import Telemetry
from trainwright.train.watch import Watch

OnStep = Callable[[StepRecord, StepSeconds | None], None]
"""Told of a step, and of the last one whose seconds by cause are known."""

MFU_CONVENTION: FlopConvention = "full"
"""Of the mfu in metrics, as the planner's: against the dense peak of the precision's number format, all ranks."""


def emulates_its_matmuls(run: Run) -> bool:
    """Whether this CPU has no instructions for the matmuls of bf16: they take 100 times as long as in fp32 (0.96
    against 100 GFLOP/s of one core without AVX-512, docs/log.md)."""
    on_cpu = run.cluster.device.kind == "cpu"
    return on_cpu and run.recipe.precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def train(
    run: Run,
    *,
    shards: Path,
    out_dir: Path,
    steps: int | None = None,
    profiled: StepWindow | None = None,
    snapshot: StepWindow | None = None,
    recomputed_flops_per_token: float = 0.0,
    on_step: OnStep = lambda record, seconds: None,
    on_note: Callable[[str], None] = lambda text: None,
    watched: Watched | None = None,
) -> None:
    """Train `run` on this rank until `steps` are done, or as many as its budget says; every rank calls it alike.
    Where commits of the run lie in its directory, it goes on from the newest that is whole.

    `shards` is a directory of token shards (for python-stdlib what `corpus.build_corpus` returned). Rank 0 writes
    metrics.jsonl, TensorBoard scalars and ledger.jsonl to `out_dir`, tells `on_step` each step (and the last whose
    seconds by cause are known), and `on_note` what the user should know of checkpoints; every rank writes its
    seconds by cause. mfu is 0 where the cluster has no peak for the precision; `recomputed_flops_per_token` is
    what hfu counts beside. Steps of `profiled` are recorded by torch.profiler, those of `snapshot` in the
    allocator's history. `watched`: where this rank beats for whoever supervises it.

    Raises `InvalidSpec` for a run that can't be trained, bad data, commits of another run and an output that can't
    be written; `RunEnded` on all ranks where the state is corrupt, or the run diverged.
    """
    require_trainable(run.check())
    wanted = steps if steps is not None else run.steps
    if wanted is None:
        reject("budget", "none", "says no number of steps; give budget.tokens or --steps")
    if wanted < 1:
        reject("steps", wanted, "must be at least 1")
    dataset = _dataset(run, shards)
    with joined(run.layout, run.recipe.dp_replicate) as mesh:
        require_device(run, mesh.device)
        # On a GPU the program runs ahead of the device, which therefore has a clock of its own.
        device = DeviceClock(lambda: torch.cuda.Event(enable_timing=True)) if mesh.device.type == "cuda" else None
        clock = Clock(torch.cuda.synchronize if device else None, device)
        if watched is not None:
            watched.phase("loading")
        trainer = parallelize(run, mesh, clock)
        attendant = Attendant(trainer, watched, on_note)
        keeper = Keeper(
            trainer,
            directory_of(run.checkpoint, out_dir),
            run.checkpoint,
            mark_of(dataset.shards),
            schedule_steps=max(wanted, run.steps or 0),
            tell=on_note,
            attendant=attendant,
        )
        with failing_in_turn(mesh), keeping(keeper), attendant.leaving_reasons():
            start = keeper.resume()
            if start.step >= wanted:
                if mesh.rank == 0:
                    on_note(f"all {wanted} steps are done; train further with --steps or a larger budget")
                return
            require_recordable(run, wanted, profiled, snapshot, start.step)
            again: Position | None = start
            while again is not None:
                start = again
                journal = Journal(out_dir, start.step) if mesh.rank == 0 else None
                with (
                    journal or nullcontext(),
                    Telemetry(out_dir, mesh.rank, device, start.step) as telemetry,
                    waits_charged(clock, mesh.device),
                ):
                    recorders = Recorders(mesh, clock, out_dir, run.hash, profiled, snapshot)
                    writers = _Writers(journal, telemetry, recorders, on_step, on_note, recomputed_flops_per_token)
                    again = _train_on(keeper, dataset, start, wanted, writers)


def require_device(run: Run, device: torch.device) -> None:
    """A run file may have been planned for other devices than those it is carried out on."""
    recipe = run.recipe
    if recipe.low_precision is None or recipe.emulate_precision:
        return
    found = engine_of(recipe.precision, device)
    if not found.is_hardware:
        why = f"has no hardware here ({found.why}); it runs by casts with recipe.emulate_precision=true"
        reject("recipe.precision", recipe.precision, why)


@dataclass(frozen=True)
class _Writers:
    """What is told of every step on this rank."""

    journal: Journal | None
    """Of the first rank."""
    telemetry: Telemetry
    recorders: Recorders
    on_step: OnStep
    on_note: Callable[[str], None]
    recomputed_flops_per_token: float


def _train_on(
    keeper: Keeper, dataset: PackedDataset, start: Position, wanted: int, writers: _Writers
) -> Position | None:
    """From `start` to the end; or until the run is to go on from an earlier position, which it gives."""
    trainer, run, attendant = keeper.trainer, keeper.trainer.run, keeper.attendant
    watch = Watch(trainer, wanted - start.step)
    origin = start.samples - start.step * run.recipe.global_batch
    for step in range(start.step, wanted):
        lr = learning_rate(run.recipe.optimizer, step, keeper.schedule_steps)
        batch = partial(batch_of, run, dataset, step, trainer.mesh.coordinate.dp, origin)
        low_precision = trainer.low_precision
        is_watched = low_precision is not None and low_precision.watch(step + 1)
        after = origin + (step + 1) * run.recipe.global_batch
        attendant.begin(step + 1)
        try:
            with writers.recorders.around(step + 1):
                body = partial(_step, attendant, step + 1, batch, lr)
                result, lr = watch.around(step - start.step, body, is_recorded=writers.recorders.slows(step + 1))
        except RollBack as bad:
            return keeper.rolled_back(str(bad), after)
        attendant.end(step + 1, watch.last_seconds)
        writers.recorders.after(step + 1)
        if low_precision is not None and is_watched:
            _tell_precision(low_precision.report(step + 1), trainer.mesh, writers)
        writers.telemetry.ended(step + 1, watch.last_seconds)
        if writers.journal is not None:
            record = _step_record(run, watch, step, lr, result, writers.recomputed_flops_per_token)
            writers.journal.step(record)
            if writers.telemetry.latest is not None:
                writers.journal.seconds(writers.telemetry.latest)
            writers.on_step(record, writers.telemetry.latest)
        done = Position(step + 1, after, attendant.guard_state)
        began_s = time.perf_counter()
        keeper.after_step(done, watch.last_step_s, is_last=step + 1 == wanted)
        is_saving = keeper.policy is not None
        writers.telemetry.saved(step + 1, time.perf_counter() - began_s if is_saving else 0.0)
    records = _on_rank_0(watch.record(), trainer.mesh)
    if writers.journal is not None:
        writers.journal.ledger(records)
    return None


def _tell_precision(own: PrecisionRecord, mesh: Mesh, writers: _Writers) -> None:
    """Put the records of all stages together on the first rank, which tells what is wrong."""
    records = [own]
    if mesh.layout.world > 1:
        everyone: list[Any] = [None] * mesh.layout.world if mesh.rank == 0 else []
        dist.gather_object(own, everyone or None)
        records = everyone
    if writers.journal is None:
        return
    merged = PrecisionRecord(
        step=own.step,
        layers={name: roles for each in records for name, roles in each.layers.items()},
        alarms=tuple(dict.fromkeys(alarm for each in records for alarm in each.alarms)),
        fallen=tuple(dict.fromkeys(name for each in records for name in each.fallen)),
    )
    writers.journal.precision(merged)
    for alarm in merged.alarms:
        writers.on_note(f"step {own.step}: {alarm}")


def _step(attendant: Attendant, step: int, batch: Callable[[], Batch], lr: float) -> tuple[StepResult, float]:
    with attendant.trainer.clock.of("data"):
        made = batch()
    return attendant.step(step, made, lr)


def _dataset(run: Run, directory: Path) -> PackedDataset:
    shards = open_shards(directory)
    for field, most in (("model.vocab_size", run.model.vocab_size), ("data.vocab_size", run.data.vocab_size)):
        if shards.vocab_size > most:
            why = f"is below the vocabulary of {directory}, {shards.vocab_size}; raise it or choose other data"
            reject(field, most, why)
    if run.data.document_mask and shards.end_of_document is None:
        reject(
            "data.document_mask",
            True,
            f"{directory / INDEX} names no token that ends a document; "
            "add end_of_document to it, or leave the mask out",
        )
    end = shards.end_of_document if run.data.document_mask else None
    return PackedDataset(shards, run.recipe.seq_len, run.recipe.seed, end)


def batch_of(run: Run, dataset: PackedDataset, step: int, dp_rank: int, origin: int = 0) -> Batch:
    """What a data-parallel rank trains on in step `step`, counted from 0; `origin` is the sample that step 0 would
    have begun with, had all steps before been of this run's size."""
    return dataset.batch(
        step,
        global_batch=run.recipe.global_batch,
        micro_batch=run.recipe.micro_batch,
        dp_rank=dp_rank,
        dp=run.layout.dp,
        origin=origin,
    )


def _step_record(
    run: Run, watch: Watch, step: int, lr: float, result: StepResult, recomputed_flops_per_token: float
) -> StepRecord:
    recipe = run.recipe
    tokens_per_s = recipe.tokens_per_step / watch.last_step_s
    flops_per_token = run.model.flops_per_token(recipe.seq_len, MFU_CONVENTION)
    peak_flops_per_s = run.cluster.peak(recipe.product_format(run.cluster))
    at_peak_s = flops_per_token / (peak_flops_per_s * run.layout.world) if peak_flops_per_s else 0.0
    worked = 1 + recomputed_flops_per_token / flops_per_token
    return StepRecord(
        step=step + 1,
        loss=result.loss,
        tokens_per_s=tokens_per_s,
        step_s=watch.last_step_s,
        mfu=tokens_per_s * at_peak_s,
        hfu=tokens_per_s * at_peak_s * worked,
        flops_per_s=tokens_per_s * flops_per_token / run.layout.world,
        grad_norm=result.grad_norm,
        peak_bytes=float(watch.peak_bytes),
        lr=lr,
    )


def _on_rank_0(record: RankRecord, mesh: Mesh) -> list[RankRecord]:
    """Every rank's record, in order, on rank 0; nothing elsewhere."""
    if mesh.layout.world == 1:
        return [record]
    records: list[Any] = [None] * mesh.layout.world if mesh.rank == 0 else []
    dist.gather_object(record, records or None)
    return records
