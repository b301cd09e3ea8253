"""Seconds of a step around the pipeline: data-parallel communication that nothing hides, and the optimizer.

zero 0 all-reduces gradients once; 1 reduce-scatters them and gathers parameters once; 2 reduce-scatters at every
microbatch, or, of ranks with several chunks, when a round of microbatches has gone through one; 3 gathers at every
forward, again at every backward where it reshards, and reduce-scatters there. HSDP all-reduces the shards over its
replicas once. Experts do the same among the ranks that hold the same ones. Weights that are gathered in few bits
are codes, whose scales ranks agree on once a step. The rank that is fullest counts: the others wait for it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainwright.plan import geometry, rates
from trainwright.plan.agreement import blocks_seconds
from trainwright.plan.collectives import Line, line
from trainwright.plan.table import SCHEDULE, Floats, Ints, Table
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.model import MoeMlp
from trainwright.spec.units import MIB

BUCKET_BYTES = 25 * MIB
"""Of gradients that are replicated, the trainer's bucket, which is that of PyTorch DDP."""

NEWTON_SCHULZ_STEPS = 5
"""Of Muon (github.com/KellerJordan/Muon): each X <- aX + (bA + cA^2)X with A = XX^T."""


@dataclass(frozen=True)
class Ranks:
    """Kinds of ranks in each row of a table: their parameters, and the seconds of their acts in one microbatch,
    (kinds, rows)."""

    params: Floats
    """Without those of routed experts."""
    expert_params: Floats
    low_params: Floats
    low_expert_params: Floats
    """Of them and of those of experts, what low-precision matmuls read."""
    around_params: Floats
    """Of the first, those of embedding, norm and head."""
    forward_s: Floats
    backward_s: Floats


HOST_UPDATE_BYTES_PER_S = 300e9
"""Memory traffic of an update on the CPUs of a node: assumed; long streams of two sockets with 8 to 12 channels of
DDR5 each reach 350 to 700 GB/s."""


