"""Memory and time of every candidate of a table: the one code path of `predict` and `search`.

Candidates are taken in groups of equal (pp, vpp, schedule), whose stages are cut alike, so that all is arrays
over (candidates, stages). A step is the pipeline's makespan plus what follows it: the exposed part of dp
communication, the optimizer, waiting for cores, for the slowest rank and for the host. Its causes are those of the
busiest pipeline rank and sum to the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import pipeline, rates
from trainwright.plan.cores import Cores, shared_makespan
from trainwright.plan.memory import Holding, RankMemory, rank_memory, rank_params
from trainwright.plan.operations import (
    AttentionCore,
    Collective,
    Elementwise,
    Matmul,
    Piece,
    embedding_piece,
    head_piece,
    layer_piece,
)
from trainwright.plan.table import RECOMPUTE, SCHEDULE, Floats, Table
from trainwright.spec.ledger import SecondsCause
from trainwright.spec.model import LayerSpec, mean_keys
from trainwright.spec.stages import layers_of_stages
from trainwright.spec.units import MIB

OPTIMIZER_BYTES_PER_PARAM = 40
"""Traffic of clipping and AdamW per local parameter: the norm reads 4, scaling moves 8, the update reads
weight, gradient and two moments (16) and writes three of them (12). Published steps fit 32-38 with clipping."""

BUCKET_BYTES = 25 * MIB
"""Of gradients that are replicated, the trainer's bucket, which is that of PyTorch DDP."""


@dataclass(frozen=True)
class PieceTime:
    """Seconds of a piece's forward and backward act by cause, each (candidates,)."""

    forward: dict[SecondsCause, Floats]
    backward: dict[SecondsCause, Floats]


@dataclass(frozen=True)
class Group:
    """Candidates of equal pp, vpp and schedule, evaluated."""

    rows: NDArray[np.intp]
    """Their places in the whole table."""
    table: Table
    schedule: str
    pp: int
    vpp: int
    memory: RankMemory
    params: Floats
    forward: dict[SecondsCause, Floats]
    """Of one act on each stage, (candidates, stages)."""
    backward: dict[SecondsCause, Floats]
    send_s: Floats
    flops_recomputed: Floats
    """On the busiest rank in a step."""

    @property
    def forward_s(self) -> Floats:
        return sum(self.forward.values(), np.zeros(1))

    @property
    def backward_s(self) -> Floats:
        return sum(self.backward.values(), np.zeros(1))


