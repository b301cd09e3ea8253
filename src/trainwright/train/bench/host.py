"""What the host does beside kernels: the launch of an operation, and the work of a step and of its microbatches
that no operation accounts for (the schedule's acts, moving the batch, clipping and updating tensor by tensor).

Both are of a model so small that nothing else is left of it. `measure/` takes launches from the second.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainwright.spec.cluster import (
    ClusterSpec,
    Curve,
    Device,
    Fabric,
    Node,
    PeakFlops,
    Provenance,
    Rates,
)
from trainwright.spec.layout import Layout
from trainwright.spec.model import (
    DenseMlp,
    GroupedQueryAttention,
    LayerGroup,
    LayerSpec,
    ModelSpec,
    Rope,
)
from trainwright.spec.recipe import Recipe
from trainwright.spec.record import Sample
from trainwright.spec.run import Run
from trainwright.train.bench.stopwatch import Stopwatch
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.mesh import build_mesh
from trainwright.train.model.layers import Layer
from trainwright.train.model.rotary import Rotary
from trainwright.train.parallelize import parallelize

if TYPE_CHECKING:
    from trainwright.train.bench import Part

LAUNCHES_OF_A_LAYER = 50
"""Forward and backward, as the planner counts them (a test holds the two against each other)."""
LAUNCHES_AROUND_LAYERS = 15
"""The same of embedding, head and loss."""
MICROBATCHES = (1, 4)
TIMEOUT = timedelta(seconds=300)

LAYER = LayerSpec(attention=GroupedQueryAttention(num_heads=2, num_kv_heads=1, d_head=8), mlp=DenseMlp(d_ff=16))
TINY = ModelSpec(
    name="tiny",
    d_model=16,
    vocab_size=16,
    layer_groups=(LayerGroup(repeat=1, pattern=(LAYER,)),),
    rope=Rope(),
)
SEQ_LEN = 8


def parts(watch: Stopwatch) -> Iterator[tuple[str, "Part"]]:
    yield "launch", partial(_launch, watch)
    if watch.busy == 1:
        for microbatches in MICROBATCHES:
            yield "step", partial(_step, watch, microbatches)


def _launch(watch: Stopwatch, budget_s: float) -> list[Sample]:
    """Cost of an operation on next to nothing, autograd and module calls included: a layer, forward and backward,
    shared out over its operations."""
    layer, rotary = Layer(TINY, LAYER).to(watch.device), Rotary(Rope())
    x_BSD = torch.randn(1, SEQ_LEN, TINY.d_model, device=watch.device, requires_grad=True)

    def call() -> object:
        return torch.autograd.backward(layer(x_BSD, rotary).sum())

    return watch.timed("launch", "fp32", 1.0, LAUNCHES_OF_A_LAYER, budget_s, call)


def _step(watch: Stopwatch, microbatches: int, budget_s: float) -> list[Sample]:
    """A whole step of the trainer's, of so many microbatches."""
    recipe = Recipe(seq_len=SEQ_LEN, global_batch=microbatches, precision="fp32", zero=0)
    run = Run(layout=Layout(), recipe=recipe, model=TINY, cluster=any_cluster())
    mesh = build_mesh(run.layout, 0, watch.device, 1, TIMEOUT)
    trainer = parallelize(run, mesh, Clock())
    token_BS = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    batch = Batch([token_BS] * microbatches, [token_BS] * microbatches, microbatches * SEQ_LEN)
    launches = microbatches * (LAUNCHES_OF_A_LAYER + LAUNCHES_AROUND_LAYERS)
    return watch.timed("step", "fp32", microbatches, launches, budget_s, lambda: trainer.step(batch, 1e-6))


def any_cluster() -> ClusterSpec:
    """A run has one; a step doesn't look at it."""
    one = Curve(size=(1.0,), fraction=(1.0,))
    unknown = Provenance(kind="assumed", source="nothing reads it")
    return ClusterSpec(
        name="any",
        device=Device(
            name="any",
            kind="cpu",
            peak_flops_per_s=PeakFlops(fp32=1.0),
            memory_bytes=1,
            memory_bytes_per_s=1.0,
            num_sms=1,
        ),
        node=Node(devices=1, concurrent_devices=1),
        fabric=Fabric(link="none", link_domain=1, link_bytes_per_s=1.0),
        rates=Rates(
            matmul={"fp32": one},
            attention_forward={"fp32": one},
            attention_backward={"fp32": one},
            memory=1.0,
            launch_s=0.0,
            link=1.0,
            link_latency_s=0.0,
            network=1.0,
            network_latency_s=0.0,
        ),
        provenance=dict.fromkeys(("device", "node", "fabric", "rates"), unknown),
    )
