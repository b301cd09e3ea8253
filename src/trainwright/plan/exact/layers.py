"""Messages of layers, embedding and head, from the lists of operations, and of transfers between stages."""

from trainwright.plan.agreement import NUMBER_BYTES, STEP_AXES, is_cast_by_use
from trainwright.plan.exact.messages import FORMATS, SIZES, Messages
from trainwright.plan.exact.standing import Standing, whole
from trainwright.plan.operations import Agreement, Collective, Dispatch, Matmul
from trainwright.spec.layout import Axis
from trainwright.spec.model import MoeMlp


def add_layer_messages(standing: Standing, messages: Messages) -> None:
    """Of everything that microbatches go through on the rank."""
    for piece, marks, passes in standing.pieces():
        for each in piece.operations:
            if isinstance(each, Collective):
                _add(standing, messages, each, marks, passes)
            elif isinstance(each, Dispatch):
                _add_dispatch(standing, messages, each, marks, passes)
            elif isinstance(each, Agreement):
                _add_agreement(standing, messages, each, marks, passes)
    _add_transfers(standing, messages)
    _add_loads(standing, messages)
    _add_history(standing, messages)


def _add(standing: Standing, messages: Messages, each: Collective, marks: int, passes: int) -> None:
    if each.absent & marks:
        return
    recipe, size = standing.run.recipe, whole(each.message_bytes)
    compute = FORMATS[whole(recipe.compute_bytes)] if not each.is_precise else precise_format(standing)
    axis = "etp" if each.over_experts else each.axis
    again = standing.times_again(each, marks)
    if axis == "cp" and recipe.cp_method == "ring":
        _add_ring(
            standing, messages, compute, size, passes, whole_again=bool(again), core_again=bool(each.core & marks)
        )
        return
    if each.goes_round:
        sends = (len(each.forward) * (1 + again) + len(each.backward)) * passes
        _add_sends(standing, messages, each.axis, compute, size, sends)
        return
    if axis == "etp":
        _add_etp(standing, messages, each, compute, size, passes, again=again)
        return
    for operation in each.forward:
        messages.add(axis, operation, compute, size, passes * (1 + again) * whole(each.parts))
    for operation in each.backward:
        messages.add(axis, operation, compute, size, passes * whole(each.parts))


def _add_etp(
    standing: Standing, messages: Messages, each: Collective, dtype: str, size: int, passes: int, *, again: int
) -> None:
    """Rows of different lengths, which no gather takes: each rank's go to all by an all-to-all, and sums come back
    by one. Rows come with their weights."""
    messages.add("etp", "all_to_all", dtype, size, passes * (2 + again))
    if each.forward == ("all_gather",):
        recipe, model = standing.run.recipe, standing.run.model
        rows, precise = size // (model.d_model * whole(recipe.compute_bytes)), precise_format(standing)
        messages.add("etp", "all_to_all", precise, rows * SIZES[precise], passes * (2 + again))


def _add_ring(
    standing: Standing,
    messages: Messages,
    dtype: str,
    size: int,
    passes: int,
    *,
    whole_again: bool,
    core_again: bool,
) -> None:
    """Keys and values go round in forward, and again where the core is recomputed; in backward once more, and
    their gradients with them to their homes."""
    _add_sends(standing, messages, "cp", dtype, size, passes * (3 + whole_again + core_again))


