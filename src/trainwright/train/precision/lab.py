"""The same small models trained in bf16 and in each low precision, from the same weights on the same text, with
planted outliers of several sizes; and what rounding did on the way (`spec/precision_lab.py`).

All go on from weights that were trained in bf16 for `BEGUN` times as many steps. A model that was just begun is
little more than its embedding and its head, which are in bf16 everywhere: it hardly reads what its layers make of
rounded tensors, and loses nothing with them.

Trainings are jobs of a few processes, each with one thread. Widths are of two of fp8-block's blocks, so that an
outlier has one of them and the other is free of it.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import reject
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.precision_lab import (
    FACTORS,
    MODELS,
    PLAIN,
    PRODUCTS,
    Curve,
    ModelKind,
    PrecisionLab,
    Rounding,
    SumError,
)
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import PackedDataset
from trainwright.train.loop import batch_of
from trainwright.train.mesh import Mesh
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallelize import Trainer, parallelize
from trainwright.train.precision.largest import Role
from trainwright.train.precision.planted import plant
from trainwright.train.precision.quantized import Quantized
from trainwright.train.precision.rates import counts
from trainwright.train.precision.sums import errors_of_sums
from trainwright.train.shards import open_shards

WIDTH, LAYERS, VOCAB = 256, 2, 512
MLPS: dict[ModelKind, dict[str, Any]] = {
    "dense": {"kind": "dense", "d_ff": 512},
    "moe": {"kind": "moe", "num_experts": 4, "top_k": 2, "d_ff": 128, "d_ff_shared": 128},
}
RECIPE = {"seq_len": 128, "global_batch": 4, "micro_batch": 4, "zero": 0}
BEGUN = 5
BEGINNING = {"lr": 1e-3, "warmup_steps": 10, "schedule": "cosine"}
GOING_ON = {"lr": 3e-4, "warmup_steps": 5, "schedule": "constant"}
"""Of the optimizer: learned in few steps, and then slowly enough that two trainings stay near each other."""
SAMPLED = ("dense", "fp8-current", 1.0)
"""The training, and the layer, whose values are those of the operands that are summed."""
SAMPLED_LAYER = f"layers.{LAYERS - 1}.mlp.up"
SAMPLES = 2**16

OnProgress = Callable[[str, float], None]
Samples = dict[Role, np.ndarray]


class Job(NamedTuple):
    """One training."""

    model: ModelKind
    precision: str
    factor: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}, outliers of {self.factor:,.0f}"


class Trained(NamedTuple):
    """What it gave; samples of the layer's tensors by role."""

    curve: Curve
    roundings: list[Rounding]
    samples: Samples


def explore(
    cluster: ClusterSpec,
    shards: Path,
    steps: int,
    *,
    workers: int = 2,
    factors: tuple[float, ...] = FACTORS,
    on_progress: OnProgress = lambda what, done: None,
) -> PrecisionLab:
    """All trainings of so many steps, on token shards of a vocabulary of `VOCAB`, and all sums.

    cluster: whose devices the run files name; all is done on this machine's CPU. Raises `InvalidSpec` for fewer
    steps than one.
    """
    if steps < 1:
        reject("--steps", steps, "must be at least 1")
    jobs = [Job(*each) for each in product(MODELS, (PLAIN, *LOW_PRECISION), factors)]
    trained: dict[Job, Trained] = {}
    sums: dict[str, list[SumError]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool,
    ):
        begun = {model: Path(folder) / f"{model}.pt" for model in MODELS}
        on_progress("both models in bf16", 0.0)
        for each in [
            pool.submit(begin, lab_run(model, PLAIN, cluster, BEGINNING), shards, BEGUN * steps, begun[model])
            for model in MODELS
        ]:
            each.result()
        named: dict[Future[Any], Job | str] = {}
        for job in sorted(jobs, key=lambda job: job != SAMPLED):  # what sums wait for is first
            run = lab_run(job.model, job.precision, cluster, GOING_ON)
            named[pool.submit(training, run, job, shards, steps, begun[job.model])] = job
        whole = len(jobs) + len(PRODUCTS)
        while named:
            done = next(as_completed(named))
            job, result = named.pop(done), done.result()
            if isinstance(job, str):
                sums[job] = result
            else:
                trained[job] = result
                if job == SAMPLED:
                    named |= {pool.submit(errors_of_sums, each, result.samples): each for each in PRODUCTS}
            on_progress(job if isinstance(job, str) else job.name, (len(trained) + len(sums)) / whole)
    return PrecisionLab(
        steps=steps,
        curves=tuple(trained[job].curve for job in jobs),
        roundings=tuple(each for job in jobs for each in trained[job].roundings),
        sums=tuple(each for name in PRODUCTS for each in sums[name]),
    )


