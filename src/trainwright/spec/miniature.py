"""A run small enough for one machine that goes through the same program: what `verify` and `trace` carry out.

Degrees are kept where the processes allow. Where they don't, the largest is divided by its smallest prime factor,
again and again, but none to below 2; where all are 2 and still too many, axes are left out, the outermost first.
dp counts as two axes where shards are replicated (HSDP). Experts take what is left of ep.

The model keeps what decides which code runs: kinds of attention, MLP and norm, grouped heads, windows, biases,
ties, the order of different layers, uneven and chosen stages. Widths, experts, vocabulary, lengths and the number
of layers shrink to the least that the degrees can cut. The recipe keeps all but its number formats, which become
float64, and its batch, of which a few microbatches are left.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.model import (
    Attention,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerGroup,
    LayerSpec,
    Mlp,
    ModelSpec,
    Rope,
)
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run
from trainwright.spec.schedule import SCHEDULES

RULE = (
    "the largest degree is divided by its smallest prime factor until the ranks fit, none to below 2; "
    "then axes are left out, the outermost first"
)
PROCESSES = 8
"""As many ranks as a miniature has by default."""
OUTERMOST_FIRST = ("dp_replicate", "dp_shard", "pp", "cp", "tp")

D_MODEL, D_HEAD, WIDTH, LATENT = 32, 8, 16, 16
"""Widths of a miniature: of the residual stream, of a head, of an MLP on each rank, of MLA's latents."""
VOCABULARY = 260
"""The least that the byte-level tokenizer of `DataSpec` has, and one for each of two ranks."""
SHORTEST = 16
"""Positions, where the degrees don't ask for more."""


class Change(NamedTuple):
    """A number of the run that the miniature has otherwise."""

    field: str
    before: object
    after: object


class Miniature(NamedTuple):
    """A small run, and what it has otherwise than the run that it stands for."""

    run: Run
    changes: tuple[Change, ...]


def miniature(run: Run, processes: int = PROCESSES) -> Miniature:
    """The run that stands for `run` on at most `processes` ranks, checked."""
    layout = _layout(run, processes)
    small = _with_layout(run, layout, _replicas(run, processes))
    return Miniature(small, tuple(_changes(run, small)))


def without(run: Run, axis: str) -> Run:
    """A miniature with one axis at degree 1, of the same model and global batch."""
    layout: dict[str, int] = {
        each: 1 if each == axis else getattr(run.layout, each) for each in ("tp", "cp", "pp", "dp")
    }
    vpp = 1 if axis == "pp" else run.layout.vpp
    chosen = () if axis == "pp" else run.layout.stage_layers
    plane = layout["tp"] * layout["cp"] * layout["dp"]
    replicas = 1 if axis == "dp" else run.recipe.dp_replicate
    etp, ep = _experts(run, plane, layout["tp"], replicas, keep=axis != "ep")
    recipe = run.recipe.changed(dp_replicate=replicas)
    if axis == "pp" and not _runs_alone(recipe.schedule):
        recipe = recipe.changed(schedule="1f1b")
    return run.changed(
        layout=Layout(**layout, vpp=vpp, ep=ep, etp=etp, order=run.layout.order, stage_layers=chosen),
        recipe=recipe,
    ).check()