def _add_sends(standing: Standing, messages: Messages, axis: Axis, dtype: str, size: int, rounds: int) -> None:
    """Parts of a tensor that go round, each past all ranks but the one that it comes from."""
    ranks = standing.run.layout.degree(axis)
    for operation in ("send", "receive"):
        messages.add(axis, operation, dtype, size // ranks, rounds * (ranks - 1))


def _add_dispatch(standing: Standing, messages: Messages, each: Dispatch, marks: int, passes: int) -> None:
    """Rows to their experts, each with its weight, and back; before them how many there are of each expert."""
    recipe, times = standing.run.recipe, 1 + bool(each.again & marks)
    layout, precise = standing.run.layout, precise_format(standing)
    rows, size = whole(each.tokens * each.copies), whole(each.forward_bytes)
    compute = FORMATS[whole(recipe.compute_bytes)]
    messages.add("ep", "all_to_all", compute, rows * size, passes * (times + 1))
    if each.name != "dispatch":
        return
    messages.add("ep", "all_to_all", precise, rows * SIZES[precise], passes * (times + 1))
    if recipe.capacity_factor is not None or recipe.balance_loss:
        _add_choices(standing, messages, each.num_experts, passes * times)
    messages.add("ep", "all_to_all", "int64", 8 * each.num_experts, passes * times)
    if layout.etp > 1:
        messages.add("etp", "all_gather", "int64", 8 * each.num_experts * layout.etp, passes * times)


def _add_choices(standing: Standing, messages: Messages, num_experts: int, count: int) -> None:
    """How often each run of positions chose each expert, told over the axes that share a sequence
    (`train/parallel/choices.py`)."""
    recipe, layout = standing.run.recipe, standing.run.layout
    # An early part and a late one, which don't follow one another where tp doesn't cut between them.
    runs = 2 if layout.cp > 1 and recipe.cp_method != "all_to_all" and layout.tp % 2 else 1
    size = runs * recipe.micro_batch * num_experts * 8
    for axis in ("tp", "cp"):
        size *= layout.degree(axis)
        messages.add(axis, "all_gather", "int64", size, count)


def _add_agreement(standing: Standing, messages: Messages, each: Agreement, marks: int, passes: int) -> None:
    """Largest values of inputs, gradients and weights; of weights once a step, or at each use."""
    axis, of_experts = "etp" if each.over_experts else each.axis, each.matmul.groups is not None
    asked = each.tensors(marks, standing.casts_again(each.matmul, marks))
    messages.add(axis, "all_reduce", "float32", NUMBER_BYTES, passes * sum(map(whole, asked)))
    count = whole(each.weight)
    if is_cast_by_use(standing.table, of_experts)[0]:
        count = passes * sum(map(whole, each.weights(standing.times_again(each.matmul, marks))))
    size = NUMBER_BYTES * (whole(each.matmul.groups) if of_experts else 1)
    messages.add(axis, "all_reduce", "float32", size, count)


def _add_history(standing: Standing, messages: Messages) -> None:
    """All largest values of a step, after it, with recipes that keep a history: three for each matmul."""
    low = standing.run.recipe.low_precision
    if low is None or not low.amax_history:
        return
    matmuls = sum(
        isinstance(each, Matmul) and each.in_low_precision
        for piece, _, _ in standing.pieces()
        for each in piece.operations
    )
    twins = ("twins",) if standing.num_stages < standing.run.layout.stages else ()
    for axis in (*STEP_AXES, *twins):
        messages.add(axis, "all_reduce", "float32", 3 * NUMBER_BYTES * matmuls, int(bool(matmuls)))


def _add_transfers(standing: Standing, messages: Messages) -> None:
    """An activation to the next stage and its gradient back, where that is another rank's."""
    table, recipe = standing.table, standing.run.recipe
    size = whole(table.residual_tokens * standing.run.model.d_model * recipe.compute_bytes)
    dtype, own = FORMATS[whole(recipe.compute_bytes)], standing.at.pp
    place_of = {
        (act.microbatch, standing.placement[rank][act.chunk]): rank
        for rank, row in enumerate(standing.rows)
        for act in row
        if act.kind == "F"
    }
    for act in standing.row:
        stage = standing.placement[own][act.chunk]
        if act.kind != "F":
            continue
        for other in (stage - 1, stage + 1):
            if 0 <= other < standing.num_stages and place_of[act.microbatch, other] != own:
                # One of the two carries an activation, the other its gradient.
                messages.add("pp", "send", dtype, size)
                messages.add("pp", "receive", dtype, size)


def _add_loads(standing: Standing, messages: Messages) -> None:
    """How often each expert was chosen, after the step, where that moves a bias."""
    model = standing.run.model
    layers = [model.layers[number] for chunk in standing.chunks for number in chunk.layers]
    layers += [model.layers[-1]] * (model.mtp_depth * sum(chunk.is_last for chunk in standing.chunks))
    experts = sum(
        layer.mlp.num_experts for layer in layers if isinstance(layer.mlp, MoeMlp) and layer.mlp.balance_bias
    )
    twins = ("twins",) if standing.num_stages < standing.run.layout.stages else ()
    if experts:
        for axis in ("tp", "cp", "dp", *twins):
            messages.add(axis, "all_reduce", "int64", 8 * experts)


def precise_format(standing: Standing) -> str:
    """Of statistics, losses and routing weights: fp32 at least."""
    return FORMATS[max(whole(standing.run.recipe.compute_bytes), 4)]
