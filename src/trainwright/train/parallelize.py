"""How a run is spread over ranks: one list in one order, each line with its why.

`parallelize` turns a run into this rank's `Trainer`. Nothing here is skipped for a degree of 1 but tensor
parallelism, which replaces parameters, and context parallelism, which replaces the attention core; a pipeline of
one is the loop over microbatches, and data parallelism over one rank sums over nobody.
"""

import math
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType

import torch
from torch import nn

from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.head_loss import HeadLoss
from trainwright.train.loss import VocabularyPart
from trainwright.train.mesh import Mesh
from trainwright.train.model.dropout import Dropping, drop_branches, use_unfused_cores
from trainwright.train.model.experts import set_routing
from trainwright.train.model.initialize import global_name
from trainwright.train.model.transformer import Transformer
from trainwright.train.optimizer import clip, optimizer_of, squared_norm
from trainwright.train.parallel.balance import Balance
from trainwright.train.parallel.choices import apply_choices
from trainwright.train.parallel.collective_matmul import CrossingInParts
from trainwright.train.parallel.context import apply_context_parallel
from trainwright.train.parallel.crossing import Crossing
from trainwright.train.parallel.dispatch import apply_expert_parallel
from trainwright.train.parallel.gradients import DataParallel
from trainwright.train.parallel.local import copies_of
from trainwright.train.parallel.materialize import Values, materialize
from trainwright.train.parallel.pipeline import Pipeline
from trainwright.train.parallel.positions import Context, positions_of
from trainwright.train.parallel.recompute import apply_recompute, recomputed_blocks
from trainwright.train.parallel.replicated import Replicated
from trainwright.train.parallel.sharded import Sharded
from trainwright.train.parallel.tensor import apply_tensor_parallel, vocabulary_start
from trainwright.train.parallel.tied import sum_over_ends
from trainwright.train.parallel.twins import sum_over_twins
from trainwright.train.precision.apply import LowPrecisionLayers

COMPUTE_DTYPE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    **dict.fromkeys(LOW_PRECISION, torch.bfloat16),
}
MASTER_DTYPE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp64": torch.float64,
    **dict.fromkeys(LOW_PRECISION, torch.float32),
}


@dataclass(frozen=True)
class StepResult:
    """Of one step, the same on every rank and layout."""

    loss: float
    """Mean cross-entropy over the step's targets of all ranks, in nats; of the next token alone."""
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
    optimizer: torch.optim.Optimizer
    balance: Balance
    low_precision: LowPrecisionLayers | None = None

    def step(self, batch: Batch, lr: float) -> StepResult:
        """Forward, backward, clip, update."""
        result = self.gradients(batch)
        self.update(result, lr)
        return result

    def gradients(self, batch: Batch) -> StepResult:
        """Forward and backward: afterwards gradients are those of the step's mean loss, not clipped yet."""
        # The ranks of a cp group are given the same samples, of which each takes its positions.
        layout = self.mesh.layout
        loss_sum = self.pipeline.run(batch.at(positions_of(self.run.recipe, layout.cp, self.mesh.coordinate.cp)))
        twins = self.ranks_of_a_stage
        if twins > 1:
            sum_over_twins(self.data_parallel.parameters(), self.mesh, self.clock)
        tied = self.tied_across_stages()
        if tied:
            sum_over_ends(tied, self.mesh, self.clock)
        # Of a table that is held twice, one copy counts: on the rank of the first stage.
        again = tied[1:] if any(piece.is_first for piece in self.pieces) else tied
        with self.clock.of("optimizer"):
            share = squared_norm(
                (parameter, copies_of(parameter) * self.data_parallel.copies(parameter) * twins)
                for _, parameter in self.data_parallel.parameters()
                if not any(parameter is copy for copy in again)
            )
        # One small collective for both: all ranks of a tp group hold the same loss, so each gives its part. Ranks
        # that are early wait here for the others, in a pipeline for the stages that finish last.
        last = next((axis for axis in ("pp", "dp", "cp") if layout.degree(axis) > 1), "tp")
        with self.clock.of("bubble" if last == "pp" else last):
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
        if self.low_precision is not None:
            self.low_precision.after_update()

    def held_bytes(self) -> dict[str, float]:
        """`DataParallel.held_bytes`, with the casts of weights that low-precision layers hold from act to act."""
        held = self.data_parallel.held_bytes()
        if self.low_precision is not None:
            held["parameters"] += self.low_precision.held_bytes()
        return held

    def leave_out(self) -> None:
        """Drop the gradients of a step that is to move nothing."""
        self.data_parallel.after_update()
        self.balance.begin_anew()
        if self.low_precision is not None:
            self.low_precision.begin_anew()

    @property
    def ranks_of_a_stage(self) -> int:
        """Ranks of a pipeline that hold the same stage: 2 where microbatches go through it both ways."""
        layout, schedule = self.run.layout, SCHEDULES[self.run.recipe.schedule]
        return layout.pp * layout.vpp // schedule.num_stages(layout.pp, layout.vpp)

    def tied_across_stages(self) -> list[nn.Parameter]:
        """This rank's copies of the embedding's table, where first and last stage are two and both have one: for a
        tied head, or for the tokens of multi-token prediction."""
        if not self.run.model.embeds_last or self.mesh.layout.pp == 1:
            return []
        return [
            parameter
            for name, parameter in self.data_parallel.parameters()
            if global_name(self.run.model, name) == "embedding.weight"
        ]


