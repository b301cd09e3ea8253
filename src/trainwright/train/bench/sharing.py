"""How much of data-parallel communication a step of the trainer hides: compute alone, communication alone, and the
step that has both, with replicated gradients and with sharded parameters.

It is the trainer's own step, since what hides depends on when its buckets leave and its layers are gathered, and
what its copies cost shows in the same place. Of a small model whose layers are those that the small demos have.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainwright.spec.layout import Layout
from trainwright.spec.model import DenseMlp, GroupedQueryAttention, LayerGroup, LayerSpec, ModelSpec, Rope
from trainwright.spec.recipe import Recipe
from trainwright.spec.record import Sample, SampleOp
from trainwright.spec.run import Run
from trainwright.train.bench.host import any_cluster
from trainwright.train.bench.links import in_turn
from trainwright.train.bench.stopwatch import Stopwatch
from trainwright.train.clock import Clock
from trainwright.train.collectives import all_gather, reduce_scatter
from trainwright.train.data import Batch
from trainwright.train.mesh import build_mesh
from trainwright.train.parallelize import Trainer, parallelize

if TYPE_CHECKING:
    from trainwright.train.bench import Part

TIMEOUT = timedelta(seconds=300)
LAYERS, SEQ_LEN = 4, 128
LAYER = LayerSpec(attention=GroupedQueryAttention(num_heads=8, num_kv_heads=4, d_head=32), mlp=DenseMlp(d_ff=768))
SMALL = ModelSpec(
    name="small",
    d_model=256,
    vocab_size=512,
    layer_groups=(LayerGroup(repeat=LAYERS, pattern=(LAYER,)),),
    rope=Rope(),
)


def parts(watch: Stopwatch) -> Iterator[tuple[str, "Part"]]:
    """Of all ranks of the world. The trainers' groups are made at once, and before those that not all ranks are
    in: PyTorch names a group by how many a rank is in already."""
    replicas, shards = (_trainers(watch, zero) for zero in (0, 3))
    yield "overlap of replicas", partial(_replicated, watch, *replicas)
    yield "overlap of shards", partial(_sharded, watch, *shards)


def _replicated(watch: Stopwatch, alone: Trainer, together: Trainer, budget_s: float) -> list[Sample]:
    flat = torch.zeros(sum(each.numel() for _, each in alone.data_parallel.parameters()), device=watch.device)
    return _compared(
        watch, "overlap", alone, together, lambda: dist.all_reduce(flat), 4.0 * flat.numel(), budget_s
    )


def _sharded(watch: Stopwatch, alone: Trainer, together: Trainer, budget_s: float) -> list[Sample]:
    """Each layer, and what stands around them, is gathered before forward and before backward, and scattered."""
    units = [sum(each.numel() for each in layer.parameters()) for layer in alone.pieces[0].layers.values()]
    units.append(sum(each.numel() for _, each in alone.data_parallel.parameters()) - sum(units))
    shards = [torch.zeros(-(-values // watch.world), device=watch.device) for values in units]
    wholes = [torch.zeros(watch.world * len(shard), device=watch.device) for shard in shards]

    def communicate() -> None:
        for whole, shard in zip(wholes, shards, strict=True):
            all_gather(whole, shard)
            all_gather(whole, shard)
            reduce_scatter(shard, whole)

    moved = 3 * 4.0 * sum(units)
    return _compared(watch, "sharded", alone, together, communicate, moved, budget_s)


def _trainers(watch: Stopwatch, zero: int) -> tuple[Trainer, Trainer]:
    """One of a rank that is alone, and one of a rank among all."""

    def trainer(layout: Layout) -> Trainer:
        recipe = Recipe(seq_len=SEQ_LEN, global_batch=layout.dp, precision="fp32", zero=zero)  # pyright: ignore[reportArgumentType]
        run = Run(layout=layout, recipe=recipe, model=SMALL, cluster=any_cluster())
        rank = watch.rank if layout.dp > 1 else 0
        return parallelize(run, build_mesh(layout, rank, watch.device, 1, TIMEOUT), Clock())

    return trainer(Layout()), trainer(Layout(dp=watch.world))


def _compared(
    watch: Stopwatch,
    op: SampleOp,
    alone: Trainer,
    together: Trainer,
    communicate: Callable[[], object],
    moved_bytes: float,
    budget_s: float,
) -> list[Sample]:
    token_BS = torch.zeros(1, SEQ_LEN, dtype=torch.int64)

    def gradients_of(trainer: Trainer) -> None:
        trainer.gradients(Batch([token_BS], [token_BS], SEQ_LEN * trainer.run.layout.dp))
        trainer.data_parallel.after_update()

    bodies = (partial(gradients_of, alone), communicate, partial(gradients_of, together))
    samples: list[Sample] = []
    for number, seconds in enumerate(in_turn(watch, bodies, budget_s, 1), start=1):
        samples += watch.sample(op, "fp32", number, moved_bytes, seconds, watch.busy)
    return samples
