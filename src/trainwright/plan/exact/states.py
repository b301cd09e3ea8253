"""Data parallelism of a rank's step in whole numbers: what is gathered and reduced when, and what states weigh.

A chunk's units go through the rank's row of acts as FSDP2 takes them: gathered where they are needed and not
there, given back after forward or backward, and reduced, as the zero stage says (`train/parallel/sharded.py`); or,
replicated, their gradients are summed in buckets once (`replicated.py`). Weights that are gathered as codes are a
byte a value, and their blocks' largest values are agreed on once (`train/precision/gathered.py`).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from trainwright.plan.agreement import NUMBER_BYTES
from trainwright.plan.exact.messages import FORMATS, Messages
from trainwright.plan.exact.standing import Chunk, Standing, whole
from trainwright.plan.exact.tensors import Tensor, chunk_tensors, chunk_units, cut_rows
from trainwright.plan.sharding import BUCKET_BYTES
from trainwright.spec.precision import Operand
from trainwright.spec.recipe import INT8_BLOCK, INT8_SCALE_BYTES, Recipe
from trainwright.spec.schedule import round_ends


def is_sharded(standing: Standing) -> bool:
    recipe, layout = standing.run.recipe, standing.run.layout
    return bool(recipe.zero) and layout.dp * layout.cp > recipe.dp_replicate


def shard_ranks(standing: Standing, of_experts: bool) -> int:
    layout, replicas = standing.run.layout, standing.run.recipe.dp_replicate
    return (layout.expert_dp if of_experts else layout.dp * layout.cp) // replicas


def padded(tensor: Tensor, ranks: int) -> int:
    """Values of all shards together: the dim that is cut is rounded up."""
    if cuts_another_dim(tensor, ranks):
        return tensor.numel
    rows, *rest = tensor.shape
    return math.ceil(rows / ranks) * ranks * math.prod(rest)


def cuts_another_dim(tensor: Tensor, ranks: int) -> bool:
    """Of stacked experts that don't go evenly, another dim than the first (`sharded._even_cut`)."""
    rows, *rest = tensor.shape
    return len(rest) >= 2 and rows % ranks > 0 and any(size % ranks == 0 for size in rest)


def shard_numel(standing: Standing, tensor: Tensor) -> int:
    """Values of this rank's shard, without what is rounded up."""
    if not is_sharded(standing):
        return tensor.numel
    ranks = shard_ranks(standing, tensor.of_experts)
    if cuts_another_dim(tensor, ranks):
        return tensor.numel // ranks
    rows, *rest = tensor.shape
    return cut_rows(rows, ranks, place_among(standing, tensor.of_experts)) * math.prod(rest)


def place_among(standing: Standing, of_experts: bool) -> int:
    """This rank's place among those that share out a tensor."""
    layout, at = standing.run.layout, standing.at
    if not of_experts:
        return (at.dp * layout.cp + at.cp) % shard_ranks(standing, False)
    plane = (at.dp * layout.cp + at.cp) * layout.tp + at.tp
    return plane // (layout.ep * layout.etp) % shard_ranks(standing, True)


def add_state_messages(standing: Standing, messages: Messages) -> None:
    """Of data parallelism, of sums over tp, and between the ends and twins of a pipeline."""
    if is_sharded(standing):
        for chunk in standing.chunks:
            _add_sharded(standing, chunk, messages)
        if standing.run.recipe.gather_fp8:
            _add_agreed_blocks(standing, messages)
    else:
        _add_replicated(standing, messages)
    _add_twins(standing, messages)
    _add_ends(standing, messages)
    messages.add("world", "all_reduce", "float64", 16)


