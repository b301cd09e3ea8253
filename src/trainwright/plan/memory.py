"""Bytes of a rank by cause, at the moments of the schedule at which it may hold most.

Per parameter (P of them on a rank, s ranks in its shard group; w bytes of a weight as layers read it, g of a
gradient, u of all moments; for bf16 with fp32 masters 2, 4 and 8, the 16 bytes of arXiv:1910.02054 s3.1 with
gradients kept in fp32):

    zero   compute copy   master    gradients   moments
    0      wP             4P        gP          uP
    1      wP             4P/s      gP          uP/s
    2      wP             4P/s      gP/s        uP/s
    3      gathered       4P/s      gP/s        uP/s

Experts have their own s: the ranks that hold the same ones. fp32 has no separate compute copy unless the masters
are sharded. Recipes with fewer bits keep cast copies of the weights of their matmuls, in both orientations, beside
the compute copy, or instead of it where `gather_fp8`; of weights that zero 3 gathers they are made at each use.
Gradients are there from a chunk's first backward on, or, where accumulation is fused, all the time. Offloaded
states lie in host memory and count nothing. Activations are what every layer keeps for every microbatch that the
schedule holds.

A backward has several times at which most may be held, and the largest counts:

    loss         the loss's working set beside the logits
    layer        that of a layer, when the logits are gone
    layer's end  in place of what the layer kept its weights' gradients, as they are made and whole as they leave
    end          in place of all that the microbatch kept the chunk's gradients; those around the layers leave now
    last layer   of a step of one microbatch a layer's working set beside the gradients of all others
    before end   under zero 3, the same as the layer's end while the layer, and what left before, are there yet
    experts' end the gradients of a layer's experts, which leave before the rest of it
    alone        a weight gradient that runs by itself: the whole chunk's are made, then leave one after another

What is there for a while counts as communication: under zero 3 a layer that is gathered with its experts, and the
next one on its way (beside the loss one unit), or those that wait for a backward where nothing is resharded; from
zero 2 on one layer's whole gradients on their way, or one chunk's where the schedule works in rounds; of the head
whole gradients until the end.
"""

import numpy as np

from trainwright.plan.assembly import Moments, Shape
from trainwright.plan.table import Floats, Ints, Table
from trainwright.plan.transients import END, LAST_LAYER, Held, largest, times_of
from trainwright.spec.ledger import BytesCause


def moment_bytes(table: Table, shape: Shape, at: Moments, held: Held) -> dict[BytesCause, Floats]:
    """Bytes by cause, each (moments, rows), at that time of each moment at which they are most."""
    params = held.of_rows(at.params @ held.params)
    layers = 2 * shape.num_kinds
    around = held.of_rows(at.params[:, layers:] @ held.params[layers:])
    low = held.of_rows(at.params @ held.low_params)
    tensors = _states(table, params, low, table.shards, around)
    if table.model.is_moe:
        experts = held.of_rows(at.params @ held.expert_params)
        low = held.of_rows(at.params @ held.low_expert_params)
        for cause, value in _states(table, experts, low, table.expert_shards, np.zeros(1)).items():
            tensors[cause] = tensors[cause] + value
    grown, grown_at_end = _gradients(table, shape, held, at)
    times = times_of(table, shape, at, held)
    gradients = [grown_at_end if time == END else grown for time in range(len(times))]
    if (table.num_microbatches == 1).any():
        # All of the chunk's but the layer's own, and the embedding's.
        own = np.minimum(_yet_to_come(table, held, at, shape), grown_at_end - grown)
        gradients[LAST_LAYER] = grown_at_end - own
    totals = [sum(each.values(), own) for each, own in zip(times, gradients, strict=True)]
    given_back = _given_back(table, held, at)
    totals[END] = totals[END] - given_back
    most = np.array(totals).argmax(axis=0)
    tensors["gradients"] = np.choose(most, gradients)
    tensors["parameters"] = tensors["parameters"] - np.where(most == END, given_back, 0.0)
    for cause in times[0]:
        tensors[cause] = np.choose(most, [each[cause] for each in times])
    cluster = table.cluster
    framework = np.full_like(tensors["activations"], cluster.framework_bytes)
    if cluster.allocator_fraction:
        framework += cluster.allocator_fraction * sum(tensors.values(), np.zeros(1))
    return {**tensors, "framework": framework}