@dataclass(frozen=True)
class Sharing:
    """The groups that states are shared over in each row of a table, and how long their collectives take.

    What is sharded travels layer by layer, and what stands around the layers; replicated gradients in buckets.
    """

    gather: Line
    scatter: Line
    all_reduce: Line
    between: Line
    """HSDP's reduction over replicas of a shard."""
    shards: Ints
    units: Floats

    @staticmethod
    def of(table: Table) -> "Sharing":
        """Of all parameters but those of routed experts."""
        replicas = table.columns.replicas
        # Replicas of a shard stand as far apart as a whole group of shards.
        stride = table.strides["dp"] * (table.columns.dp // replicas)
        near = geometry.near(table.per_domain, stride, replicas)
        return Sharing._of(table, table.shards, geometry.shard_members(table), replicas, near)

    @staticmethod
    def of_experts(table: Table) -> "Sharing":
        """Of the parameters of routed experts."""
        c, shards = table.columns, table.expert_shards
        replicas = np.maximum(table.expert_replicas // shards, 1)
        members = geometry.expert_members(table, c.ep * c.etp, shards)
        near = geometry.expert_members(table, c.ep * c.etp * shards, replicas)
        return Sharing._of(table, shards, members, replicas, near)

    @staticmethod
    def _of(table: Table, shards: Ints, members: Ints, replicas: Ints, near: Ints) -> "Sharing":
        def over(op: CollectiveOp, size: Ints, members: Ints) -> Line:
            return line(table.cluster, op, size, members, table.at_work)

        return Sharing(
            gather=over("all_gather", shards, members),
            scatter=over("reduce_scatter", shards, members),
            all_reduce=over("all_reduce", shards, members),
            between=over("all_reduce", replicas, near),
            shards=shards,
            units=table.model.num_layers / table.columns.pp + 1,
        )

    def take(self, rows: Ints) -> "Sharing":
        """The same in some rows, which may come several times."""
        return Sharing(
            gather=self.gather.take(rows),
            scatter=self.scatter.take(rows),
            all_reduce=self.all_reduce.take(rows),
            between=self.between.take(rows),
            shards=self.shards[rows],
            units=self.units[rows],
        )

    def seconds(self, table: Table, params: Floats, low: Floats) -> "_Seconds":
        """Of each collective over the states of `params` parameters, all of them once, (kinds, rows); `low` of
        them are those of low-precision matmuls."""
        recipe = table.recipe
        weights = params * recipe.compute_bytes
        if recipe.gather_fp8:
            weights = (params - low) * recipe.compute_bytes + low * recipe.code_bytes
        gradient_bytes = params * recipe.gradient_bytes
        buckets = np.maximum(np.ceil(gradient_bytes / BUCKET_BYTES), 1)

        def over(each: Line, message: Floats, parts: Floats) -> Floats:
            return parts * each.latency_s + message * each.s_per_byte

        return _Seconds(
            over(self.gather, weights, self.units),
            over(self.scatter, gradient_bytes, self.units),
            over(self.all_reduce, gradient_bytes, buckets),
            over(self.between, gradient_bytes / self.shards, self.units),
        )


class _Seconds(NamedTuple):
    gather: Floats
    scatter: Floats
    all_reduce: Floats
    between: Floats


def dp_seconds(table: Table, ranks: Ranks, dense: Sharing, experts: Sharing | None) -> Floats:
    """Exposed seconds of dp communication in a step, (kinds, rows)."""
    recipe, overlap = table.recipe, table.cluster.rates.overlap
    zero = table.columns.zero
    seconds = dense.seconds(table, ranks.params, ranks.low_params)
    if experts is not None:
        more = experts.seconds(table, ranks.expert_params, ranks.low_expert_params)
        seconds = _Seconds(*(one + other for one, other in zip(seconds, more, strict=True)))
    gather, scatter, all_reduce, between = seconds
    count = np.where(zero == 2, reductions(table), 1.0)
    once = np.where(zero == 0, all_reduce, gather + count * scatter) + between
    # It may hide behind the compute of the microbatches in which it happens.
    if recipe.overlap.dp:
        window = (ranks.forward_s + ranks.backward_s) * count
        once = once - np.minimum(once * overlap.dp, window)
    of_experts = None if experts is None else experts.all_reduce
    agreed = blocks_seconds(table, ranks.low_params, ranks.low_expert_params, dense.all_reduce, of_experts)
    once = once + _own_seconds(table, ranks, dense.shards) + agreed
    in_turn_s = table.cluster.rates.serial_gather_s
    if in_turn_s:
        once = once + np.where((zero == 1) & (dense.shards > 1), dense.shards * in_turn_s, 0.0)
    sharded = np.flatnonzero(zero == 3)
    if not len(sharded):
        return once
    gather, scatter, between, forward, backward = (
        each[:, sharded] for each in (gather, scatter, between, ranks.forward_s, ranks.backward_s)
    )
    again = gather * table.columns.reshard[sharded]
    power = overlap.fsdp_norm if recipe.overlap.dp else 1.0
    every = _beside(forward, gather, power) + _beside(backward, again + scatter, power)
    own = (_own_seconds(table, ranks, dense.shards) + agreed)[:, sharded]
    once[:, sharded] = passes(table)[sharded] * every + between + own
    return once


def _own_seconds(table: Table, ranks: Ranks, shards: Ints) -> Floats:
    """Of a rank's work on what is gathered and reduced, for which ranks of a node take turns, (kinds, rows)."""
    rates, recipe, zero = table.cluster.rates, table.recipe, table.columns.zero
    if not rates.replica_s_per_byte and not rates.shard_s_per_byte:
        return np.zeros_like(ranks.params)
    params = ranks.params + ranks.expert_params
    weights, gradients = params * recipe.compute_bytes, params * recipe.gradient_bytes
    often = passes(table)
    gathers = np.where(zero == 3, often * (1 + table.columns.reshard), 1.0)
    scatters = np.where(zero == 3, often, np.where(zero == 2, reductions(table), 1.0))
    of_shards = (gathers * weights + scatters * gradients) * rates.shard_s_per_byte
    own = np.where(zero == 0, gradients * rates.replica_s_per_byte, of_shards)
    turns = np.maximum(table.at_work / table.cluster.node.concurrent_devices, 1.0)
    return np.where(shards > 1, own * turns, 0.0)


def passes(table: Table) -> Floats:
    """Microbatches that go through each stage of a rank in a step: of dualpipe's two copies, half each,
    (rows,)."""
    halved = table.columns.schedule == SCHEDULE.index("dualpipe")
    return table.num_microbatches / np.where(halved, 2, 1)


def reductions(table: Table) -> Floats:
    """How often in a step zero 2 reduces a chunk's gradients (`spec.schedule.round_ends`), (rows,)."""
    c, count = table.columns, passes(table)
    interleaved, breadth = (c.schedule == SCHEDULE.index(name) for name in ("interleaved_1f1b", "breadth_first"))
    return np.where(interleaved, np.ceil(count / c.pp), np.where(breadth, 1.0, count))


def _beside(compute_s: Floats, communication_s: Floats, power: float) -> Floats:
    """Seconds by which communication beside compute makes it longer: their p-norm, less the compute."""
    longer = np.maximum(compute_s, communication_s)
    ratio = np.minimum(compute_s, communication_s) / np.maximum(longer, 1e-300)
    return longer * (1 + ratio**power) ** (1 / power) - compute_s


def optimizer_seconds(table: Table, ranks: Ranks) -> Floats:
    """Seconds of clipping and the update, (kinds, rows)."""
    recipe, cluster, sharded = table.recipe, table.cluster, table.columns.zero >= 1
    local = np.where(sharded, ranks.params / table.shards, ranks.params)
    local = local + np.where(sharded, ranks.expert_params / table.expert_shards, ranks.expert_params)
    # Clipping reads a gradient for the norm, and reads and writes it to scale; the update reads it, and reads and
    # writes the weight and its moments: 40 bytes a parameter in fp32. Published steps fit 32-38 with clipping.
    clipping = 3 * recipe.gradient_bytes if recipe.grad_clip else 0
    moments = (
        2.0 if recipe.optimizer.name == "adamw" else 1 + ranks.around_params / (ranks.params + ranks.expert_params)
    )
    update = recipe.gradient_bytes + 2 * recipe.master_bytes + 2 * moments * recipe.moment_bytes
    on_device = clipping + (0 if recipe.optimizer.offload else update)
    seconds = rates.update_s(table, local * on_device)
    if recipe.optimizer.name == "muon":
        seconds = seconds + _newton_schulz_s(table, ranks)
    if recipe.optimizer.offload:
        # Gradients go to the host, where the update runs for all devices of a node, and new weights come back.
        bytes_per_s = cluster.node.host_bytes_per_s or cluster.device.memory_bytes_per_s
        seconds = seconds + local * (recipe.gradient_bytes + recipe.compute_bytes) / bytes_per_s
        seconds = seconds + local * update * cluster.node.devices / HOST_UPDATE_BYTES_PER_S
    return seconds


def weight_cast_seconds(table: Table, ranks: Ranks) -> Floats:
    """Seconds of casting weights for low-precision matmuls in a step, (kinds, rows): once, in both orientations,
    where they stay gathered; with zero 3 at each use, each time in one. Of weights that are gathered cast the rank
    casts its shard alone, for each gather, and transposes what it holds."""
    recipe, zero = table.recipe, table.columns.zero
    if not recipe.is_low_precision:
        return np.zeros((1, 1))
    read, written = recipe.compute_bytes, recipe.weight_bytes

    def traffic(low: Floats, shards: Ints) -> Floats:
        by_use = (zero == 3) & (shards > 1)
        if not recipe.gather_fp8:
            return low * np.where(by_use, 2 * passes(table) * (read + written), read + 2 * written)
        casts = np.where(by_use, passes(table) * (1 + table.columns.reshard), 1)
        own = casts * (read + written) / np.where(zero >= 1, shards, 1)
        return low * (own + np.where(by_use, 0, 2 * written))

    moved = traffic(ranks.low_params, table.shards)
    if table.model.is_moe:
        moved = moved + traffic(ranks.low_expert_params, table.expert_shards)
    return rates.update_s(table, moved)


def _newton_schulz_s(table: Table, ranks: Ranks) -> Floats:
    """Seconds of orthogonalizing the hidden matrices, shared out over the ranks that hold them: a step for one of
    (a, b), a <= b, takes 4 a^2 b + 2 a^3 FLOPs, at most 6 a for each parameter; a is d_model, or an expert's
    width."""
    wide = float(table.model.d_model)
    widths = [layer.mlp.d_ff for layer in table.model.layer_counts() if isinstance(layer.mlp, MoeMlp)]
    narrow = min(wide, float(max(widths, default=0)))
    sharded = table.columns.zero >= 1
    dense = (ranks.params - ranks.around_params) / np.where(sharded, table.shards, 1)
    experts = ranks.expert_params / np.where(sharded, table.expert_shards, 1)
    flops = NEWTON_SCHULZ_STEPS * 6 * (dense * wide + experts * narrow)
    peak = table.cluster.peak("bf16") or table.cluster.device.peak_flops_per_s.fp32
    rate = table.cluster.rates.matmul.get("bf16") or table.cluster.rates.matmul["fp32"]
    return flops / (peak * rate.fraction[-1])
