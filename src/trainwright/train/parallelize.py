"""How a run is spread over ranks: one list in one order, each line with its why.

`parallelize` turns a run into this rank's `Trainer`. Nothing here is skipped for a degree of 1 but tensor
parallelism, which replaces parameters; a pipeline of one is the loop over microbatches, and data parallelism over
one rank sums over nobody.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from trainwright.spec.recipe import Precision
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.loss import VocabularyPart
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import set_routing
from trainwright.train.model.initialize import global_name
from trainwright.train.model.transformer import Transformer
from trainwright.train.optimizer import adamw, clip, squared_norm
from trainwright.train.parallel.balance import Balance
from trainwright.train.parallel.crossing import Crossing
from trainwright.train.parallel.dispatch import apply_expert_parallel
from trainwright.train.parallel.gradients import DataParallel
from trainwright.train.parallel.local import copies_of
from trainwright.train.parallel.materialize import materialize
from trainwright.train.parallel.pipeline import Pipeline
from trainwright.train.parallel.recompute import apply_recompute, recomputed_layers
from trainwright.train.parallel.replicated import Replicated
from trainwright.train.parallel.sharded import Sharded
from trainwright.train.parallel.tensor import apply_tensor_parallel, vocabulary_start
from trainwright.train.parallel.tied import sum_over_ends

COMPUTE_DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
MASTER_DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class StepResult:
    """Of one step, the same on every rank and layout."""

    loss: float
    """Mean cross-entropy over the step's targets of all ranks, in nats."""
    grad_norm: float
    """Of the whole gradient before clipping."""


@dataclass
class Trainer:
    """One rank of a run, ready to step."""

    run: Run
    mesh: Mesh
    clock: Clock
    pieces: list[Transformer]
    data_parallel: DataParallel
    pipeline: Pipeline
    optimizer: torch.optim.AdamW
    balance: Balance

    def step(self, batch: Batch, lr: float) -> StepResult:
        """Forward, backward, clip, update."""
        result = self.gradients(batch)
        self.update(result, lr)
        return result

    def gradients(self, batch: Batch) -> StepResult:
        """Forward and backward: afterwards gradients are those of the step's mean loss, not clipped yet."""
        loss_sum = self.pipeline.run(batch)
        tied = self.tied_across_stages()
        if tied is not None:
            sum_over_ends(tied, self.mesh, self.clock)
        with self.clock.of("optimizer"):
            share = squared_norm(
                (parameter, copies_of(parameter) * self.data_parallel.copies(parameter))
                for _, parameter in self.data_parallel.parameters()
                if parameter is not tied or self.pieces[0].is_first
            )
        # One small collective for both: all ranks of a tp group hold the same loss, so each gives its part. Ranks
        # that are early wait here for the others, in a pipeline for the stages that finish last.
        layout = self.mesh.layout
        with self.clock.of("pp" if layout.pp > 1 else "dp" if layout.dp > 1 else "tp"):
            loss, square = self.mesh.sum_over_world([float(loss_sum) / layout.tp, share])
        return StepResult(loss / batch.global_tokens, math.sqrt(square))

    def update(self, result: StepResult, lr: float) -> None:
        """Clip and move the parameters; drops the gradients."""
        with self.clock.of("optimizer"):
            if self.run.recipe.grad_clip > 0:
                parameters = [parameter for _, parameter in self.data_parallel.parameters()]
                clip(parameters, result.grad_norm, self.run.recipe.grad_clip)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.data_parallel.after_update()
        self.balance.after_update()

    def tied_across_stages(self) -> nn.Parameter | None:
        """The tied tensor, on the two stages that both hold a copy of it."""
        if not self.run.model.tied_embeddings or self.mesh.layout.pp == 1:
            return None
        for name, parameter in self.data_parallel.parameters():
            if global_name(self.run.model, name) == "embedding.weight":
                return parameter
        return None


def parallelize(run: Run, mesh: Mesh, clock: Clock) -> Trainer:
    """This rank's part of `run`, with initial weights."""
    layout, recipe, spec = run.layout, run.recipe, run.model
    compute, master = COMPUTE_DTYPE[recipe.precision], MASTER_DTYPE[recipe.precision]

    # Pipeline first: it decides which layers exist here at all. On the meta device, as no rank may ever hold all.
    stages = layers_of_stages(spec.num_layers, layout.stages, layout.stage_layers)
    with torch.device("meta"):
        own = [chunk * layout.pp + mesh.coordinate.pp for chunk in range(layout.vpp)]
        ends = len(stages) - 1
        pieces = [Transformer(spec, stages[stage], first=stage == 0, last=stage == ends) for stage in own]

    # Tensor parallelism next: it changes the shapes that others shard. It replaces parameters, so tie again.
    vocabulary = None
    if layout.tp > 1:
        group, submesh = mesh.groups["tp"], mesh.submesh("tp")
        vocabulary = VocabularyPart(vocabulary_start(spec.vocab_size, submesh), group, clock)
        crossing = Crossing(group, clock, recipe.sequence_parallel)
        for piece in pieces:
            apply_tensor_parallel(piece, submesh, crossing, recomputed_layers(piece, recipe))
            piece.tie()

    # Experts over all ranks of a stage, read as a grid of their own; what is left of it is their data parallelism.
    for piece in pieces:
        set_routing(piece, recipe)
        apply_expert_parallel(piece, mesh, clock)

    # Recompute inside what data parallelism will wrap, so that recomputed layers find their weights gathered.
    for piece in pieces:
        apply_recompute(piece, recipe)

    # Data parallelism last: from here on it owns the parameters, and their precision.
    def fill(piece: Transformer, module: nn.Module, prefix: str) -> None:
        materialize(piece, module, prefix, seed=recipe.seed, dtype=master, device=mesh.device)

    if recipe.zero and mesh.dp_shard > 1:
        reshard = recipe.zero == 3 and recipe.reshard_after_forward
        data_parallel: DataParallel = Sharded(pieces, mesh, recipe.zero, compute, master, fill, reshard=reshard)
    else:
        for piece in pieces:
            fill(piece, piece, "")
        data_parallel = Replicated(pieces, mesh, compute, clock, overlap=recipe.overlap.dp)

    # The choice of experts is steered by buffers, which no form of data parallelism looks after.
    balance = Balance(pieces, mesh, master, recipe.balance_rate)

    rows = SCHEDULES[recipe.schedule].rows(layout.pp, layout.vpp, run.num_microbatches)
    pipeline = Pipeline(
        pieces,
        rows,
        mesh,
        data_parallel,
        clock,
        activation_dtype=compute,
        sequence_parallel=recipe.sequence_parallel and layout.tp > 1,
        overlap=recipe.overlap.pp,
        vocabulary=vocabulary,
    )
    optimizer = adamw(recipe.optimizer, data_parallel.parameters())
    return Trainer(run, mesh, clock, pieces, data_parallel, pipeline, optimizer, balance)