def _gradients(table: Table, shape: Shape, held: Held, at: Moments) -> tuple[Floats, Floats]:
    """Bytes of gradients, each (moments, rows), while a backward runs and at its end. What is sharded of those
    that it makes leaves layer by layer if it is the only one; if not, the next one has more. What stands around
    the layers is at the end on its way yet."""
    size, zero, shards, layers = table.recipe.gradient_bytes, table.columns.zero, table.shards, 2 * shape.num_kinds
    has, has_after = at.grown, at.grown_after
    if table.recipe.fused_accumulation:
        # Matmuls add to buffers that are there from the beginning.
        has = has_after = at.params
    new, of = has_after - has, held.of_rows
    grown = of(has @ held.params) * (size / np.where(zero >= 2, shards, 1))
    made = of(new[:, :layers] @ held.params[:layers])
    made = made + np.where((zero >= 1) & (shards > 1), 0.0, of(new[:, layers:] @ held.params[layers:]))
    end = grown + made * (size / np.where(zero >= 1, shards, 1))
    if table.model.is_moe:
        cut = table.expert_shards
        experts = of(has @ held.expert_params) * (size / np.where(zero >= 2, cut, 1))
        of_new = of(new @ held.expert_params) * (size / np.where(zero >= 1, cut, 1))
        grown, end = grown + experts, end + experts + of_new
    if shape.schedule == "breadth_first":
        # Of a chunk whose only round is under way no shard is there before its end.
        rounds = (zero == 2) & (shards > 1)
        under_way = np.minimum(has, at.running)
        late = of(under_way @ held.params) / shards + of(under_way @ held.expert_params) / table.expert_shards
        grown = grown - np.where(rounds, late * size, 0.0)
    return grown, end


def _yet_to_come(table: Table, held: Held, at: Moments, shape: Shape) -> Floats:
    """Bytes of the gradients of a layer and of the embedding as they are kept, (moments, rows)."""
    size, is_cut, layers = table.recipe.gradient_bytes, table.columns.zero >= 1, 2 * shape.num_kinds
    dense, experts = (
        held.of_rows(params[:layers]) * (size / np.where(is_cut, cut, 1))
        for params, cut in ((held.params, table.shards), (held.expert_params, table.expert_shards))
    )
    embedding = held.of_rows(at.running[:, [shape.head - 1]] @ held.params[[shape.head - 1]]) * size
    return largest(dense + experts, at.running[:, :layers]) + np.where(is_cut & (table.shards > 1), 0.0, embedding)


def _given_back(table: Table, held: Held, at: Moments) -> Floats:
    """Weights that were gathered for the step, of a chunk whose last backward ends. With more than two
    microbatches a fuller end comes before."""
    count, low = table.num_microbatches, held.low_params + held.low_expert_params
    rows = (table.columns.zero >= 1) & (table.columns.zero < 3) & (table.shards > 1) & (count <= 2)
    if not rows.any():
        return np.zeros(1)
    each = _copies(table, held.params + held.expert_params, low)
    second = at.running * (at.grown > 0)
    ending = np.where(count == 1, held.of_rows(at.running @ each), held.of_rows(second @ each))
    return np.where(rows, ending, 0.0)


def _copies(table: Table, params: Floats, low: Floats) -> Floats:
    """Bytes of weights that are gathered for a step, and of casts that came in their place."""
    recipe = table.recipe
    if not recipe.gather_fp8:
        return params * recipe.compute_bytes
    return (params - low) * recipe.compute_bytes + 2 * low * recipe.weight_bytes


def _states(table: Table, params: Floats, low: Floats, shards: Ints, around: Floats) -> dict[BytesCause, Floats]:
    """Bytes of weights and moments of `params` parameters, (moments, rows), that are cut over `shards` ranks;
    `low` of them are those of low-precision matmuls, `around` stand around the layers."""
    recipe, zero = table.recipe, table.columns.zero
    master, size = recipe.master_bytes, recipe.compute_bytes
    casts = 2 * low * recipe.weight_bytes
    plain = (params - low if recipe.gather_fp8 else params) * size
    held = plain + casts
    away = recipe.optimizer.offload
    # FSDP2 has experts that are cut over no ranks too, and copies them as it gathers others.
    is_cut = table.shards > 1
    needs_copy = ((zero >= 1) & is_cut) | (size < master) | away
    # Without anything to shard, zero 3 keeps the compute copy too: gathering from one rank is a cast. Where
    # masters are away, it keeps its shard of the copy.
    shard = (held if recipe.gather_fp8 else plain) / shards if away else 0.0
    # Casts of what is gathered are made at each use; of what one rank has alone they are held, but codes that are
    # gathered, which serve as one of them.
    alone = np.where(shards > 1, 0.0, casts / (2 if recipe.gather_fp8 else 1))
    kept = np.where(is_cut, shard + alone, held * ((size < master) | away))
    copy = np.where(zero == 3, kept, held * needs_copy)
    cut = np.where(zero >= 1, shards, 1)
    moments: Floats | float = 2 * recipe.moment_bytes
    if recipe.optimizer.name == "muon":
        # One momentum for matrices; what stands around the layers has AdamW's two.
        share = np.divide(around, params, out=np.zeros_like(params), where=params > 0)
        moments = recipe.moment_bytes * (1 + np.clip(share, 0, 1))
    on_device = 0 if away else 1
    return {
        "parameters": copy + params * (on_device * master / cut),
        "optimizer": params * (on_device / cut) * moments,
    }