def lab_run(model: ModelKind, precision: str, cluster: ClusterSpec, optimizer: dict[str, Any]) -> Run:
    """A checked run of one of the lab's models; optimizer: fields of it that aren't the recipe's own."""
    attention = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": WIDTH // 4}
    return Run.parse(
        {
            "layout": {},
            "recipe": {
                **RECIPE,
                "precision": precision,
                "emulate_precision": precision in LOW_PRECISION,
                "optimizer": optimizer,
            },
            "model": {
                "name": f"lab-{model}",
                "d_model": WIDTH,
                "vocab_size": VOCAB,
                "rope": {"theta": 10000.0},
                "layer_groups": [{"repeat": LAYERS, "pattern": [{"attention": attention, "mlp": MLPS[model]}]}],
            },
            "data": {"vocab_size": VOCAB},
            "cluster": cluster,
        }
    ).check()


def begin(run: Run, shards: Path, steps: int, weights: Path) -> list[float]:
    """Train from the seed's weights and write those that come of it; the losses."""
    trainer = _trainer(run)
    losses = [step() for step in steps_of(run, trainer, shards, 0, steps)]
    torch.save({name: parameter.detach() for name, parameter in trainer.data_parallel.parameters()}, weights)
    return losses


def training(run: Run, job: Job, shards: Path, steps: int, weights: Path | None = None) -> Trained:
    """Train in this process; tensors are looked at in the last step. With weights that `begin` has written it goes
    on from them, on the text behind what they were trained on."""
    trainer = _trainer(run)
    for piece in trainer.pieces:
        plant(piece, job.factor)
    first = 0
    if weights is not None:
        values, first = torch.load(weights), BEGUN * steps
        with torch.no_grad():
            for name, parameter in trainer.data_parallel.parameters():
                parameter.copy_(values[name])
        trainer.data_parallel.after_update()
    losses, seconds = [], []
    roundings: list[Rounding] = []
    samples: Samples = {}
    for step, train in enumerate(steps_of(run, trainer, shards, first, steps)):
        if step == steps - 1 and trainer.low_precision is not None:
            trainer.low_precision.health.listener = partial(_look, job, roundings, samples)
        began_s = time.perf_counter()
        losses.append(train())
        seconds.append(time.perf_counter() - began_s)
    curve = Curve(**job._asdict(), losses=tuple(losses), step_s=statistics.median(seconds))
    return Trained(curve, roundings, samples if job == SAMPLED else {})


def _trainer(run: Run) -> Trainer:
    return parallelize(run, Mesh(run.layout, 0, torch.device("cpu")), Clock())


def steps_of(run: Run, trainer: Trainer, shards: Path, first: int, steps: int) -> Iterator[Callable[[], float]]:
    """Each step of a training, which gives its loss when it is called; on the text from a first step on."""
    dataset = PackedDataset(open_shards(shards), run.recipe.seq_len, run.recipe.seed, None)
    for step in range(steps):
        batch, lr = batch_of(run, dataset, first + step, 0), learning_rate(run.recipe.optimizer, step, steps)
        yield lambda batch=batch, lr=lr: trainer.step(batch, lr).loss


def _look(
    job: Job,
    roundings: list[Rounding],
    samples: Samples,
    layer: str,
    role: Role,
    x: torch.Tensor,
    quantized: Quantized,
) -> None:
    """At a tensor (..., N, K) and what it was rounded to."""
    if not x.numel() or any((each.layer, each.role) == (layer, role) for each in roundings):
        return
    if layer == SAMPLED_LAYER:
        places = torch.randint(x.numel(), (SAMPLES,), generator=torch.Generator().manual_seed(0))
        samples[role] = x.float().flatten()[places].numpy()
    counted = counts(x, quantized)
    exact = x.float().flatten(0, -2)
    of_channel = (quantized.dequantize().flatten(0, -2) - exact).norm(dim=0) / exact.norm(dim=0)
    error = float(of_channel[exact.any(0)].square().mean().sqrt())
    roundings.append(
        Rounding(
            **job._asdict(),
            layer=layer,
            role=role,
            error=error if math.isfinite(error) else math.inf,
            flushed=float(counted.underflow) / counted.values,
            saturated=float(counted.overflow) / counted.values,
        )
    )