def groups(table: Table) -> Iterator[Group]:
    """The table's groups, evaluated but not played."""
    columns = table.columns
    keys = np.stack([columns.pp, columns.vpp, columns.schedule], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    for index, (pp, vpp, schedule) in enumerate(unique.tolist()):
        rows = np.flatnonzero(inverse.ravel() == index)
        yield _group(rows, table.take(rows), pp, vpp, SCHEDULE[schedule])


def _group(rows: NDArray[np.intp], table: Table, pp: int, vpp: int, schedule: str) -> Group:
    kinds = table.model.layer_counts()
    pieces = tuple(layer_piece(table, layer) for layer in kinds)
    embedding, head = embedding_piece(table), head_piece(table)
    stage_layers = _stage_layers(table, list(kinds), pp * vpp)
    microbatches = table.num_microbatches
    counts, which = np.unique(microbatches, return_inverse=True)
    held = np.array([pipeline.in_flight(schedule, pp, vpp, count) for count in counts.tolist()])[which]
    per_chunk = stage_layers.reshape(vpp, pp, len(pieces))
    held_by_chunk = held.reshape(len(rows), pp, vpp)
    holding = Holding(
        layer_kinds=pieces,
        embedding=embedding,
        head=head,
        layers=per_chunk.sum(axis=0),
        held_layers=np.einsum("nrc,crk->nrk", held_by_chunk, per_chunk),
        held_inputs=np.stack([held_by_chunk[:, 0, 0], np.ones(len(rows))], axis=1),
    )
    if schedule == "gpipe":
        holding = Holding(**{**vars(holding), "held_inputs": np.stack([microbatches, microbatches], axis=1)})
    forward, backward = _stage_seconds(table, pieces, embedding, head, stage_layers)
    message = table.residual_tokens * table.model.d_model * table.recipe.compute_bytes
    send_s = rates.axis_collective_s(table, "pp", "send", message)
    return Group(
        rows=rows,
        table=table,
        schedule=schedule,
        pp=pp,
        vpp=vpp,
        memory=rank_memory(table, holding),
        params=rank_params(table, holding),
        forward=forward,
        backward=backward,
        send_s=send_s,
        flops_recomputed=_flops_recomputed(table, pieces, list(kinds), stage_layers, pp),
    )


def _stage_layers(table: Table, kinds: list, num_stages: int) -> Floats:
    """Layers of each kind on each stage, (stages, kinds)."""
    layers = table.model.layers
    counts = np.zeros((num_stages, len(kinds)))
    for stage, held in enumerate(layers_of_stages(table.model.num_layers, num_stages)):
        for layer in held:
            counts[stage, kinds.index(layers[layer])] += 1
    return counts


def _stage_seconds(
    table: Table, pieces: tuple[Piece, ...], embedding: Piece, head: Piece, stage_layers: Floats
) -> tuple[dict[SecondsCause, Floats], dict[SecondsCause, Floats]]:
    """Seconds of an act on each stage by cause, (candidates, stages), forward and backward."""
    rows, stages = len(table.columns), len(stage_layers)
    forward: dict[SecondsCause, Floats] = {}
    backward: dict[SecondsCause, Floats] = {}

    def add(into: dict[SecondsCause, Floats], seconds: dict[SecondsCause, Floats], weights: Floats) -> None:
        for cause, value in seconds.items():
            total = into.setdefault(cause, np.zeros((rows, stages)))
            total += (value + np.zeros(rows))[:, None] * weights

    first, last = np.zeros(stages), np.zeros(stages)
    first[0], last[-1] = 1, 1
    weights = [*stage_layers.T, first, last]
    for at, (piece, weight) in enumerate(zip((*pieces, embedding, head), weights, strict=True)):
        time = _piece_time(table, piece, recomputable=at < len(pieces))
        add(forward, time.forward, weight)
        add(backward, time.backward, weight)
    everywhere: dict[SecondsCause, Floats] = {"host": np.full(rows, table.cluster.rates.microbatch_overhead_s)}
    add(forward, everywhere, np.ones(stages))
    add(backward, everywhere, np.ones(stages))
    return forward, backward


def _piece_time(table: Table, piece: Piece, *, recomputable: bool) -> PieceTime:
    """A piece's seconds by cause. What recompute does again goes to `recompute`, its communication to its axis."""
    forward: dict[SecondsCause, Floats] = {}
    backward: dict[SecondsCause, Floats] = {}
    launch_s = table.cluster.rates.launch_s

    def add(into: dict[SecondsCause, Floats], cause: SecondsCause, seconds: Floats) -> None:
        into[cause] = into.get(cause, np.zeros(1)) + seconds

    for each in piece.operations:
        match each:
            case Matmul():
                seconds = rates.matmul_s(table, each)
                add(forward, "matmul", seconds)
                add(backward, "matmul", rates.BACKWARD_MATMULS * seconds)
            case AttentionCore():
                forward_s, backward_s = rates.attention_s(table, each)
                add(forward, "attention", forward_s)
                add(backward, "attention", backward_s)
            case Elementwise():
                forward_s, backward_s = rates.elementwise_s(table, each)
                add(forward, "elementwise", forward_s)
                add(backward, "elementwise", backward_s)
            case Collective():
                for ops, into in ((each.forward, forward), (each.backward, backward)):
                    for op in ops:
                        add(into, each.axis, rates.axis_collective_s(table, each.axis, op, each.message_bytes))
        launches = each.launches
        add(forward, "launch", np.full(1, launch_s * launches[0]))
        add(backward, "launch", np.full(1, launch_s * launches[1]))
    if recomputable:
        again = table.columns.recompute == RECOMPUTE.index("full")
        compute = sum((forward[cause] for cause in ("matmul", "attention", "elementwise", "launch")), np.zeros(1))
        attention_again = (table.columns.recompute == RECOMPUTE.index("selective")) * forward["attention"]
        add(backward, "recompute", again * compute + attention_again)
        for axis in ("tp", "cp"):
            if axis in forward:
                add(backward, axis, again * forward[axis])
    return PieceTime(forward, backward)


def _flops_recomputed(
    table: Table, pieces: tuple[Piece, ...], kinds: list[LayerSpec], stage_layers: Floats, pp: int
) -> Floats:
    """FLOPs that recompute adds in a step, averaged over the pipeline's ranks, (candidates,). Attention counts all
    keys, as the model FLOPs do that they are added to (`predict.CONVENTION`)."""
    total = np.zeros(len(table.columns))
    full = table.columns.recompute == RECOMPUTE.index("full")
    selective = table.columns.recompute == RECOMPUTE.index("selective")
    for piece, layer, count in zip(pieces, kinds, stage_layers.sum(axis=0), strict=True):
        window, length = layer.attention.sliding_window, table.recipe.seq_len
        uncut = mean_keys(length, window, causal=False) / mean_keys(length, window, causal=True)
        for each in piece.operations:
            if isinstance(each, Matmul):
                total += count * full * each.forward_flops
            elif isinstance(each, AttentionCore):
                total += count * (full | selective) * each.forward_flops * uncut
    return total * table.num_microbatches / pp


def dp_seconds(group: Group) -> tuple[Floats, Floats]:
    """Exposed seconds of dp communication in a step, and the optimizer's seconds, (candidates,).

    zero 0 all-reduces gradients once; 1 reduce-scatters them and gathers parameters once; 2 reduce-scatters
    at every microbatch; 3 gathers twice (forward, backward) and reduce-scatters at every microbatch. HSDP
    all-reduces the shards over its replicas once. The fullest rank counts: the others wait for it.
    """
    table, recipe, cluster = group.table, group.table.recipe, group.table.cluster
    columns, zero, microbatches = table.columns, table.columns.zero, table.num_microbatches
    params = group.params.max(axis=1)
    replicas = recipe.dp_replicate
    shards = table.shards
    # A shard group lies over cp, whose ranks stand tp apart, and over dp, whose ranks stand tp * cp * pp apart.
    domain = cluster.fabric.link_domain
    dp_stride, dp_shards = rates.stride(table, "dp"), columns.dp // replicas
    members = np.clip(domain // rates.stride(table, "cp"), 1, columns.cp) * np.clip(
        domain // dp_stride, 1, dp_shards
    )

    # Sharded layers, and what stands around them, travel one by one; replicated gradients in buckets.
    units = table.model.num_layers / columns.pp + 1

    def over(op: rates.CollectiveOp, message: Floats, parts: Floats = units) -> Floats:
        return parts * rates.group_s(cluster, op, message / parts, shards, members)

    gradient_bytes, weight_bytes = params * recipe.master_bytes, params * recipe.compute_bytes
    scatter = over("reduce_scatter", gradient_bytes)
    gather = over("all_gather", weight_bytes)
    all_reduce = over("all_reduce", gradient_bytes, np.ceil(gradient_bytes / BUCKET_BYTES))
    between = units * rates.collective_s(
        cluster,
        "all_reduce",
        gradient_bytes / shards / units,
        np.full_like(shards, replicas),
        dp_stride * dp_shards,
    )
    reductions = np.where(zero >= 2, microbatches, 1)
    seconds = np.select(
        [zero == 0, zero == 1, zero == 2],
        [all_reduce, gather + scatter, gather + microbatches * scatter],
        microbatches * (2 * gather + scatter),
    ) + between * (replicas > 1)
    # What it may hide behind: the compute of the microbatches in which it happens.
    busy = group.forward_s.reshape(len(params), group.vpp, group.pp).sum(axis=1).max(axis=1)
    busy = busy + group.backward_s.reshape(len(params), group.vpp, group.pp).sum(axis=1).max(axis=1)
    window = busy * reductions
    hidden = np.minimum(seconds * cluster.rates.overlap, window) if recipe.overlap.dp else 0.0
    local = np.where(zero >= 1, params / shards, params)
    scale = recipe.master_bytes / 4
    optimizer = rates.memory_s(cluster, local * OPTIMIZER_BYTES_PER_PARAM * scale)
    return seconds - hidden, optimizer


def lower_bounds(group: Group) -> Floats:
    """A lower bound of each candidate's step, without playing, (candidates,)."""
    bound = np.zeros(len(group.rows))
    microbatches = group.table.num_microbatches
    forward_s, backward_s = group.forward_s, group.backward_s
    for count in np.unique(microbatches).tolist():
        same = microbatches == count
        bound[same] = pipeline.bounds(
            group.pp, group.vpp, count, forward_s[same], backward_s[same], group.send_s[same]
        )
    return sum(_around(group, bound, _least_sharing(group, bound)).values(), bound)


def step_s(group: Group, at: int) -> float:
    """Seconds of a step of the candidate at place `at`, its schedule played."""
    part = _only(group, at)
    makespan = np.array([_makespan(part, sends=True)])
    return float(sum(_around(part, makespan, _sharing(part, makespan)).values(), makespan)[0])


def step_seconds(group: Group, at: int) -> dict[SecondsCause, float]:
    """The same by cause: of the busiest pipeline rank, and what surrounds the pipeline."""
    part = _only(group, at)
    with_sends, without = _makespan(part, sends=True), _makespan(part, sends=False)
    work = (part.forward_s + part.backward_s).reshape(part.vpp, part.pp).sum(axis=0)
    busiest = int(work.argmax())
    microbatches = int(part.table.num_microbatches[0])
    seconds: dict[SecondsCause, float] = {}
    for causes in (part.forward, part.backward):
        for cause, value in causes.items():
            of_rank = float(value.reshape(part.vpp, part.pp)[:, busiest].sum())
            seconds[cause] = seconds.get(cause, 0.0) + of_rank * microbatches
    seconds["bubble"] = without - sum(seconds.values())
    seconds["pp"] = with_sends - without
    makespan = np.array([with_sends])
    for cause, value in _around(part, makespan, _sharing(part, makespan)).items():
        seconds[cause] = seconds.get(cause, 0.0) + float(value[0])
    return seconds


def _only(group: Group, at: int) -> Group:
    """The group of the one candidate at place `at`."""
    row = np.array([at])
    return Group(
        rows=group.rows[row],
        table=group.table.take(row),
        schedule=group.schedule,
        pp=group.pp,
        vpp=group.vpp,
        memory=group.memory,
        params=group.params[row],
        forward={cause: value[row] for cause, value in group.forward.items()},
        backward={cause: value[row] for cause, value in group.backward.items()},
        send_s=group.send_s[row],
        flops_recomputed=group.flops_recomputed[row],
    )


def _makespan(part: Group, *, sends: bool) -> float:
    return pipeline.makespan(
        part.schedule,
        part.pp,
        part.vpp,
        int(part.table.num_microbatches[0]),
        part.forward_s[0].tolist(),
        part.backward_s[0].tolist(),
        float(part.send_s[0]) if sends else 0.0,
        blocking_sends=not part.table.recipe.overlap.pp,
    )


def _around(group: Group, makespan: Floats, sharing: Floats) -> dict[SecondsCause, Floats]:
    """Seconds of a step beside the pipeline's makespan, of which `sharing` is what waiting for cores adds."""
    table, cluster = group.table, group.table.cluster
    dp, optimizer = dp_seconds(group)
    optimizer = optimizer * np.maximum(_ranks_per_core(group), 1.0)
    doublings = np.log2(np.maximum(table.world / cluster.node.devices, 1.0))
    step = makespan + dp + optimizer + sharing
    return {
        "dp": dp,
        "optimizer": optimizer,
        "core_sharing": sharing,
        "straggling": step * cluster.rates.straggling_per_doubling * doublings,
        "host": np.full(len(makespan), cluster.rates.step_overhead_s),
    }


COMPUTE: tuple[SecondsCause, ...] = ("matmul", "attention", "elementwise", "launch", "recompute", "host")
"""What wants a core. Ranks of a collective run in step, so while they communicate no core comes free."""


def _ranks_per_core(group: Group) -> Floats:
    node = group.table.cluster.node
    return np.minimum(group.table.world, node.devices) / node.concurrent_devices


def _least_sharing(group: Group, makespan: Floats) -> Floats:
    """A lower bound of what waiting for cores adds to a makespan: all work of the node on all of its cores."""
    work, waiting = _per_rank(group, COMPUTE), _per_rank(group, ("tp", "cp", "ep"))
    return np.where(
        _ranks_per_core(group) > 1, np.maximum(work * _ranks_per_core(group) + waiting - makespan, 0.0), 0.0
    )


def _sharing(part: Group, makespan: Floats) -> Floats:
    """What waiting for cores adds to the makespan of the one candidate of `part`, its schedule played."""
    if _ranks_per_core(part)[0] <= 1:
        return np.zeros(1)
    work = float(_per_rank(part, COMPUTE)[0])
    waiting = float(_per_rank(part, ("tp", "cp", "ep"))[0])
    node = part.table.cluster.node
    seconds = shared_makespan(
        part.schedule,
        part.pp,
        part.vpp,
        int(part.table.num_microbatches[0]),
        part.forward_s[0].tolist(),
        part.backward_s[0].tolist(),
        float(part.send_s[0]),
        Cores(
            per_stage=min(float(part.table.world[0]), node.devices) / part.pp,
            cores=node.concurrent_devices,
            compute_share=work / (work + waiting),
        ),
    )
    return np.maximum(seconds - makespan, 0.0)


def _per_rank(group: Group, causes: tuple[SecondsCause, ...]) -> Floats:
    """Seconds of a step that some causes take, averaged over the pipeline's ranks, (candidates,)."""
    parts = [part[cause] for part in (group.forward, group.backward) for cause in causes if cause in part]
    return sum((part.sum(axis=1) for part in parts), np.zeros(1)) * group.table.num_microbatches / group.pp