def _add_sharded(standing: Standing, chunk: Chunk, messages: Messages) -> None:
    recipe = standing.run.recipe
    compute, gradient = FORMATS[whole(recipe.compute_bytes)], FORMATS[whole(recipe.gradient_bytes)]
    walk = Walk.of(standing, chunk)
    for unit in chunk_units(standing, chunk):
        if not unit.tensors:
            continue
        ranks, axis = shard_ranks(standing, unit.of_experts), "edp" if unit.of_experts else "dp"
        values = sum(padded(each, ranks) for each in unit.tensors)
        codes = sum(padded(each, ranks) for each in unit.tensors if each.is_low) if recipe.gather_fp8 else 0
        # What travels with codes does so as bytes.
        gathered = (values - codes) * whole(recipe.compute_bytes) + whole(codes * recipe.code_bytes)
        messages.add(f"{axis}_shard", "all_gather", "uint8" if codes else compute, gathered, walk.gathers)
        for reduction in walk.reductions:
            # Replicas of shards keep all gradients of a unit end to end, and so reduce all every time.
            ready = [each for each in unit.tensors if recipe.dp_replicate > 1 or reduction.backwards(each)]
            reduced = sum(padded(each, ranks) for each in ready) * whole(recipe.gradient_bytes)
            if ready:
                messages.add(f"{axis}_shard", "reduce_scatter", gradient, reduced)
            for each in unit.tensors:
                backwards = reduction.backwards(each)
                if each.is_partial and backwards:
                    # A gradient that was accumulated before is in the format of sums.
                    size, name = recipe.compute_bytes, compute
                    if backwards > 1 or standing.makes_graph_anew:
                        size, name = recipe.gradient_bytes, gradient
                    messages.add("tp", "all_reduce", name, each.numel * whole(size))
        if recipe.dp_replicate > 1:
            messages.add(
                f"{axis}_replicate", "all_reduce", gradient, values * whole(recipe.gradient_bytes) // ranks
            )


def _add_agreed_blocks(standing: Standing, messages: Messages) -> None:
    """Once a step, of all weights that are gathered as codes, the largest value of each block of the whole."""
    low = standing.run.recipe.low_precision
    assert low is not None
    for of_experts, axes in ((False, ("dp_shard", "tp")), (True, ("edp_shard", "etp"))):
        weights = [each for _, each in _slots(standing) if each.is_low and each.of_experts == of_experts]
        size = NUMBER_BYTES * sum(_blocks(each, low.weight) for each in weights)
        # With a history all experts of a layer have one largest value.
        for axis in (*axes, "ep") if of_experts and low.amax_history else axes:
            messages.add(axis, "all_reduce", "float32", size, int(bool(weights)))


def _blocks(tensor: Tensor, operand: Operand) -> int:
    *stack, rows, columns = tensor.shape
    sizes = ((rows, operand.across), (columns, operand.along))
    return math.prod(stack) * math.prod(math.ceil(size / block) if block else 1 for size, block in sizes)


class Reduction(NamedTuple):
    """One reduction of a chunk's gradients: the backwards that are summed in it, of tensors that have theirs at
    once, and of those that wait for the weight-gradient act."""

    at_once: int
    waiting: int

    def backwards(self, tensor: Tensor) -> int:
        return self.waiting if tensor.waits else self.at_once


class Walk(NamedTuple):
    """A chunk's units through the row of acts: how often they are gathered, and their reductions."""

    gathers: int
    reductions: list[Reduction]

    @staticmethod
    def of(standing: Standing, chunk: Chunk) -> "Walk":
        recipe = standing.run.recipe
        ends, gives_back = round_ends(standing.row), recipe.zero == 3 and recipe.reshard_after_forward
        gathers = is_there = backwards = at_once = waiting = 0
        reductions: list[Reduction] = []
        for act in standing.row:
            if act.chunk != chunk.number:
                continue
            if act.kind != "W":
                gathers += not is_there
                is_there = True
            if act.kind == "F":
                is_there = not gives_back
                continue
            at_once += act.kind != "W"
            if act.kind == "I":
                is_there = recipe.zero != 3
                continue
            backwards, waiting = backwards + 1, waiting + 1
            is_last = backwards == chunk.passes
            if is_last or recipe.zero == 3 or (recipe.zero == 2 and (act.microbatch, act.chunk) in ends):
                reductions.append(Reduction(at_once, waiting))
                at_once = waiting = 0
            if act.kind == "B":
                is_there = not (is_last or recipe.zero == 3)
            elif is_last:
                is_there = False
        return Walk(gathers, reductions)