def _compiler() -> ModuleType:
    """The file that compiles layers; PyTorch's tracer, which takes two seconds to import, comes with it."""
    return import_module("trainwright.train.parallel.compiled")


def parallelize(
    run: Run, mesh: Mesh, clock: Clock, values: Values = materialize, *, in_float64: bool = False
) -> Trainer:
    """This rank's part of `run`, with initial weights; `values` gives parameters on the meta device others.
    in_float64: all but the operands of low-precision matmuls is float64, for proofs."""
    layout, recipe, spec = run.layout, run.recipe, run.model
    compute, master = COMPUTE_DTYPE[recipe.precision], MASTER_DTYPE[recipe.precision]
    if in_float64:
        compute = master = torch.float64
    compiled = _compiler() if recipe.compile else None
    gradient = torch.bfloat16 if recipe.gradient_format == "bf16" else master

    # Pipeline first: it decides which layers exist here at all. On the meta device, as no rank may ever hold all.
    schedule = SCHEDULES[recipe.schedule]
    placement = schedule.stages(layout.pp, layout.vpp)
    ends = schedule.num_stages(layout.pp, layout.vpp) - 1
    stages = layers_of_stages(spec.num_layers, ends + 1, layout.stage_layers)
    with torch.device("meta"):
        own = placement[mesh.coordinate.pp]
        pieces = [Transformer(spec, stages[stage], first=stage == 0, last=stage == ends) for stage in own]

    # Tensor parallelism next: it changes the shapes that others shard. It replaces parameters, so tie again.
    loss = HeadLoss(
        fused=recipe.loss_kernel == "fused",
        chunks=recipe.loss_chunks,
        z_loss=recipe.z_loss,
        softcap=spec.logit_softcap,
        later_weight=recipe.mtp_loss_weight / max(spec.mtp_depth, 1),
    )
    if layout.tp > 1:
        group, submesh = mesh.groups["tp"], mesh.submesh("tp")
        vocabulary = VocabularyPart(vocabulary_start(spec.vocab_size, submesh), group, clock)
        kind = CrossingInParts if recipe.overlap.tp else compiled.CrossingBetweenGraphs if compiled else Crossing
        crossing = kind(group, clock, recipe.sequence_parallel)
        loss = replace(loss, part=vocabulary, edge=crossing)
        for piece in pieces:
            apply_tensor_parallel(piece, submesh, crossing, recomputed_blocks(piece, recipe))
            piece.tie()

    # Experts over all ranks of a stage, read as a grid of their own; what is left of it is their data parallelism.
    # Who chooses them has to know of a whole sequence, which tp and cp share out.
    for piece in pieces:
        set_routing(piece, recipe)
        apply_choices(piece, mesh, recipe, clock)
        apply_expert_parallel(piece, mesh, recipe, clock)

    # What multiplies in few bits: where the products stand is known now, and nothing wraps them yet.
    low_precision = None
    if recipe.low_precision is not None:
        low_precision = LowPrecisionLayers(recipe, mesh, clock, has_twin=ends + 1 < layout.pp * layout.vpp)
        for piece in pieces:
            low_precision.apply(piece, recomputed_blocks(piece, recipe))

    dropping = None
    if recipe.dropout:
        # Under cp a rank has a contiguous part of the positions, which sequence parallelism cuts again, and inside
        # the attention core a part of its tp rank's heads.
        at = mesh.coordinate
        dropping = Dropping(recipe.dropout, recipe.seed, torch.zeros(1, dtype=torch.int64))
        dropping.head_part = at.tp * layout.cp + at.cp
        dropping.sequence_part = at.cp * layout.tp + at.tp if recipe.sequence_parallel else at.cp

    # Compiled layers next: what recomputes a layer or shards it stands around its graphs. They are made when it
    # first runs, so what is changed inside of it until then is in them.
    if compiled:
        for piece in pieces:
            compiled.apply_compile(piece, position_cut=layout.tp if recipe.sequence_parallel else 1)

    # Recompute inside what data parallelism will wrap, so that recomputed layers find their weights gathered. It
    # wraps attention cores, and masks stand around what it wraps of a block.
    for piece in pieces:
        if recipe.attention_kernel == "unfused":
            use_unfused_cores(piece, dropping)
        apply_recompute(piece, recipe)
        if dropping is not None:
            drop_branches(piece, dropping)

    # Context parallelism around the attention cores, which recomputation may have wrapped.
    if layout.cp > 1:
        for piece in pieces:
            apply_context_parallel(piece, Context(mesh.groups["cp"], clock), recipe)

    # What no graph can hold is known now: communication, experts, masks, what is recomputed of a layer.
    if compiled:
        for piece in pieces:
            compiled.keep_out_of_graphs(piece, recipe, cp=layout.cp)
            if dropping is not None:
                compiled.keep_masks_out(piece, dropping)

    # Data parallelism last: from here on it owns the parameters, and their precision.
    def fill(piece: Transformer, module: nn.Module, prefix: str) -> None:
        values(piece, module, prefix, seed=recipe.seed, dtype=master, device=mesh.device)

    if recipe.zero and mesh.dp_shard > 1:
        reshard = recipe.zero == 3 and recipe.reshard_after_forward
        data_parallel: DataParallel = Sharded(
            pieces,
            mesh,
            recipe.zero,
            compute,
            gradient,
            fill,
            reshard=reshard,
            splits_backward=schedule.splits_backward,
            in_few_bits=low_precision.gathered if low_precision is not None else {},
        )
    else:
        for piece in pieces:
            fill(piece, piece, "")
        data_parallel = Replicated(pieces, mesh, compute, gradient, clock, overlap=recipe.overlap.dp)

    # The choice of experts is steered by buffers, which no form of data parallelism looks after.
    has_twin = ends + 1 < layout.pp * layout.vpp
    balance = Balance(pieces, mesh, master, recipe.balance_rate, has_twin=has_twin)

    pipeline = Pipeline(
        pieces,
        schedule.rows(layout.pp, layout.vpp, run.num_microbatches),
        placement,
        mesh,
        data_parallel,
        clock,
        activation_dtype=compute,
        sequence_parallel=recipe.sequence_parallel and layout.tp > 1,
        overlap=recipe.overlap.pp,
        loss=loss,
        told=[each for each in (dropping, low_precision and low_precision.under_way) if each is not None],
    )
    optimizer = optimizer_of(recipe.optimizer, data_parallel.parameters(), gradient)
    return Trainer(run, mesh, clock, pieces, data_parallel, pipeline, optimizer, balance, low_precision)
