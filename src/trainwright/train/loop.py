"""The training loop: every rank runs it alike; rank 0 writes and tells."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.spec.errors import reject
from trainwright.spec.model import FlopConvention
from trainwright.spec.record import RankRecord, StepRecord
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch, PackedDataset
from trainwright.train.door import require_trainable
from trainwright.train.journal import Journal
from trainwright.train.mesh import Mesh, failing_in_turn, joined
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import StepResult, Trainer, parallelize
from trainwright.train.shards import INDEX, open_shards
from trainwright.train.watch import Watch

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
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> None:
    """Train `run` on this rank for `steps`, or as long as its budget says; every rank calls it alike.

    `shards` is a directory of token shards (for python-stdlib what `corpus.build_corpus` returned). Rank 0 writes
    metrics.jsonl, TensorBoard scalars and ledger.jsonl to `out_dir`, and tells `on_step` each step. mfu is 0 where
    the cluster has no peak for the precision.

    Raises `InvalidSpec` for a run that can't be trained, bad data and an output that can't be written.
    """
    require_trainable(run.check())
    wanted = steps if steps is not None else run.steps
    if wanted is None:
        reject("budget", "none", "says no number of steps; give budget.tokens or --steps")
    if wanted < 1:
        reject("steps", wanted, "must be at least 1")
    dataset = _dataset(run, shards)
    with joined(run.layout, run.recipe.dp_replicate) as mesh:
        # On a GPU the program runs ahead of the device, so the clock waits for it where it is read.
        clock = Clock(torch.cuda.synchronize if mesh.device.type == "cuda" else None)
        trainer = parallelize(run, mesh, clock)
        watch = Watch(trainer, wanted)
        with failing_in_turn(mesh), Journal(out_dir) if mesh.rank == 0 else nullcontext() as journal:
            for step in range(wanted):
                lr = learning_rate(run.recipe.optimizer, step, max(wanted, run.steps or 0))
                result = _step(trainer, dataset, watch, step, lr)
                if journal is not None:
                    record = _step_record(run, watch, step, lr, result)
                    journal.step(record)
                    on_step(record)
            records = _on_rank_0(watch.record(), mesh)
            if journal is not None:
                journal.ledger(records)


def _dataset(run: Run, directory: Path) -> PackedDataset:
    shards = open_shards(directory)
    if shards.vocab_size > run.model.vocab_size:
        reject(
            "model.vocab_size",
            run.model.vocab_size,
            f"is below the vocabulary of {directory}, {shards.vocab_size}; raise it or choose other data",
        )
    if run.data.document_mask and shards.end_of_document is None:
        reject(
            "data.document_mask",
            True,
            f"{directory / INDEX} names no token that ends a document; "
            "add end_of_document to it, or leave the mask out",
        )
    end = shards.end_of_document if run.data.document_mask else None
    return PackedDataset(shards, run.recipe.seq_len, run.recipe.seed, end)


def _step(trainer: Trainer, dataset: PackedDataset, watch: Watch, step: int, lr: float) -> StepResult:
    run, dp_rank = trainer.run, trainer.mesh.coordinate.dp

    def body() -> StepResult:
        return trainer.step(batch_of(run, dataset, step, dp_rank), lr)

    return watch.around(step, body)


def batch_of(run: Run, dataset: PackedDataset, step: int, dp_rank: int) -> Batch:
    """What a data-parallel rank trains on in step `step`, counted from 0."""
    return dataset.batch(
        step,
        global_batch=run.recipe.global_batch,
        micro_batch=run.recipe.micro_batch,
        dp_rank=dp_rank,
        dp=run.layout.dp,
    )


def _step_record(run: Run, watch: Watch, step: int, lr: float, result: StepResult) -> StepRecord:
    recipe = run.recipe
    tokens_per_s = recipe.tokens_per_step / watch.last_step_s
    flops_per_s = tokens_per_s * run.model.flops_per_token(recipe.seq_len, MFU_CONVENTION)
    peak_flops_per_s = run.cluster.peak(recipe.matmul_format)
    return StepRecord(
        step=step + 1,
        loss=result.loss,
        tokens_per_s=tokens_per_s,
        step_s=watch.last_step_s,
        mfu=flops_per_s / (peak_flops_per_s * run.layout.world) if peak_flops_per_s else 0.0,
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