def _slots(standing: Standing) -> Iterator[tuple[int, Tensor]]:
    for chunk in standing.chunks:
        for tensor in chunk_tensors(standing, chunk):
            yield chunk.number, tensor


def _add_replicated(standing: Standing, messages: Messages) -> None:
    recipe = standing.run.recipe
    gradient, size = FORMATS[whole(recipe.gradient_bytes)], whole(recipe.gradient_bytes)
    for axis, of_experts in (("dp_cp", False), ("edp", True)):
        slots = [each for each in _slots(standing) if each[1].of_experts == of_experts]
        for numel in _buckets(slots, whole(recipe.master_bytes)):
            messages.add(axis, "all_reduce", gradient, numel * size)
    partial = sum(tensor.numel for _, tensor in _slots(standing) if tensor.is_partial)
    if partial:
        messages.add("tp", "all_reduce", gradient, partial * size)


def _buckets(slots: list[tuple[int, Tensor]], size: int) -> list[int]:
    """Values of each bucket, from the last parameter to the first."""
    buckets: list[int] = []
    chunk_before, held = None, 0
    for chunk, tensor in reversed(slots):
        num_bytes = tensor.numel * size
        if chunk != chunk_before or held + num_bytes > BUCKET_BYTES:
            buckets.append(0)
            held = 0
        buckets[-1] += tensor.numel
        held += num_bytes
        chunk_before = chunk
    return buckets


def _add_twins(standing: Standing, messages: Messages) -> None:
    """Where a stage is held twice: gradients of the rank's shards, in the order of names."""
    if standing.num_stages == standing.run.layout.stages:
        return
    recipe = standing.run.recipe
    size = whole(recipe.gradient_bytes if not is_sharded(standing) else recipe.master_bytes)
    room, sizes = 0, []
    for _, tensor in sorted(_slots(standing), key=lambda each: each[1].name):
        num_bytes = shard_numel(standing, tensor) * size
        if num_bytes > room:
            sizes.append(0)
            room = BUCKET_BYTES
        sizes[-1] += num_bytes
        room -= num_bytes
    for each in sizes:
        messages.add("twins", "all_reduce", FORMATS[size], each)


def _add_ends(standing: Standing, messages: Messages) -> None:
    """The table that both ends of a pipeline hold, where this rank has one copy of it."""
    model, recipe = standing.run.model, standing.run.recipe
    if not model.embeds_last or standing.run.layout.pp == 1:
        return
    names = ("embedding.weight",) + (("head.weight",) if model.tied_embeddings else ())
    copies = [tensor for _, tensor in _slots(standing) if tensor.name in names]
    if len(copies) == 1:
        size = whole(recipe.gradient_bytes if not is_sharded(standing) else recipe.master_bytes)
        messages.add("first_last", "all_reduce", FORMATS[size], shard_numel(standing, copies[0]) * size)


def _moment_bytes(recipe: Recipe, values: int) -> int:
    """Of a shard's moment: a number a value, and of int8 one more for each block, the last of which may be cut."""
    if recipe.optimizer.moments != "int8":
        return values * whole(recipe.moment_bytes)
    return values + INT8_SCALE_BYTES * math.ceil(values / INT8_BLOCK)


def state_bytes(standing: Standing) -> dict[str, int]:
    """Of parameters that the optimizer moves, their gradients when they are whole, and moments."""
    recipe = standing.run.recipe
    tensors = [tensor for _, tensor in _slots(standing)]
    values = sum(shard_numel(standing, each) for each in tensors)
    gradient = recipe.master_bytes if is_sharded(standing) else recipe.gradient_bytes
    moments = 0
    for each in tensors:
        count = 2
        if recipe.optimizer.name == "muon" and each.is_matrix and each.name.startswith("layers."):
            count = 1
        moments += count * _moment_bytes(recipe, shard_numel(standing, each))
    return {
        "parameters": values * whole(recipe.master_bytes),
        "gradients": values * whole(gradient),
        "optimizer": moments,
    }