def shrunk(degrees: dict[str, int], processes: int) -> dict[str, int]:
    """Degrees, given the outermost first, of at most `processes` ranks by the rule of the file's first
    paragraph."""
    degrees = dict(degrees)
    while math.prod(degrees.values()) > processes:
        largest = max(degrees.values())
        name = next(each for each, degree in degrees.items() if degree == largest)
        degrees[name] = max(2, largest // _smallest_factor(largest)) if largest > 2 else 1
    return degrees


def _smallest_factor(number: int) -> int:
    return next((each for each in range(2, math.isqrt(number) + 1) if number % each == 0), number)


def _degrees(run: Run, processes: int) -> dict[str, int]:
    layout, replicas = run.layout, run.recipe.dp_replicate
    wanted = {"dp_replicate": replicas, "dp_shard": layout.dp // replicas}
    wanted |= {axis: getattr(layout, axis) for axis in ("pp", "cp", "tp")}
    assert tuple(wanted) == OUTERMOST_FIRST
    degrees = shrunk(wanted, processes)
    # A schedule may ask for an even number of pipeline ranks.
    while degrees["pp"] > 2 and not any(_microbatches(run, degrees["pp"])):
        degrees["pp"] -= 1
    return degrees


def _replicas(run: Run, processes: int) -> int:
    return _degrees(run, processes)["dp_replicate"]


def _layout(run: Run, processes: int) -> Layout:
    degrees = _degrees(run, processes)
    tp, cp, pp = degrees["tp"], degrees["cp"], degrees["pp"]
    dp = degrees["dp_shard"] * degrees["dp_replicate"]
    etp, ep = _experts(run, tp * cp * dp, tp, degrees["dp_replicate"], keep=True)
    vpp = min(run.layout.vpp, 2) if pp > 1 else 1
    return Layout(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp, order=run.layout.order)


def _experts(run: Run, plane: int, tp: int, replicas: int, *, keep: bool) -> tuple[int, int]:
    """etp and ep of the ranks of a stage: ep is as large as it goes, but leaves every expert its replicas."""
    if not run.model.is_moe:
        return 1, 1
    etp = tp if run.layout.etp == run.layout.tp else min(run.layout.etp, tp)
    while plane % (etp * replicas):
        etp -= 1
    fitting = [
        ep
        for ep in range(1, min(run.layout.ep, plane // etp) + 1)
        if plane % (ep * etp) == 0 and (plane // (ep * etp)) % replicas == 0
    ]
    replicated = [ep for ep in fitting if plane // (ep * etp) > 1 and (ep > 1 or run.layout.ep == 1)]
    if not keep:
        return etp, 1
    return etp, max(replicated if run.layout.expert_dp > 1 and replicated else fitting)


def _microbatches(run: Run, pp: int) -> Iterator[int]:
    """Numbers of microbatches that the run's schedule can do on so many ranks, the preferred one first."""
    vpp = min(run.layout.vpp, 2) if pp > 1 else 1
    for number in (min(run.num_microbatches, max(2, 2 * pp)), 2 * pp, pp, 4 * pp):
        try:
            SCHEDULES[_schedule(run, pp)].check(pp, vpp, number)
        except InvalidSpec:
            continue
        yield number


def _schedule(run: Run, pp: int) -> str:
    return "1f1b" if pp == 1 and not _runs_alone(run.recipe.schedule) else run.recipe.schedule


def _runs_alone(schedule: str) -> bool:
    """Whether a schedule runs on one rank of one chunk."""
    try:
        SCHEDULES[schedule].check(1, 1, 2)
    except InvalidSpec:
        return False
    return True


def _with_layout(run: Run, layout: Layout, replicas: int) -> Run:
    seq_len = _seq_len(run.recipe, layout)
    stages = SCHEDULES[_schedule(run, layout.pp)].num_stages(layout.pp, layout.vpp)
    model, chosen = _model(run, layout, stages, seq_len)
    micro_batch = min(run.recipe.micro_batch, 2)
    num_microbatches = next(_microbatches(run, layout.pp))
    layers = run.recipe.recompute_layers
    recipe = run.recipe.changed(
        seq_len=seq_len,
        micro_batch=micro_batch,
        global_batch=micro_batch * layout.dp * num_microbatches,
        precision="fp64",
        gradient_format="fp32",  # fp64 runs keep fp64
        emulate_precision=False,
        gather_fp8=False,
        dispatch_fp8=False,
        activations_fp8=False,
        optimizer=run.recipe.optimizer.changed(moments="fp32"),
        dp_replicate=replicas,
        schedule=_schedule(run, layout.pp),
        recompute_layers=None if layers is None else min(layers, 1),
        loss_chunks=min(run.recipe.loss_chunks, 2),
    )
    data = DataSpec(vocab_size=VOCABULARY - 2, document_mask=run.data.document_mask)
    layout = layout.changed(stage_layers=chosen)
    return run.changed(layout=layout, recipe=recipe, model=model, data=data, budget=None).check()


def _seq_len(recipe: Recipe, layout: Layout) -> int:
    """Context parallelism cuts sequences into two parts a rank."""
    part = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
    return part * -(-SHORTEST // part)


def _model(run: Run, layout: Layout, stages: int, seq_len: int) -> tuple[ModelSpec, tuple[int, ...]]:
    """The small model, and the layers of each stage where the run chooses them."""
    spec = run.model
    groups = [
        (group.repeat, [_layer(layer, layout, run.recipe, seq_len) for layer in dict.fromkeys(group.pattern)])
        for group in spec.layer_groups
    ]
    chosen = _chosen(run.layout.stage_layers, stages, sum(len(pattern) for _, pattern in groups))
    wanted = sum(chosen) or _layers(spec.num_layers, run.layout.stages, stages)
    repeats = [1] * len(groups)
    while sum(each * len(pattern) for each, (_, pattern) in zip(repeats, groups, strict=True)) < wanted:
        repeats[-1] += 1
    num_layers = sum(each * len(pattern) for each, (_, pattern) in zip(repeats, groups, strict=True))
    if chosen:
        chosen = _chosen(run.layout.stage_layers, stages, num_layers)
    uneven = spec.vocab_size % layout.tp != 0
    vocab_size = VOCABULARY + 1 if uneven else layout.tp * -(-VOCABULARY // layout.tp)
    small = spec.changed(
        d_model=min(spec.d_model, D_MODEL),
        vocab_size=vocab_size,
        layer_groups=tuple(
            LayerGroup(repeat=repeat, pattern=tuple(pattern))
            for repeat, (_, pattern) in zip(repeats, groups, strict=True)
        ),
        rope=_rope(spec.rope, seq_len),
        learned_positions=min(spec.learned_positions, 2 * seq_len),
        max_positions=max(spec.max_positions, seq_len),
        mtp_depth=min(spec.mtp_depth, 1),
    )
    return small, chosen


def _layers(num_layers: int, of_stages: int, stages: int) -> int:
    """A layer for each stage and two at the least; where the run's stages are uneven, so are these."""
    if num_layers % of_stages == 0 or stages == 1:
        return max(stages, min(2, num_layers))
    return 2 * stages - 2 if stages > 2 else 3


def _chosen(sizes: tuple[int, ...], stages: int, num_layers: int) -> tuple[int, ...]:
    """Stages of which the ends are empty where the run's are, and that hold `num_layers` at least."""
    if not sizes or stages == 1:
        return ()
    found = [1] * stages
    found[0], found[-1] = min(sizes[0], 1), min(sizes[-1], 1)
    fullest = found.index(1) if 1 in found else 0
    found[fullest] += max(0, num_layers - sum(found))
    return tuple(found)


def _layer(layer: LayerSpec, layout: Layout, recipe: Recipe, seq_len: int) -> LayerSpec:
    return LayerSpec(attention=_attention(layer.attention, layout, recipe, seq_len), mlp=_mlp(layer.mlp, layout))


def _attention(attention: Attention, layout: Layout, recipe: Recipe, seq_len: int) -> Attention:
    window = attention.sliding_window
    if window is not None:
        window = seq_len if window >= recipe.seq_len else max(1, seq_len // 3)
    cut = layout.tp * (layout.cp if recipe.cp_method == "all_to_all" else 1)
    if isinstance(attention, LatentAttention):
        return attention.changed(
            num_heads=2 * cut,
            q_lora_rank=None if attention.q_lora_rank is None else LATENT,
            kv_lora_rank=LATENT,
            d_nope=D_HEAD,
            d_rope=D_HEAD // 2,
            d_value=D_HEAD,
            sliding_window=window,
        )
    return _grouped(attention, layout, cut).changed(d_head=min(attention.d_head, D_HEAD), sliding_window=window)


def _grouped(attention: GroupedQueryAttention, layout: Layout, cut: int) -> GroupedQueryAttention:
    """Multi-head, multi-query and grouped heads stay what they are, and key heads that are fewer than ranks too
    where tp allows."""
    shared = attention.num_heads // attention.num_kv_heads
    if attention.num_kv_heads == 1:
        kv_heads = 1
    elif attention.num_kv_heads >= layout.tp:
        kv_heads = max(2, layout.tp)
    else:
        kv_heads = max(1, layout.tp // 2)
    heads = math.lcm(cut, kv_heads * min(shared, 2))
    return attention.changed(num_heads=heads, num_kv_heads=heads if shared == 1 else kv_heads)


def _mlp(mlp: Mlp, layout: Layout) -> Mlp:
    if isinstance(mlp, DenseMlp):
        return mlp.changed(d_ff=WIDTH * layout.tp)
    groups = min(mlp.num_groups, 2)
    top_k = min(mlp.top_k, 2)
    return mlp.changed(
        num_experts=math.lcm(layout.ep, groups, 2) * 2,
        top_k=top_k,
        d_ff=WIDTH * layout.etp,
        d_ff_shared=WIDTH * layout.tp if mlp.d_ff_shared else 0,
        num_groups=groups,
        top_groups=min(mlp.top_groups, groups - 1 or 1) if mlp.top_groups < mlp.num_groups else groups,
    )


def _rope(rope: Rope | None, seq_len: int) -> Rope | None:
    if rope is None or rope.scaling is None:
        return rope
    shorter = min(rope.scaling.original_max_positions, max(1, seq_len // 2))
    return rope.changed(scaling=rope.scaling.changed(original_max_positions=shorter))


def _changes(run: Run, small: Run) -> Iterator[Change]:
    for before, after in zip(_told(run), _told(small), strict=True):
        if before[1] != after[1]:
            yield Change(before[0], before[1], after[1])


def _told(run: Run) -> Iterator[tuple[str, object]]:
    """What a reader is told of a run's size."""
    for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp"):
        yield f"layout.{axis}", getattr(run.layout, axis)
    yield "layout.stage_layers", list(run.layout.stage_layers)
    sizes = ("dp_replicate", "schedule", "seq_len", "global_batch", "micro_batch")
    formats = ("precision", "emulate_precision", "gather_fp8", "dispatch_fp8", "activations_fp8")
    for field in (*sizes, *formats):
        yield f"recipe.{field}", getattr(run.recipe, field)
    yield "recipe.optimizer.moments", run.recipe.optimizer.moments
    yield "microbatches", run.num_microbatches
    yield "layers", run.model.num_layers
    for field in ("d_model", "vocab_size"):
        yield f"model.{field}", getattr(run.model, field)
    layer = run.model.layers[-1]
    yield "heads", layer.attention.num_heads
    yield "d_ff", layer.mlp.d_ff
    yield "experts", 0 if isinstance(layer.mlp, DenseMlp) else layer.mlp.num_experts
