"""Every field of a run that says how it is trained is one that the trainer obeys or that its door refuses.

All fields of the nouns below are flipped to other legal values, one at a time. What the door lets through has to
be listed here as obeyed, and the trainer's program has to read it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import trainwright.train.door
from tests.bare.plans import cluster, dense_model, moe_model
from trainwright.cli.draft import draft
from trainwright.plan.recompute_budget import resolved
from trainwright.spec.base import Noun
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.model import (
    DenseMlp,
    GroupedQueryAttention,
    LayerGroup,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    Rope,
    RopeScaling,
)
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.recipe import Optimizer, Overlap, Recipe
from trainwright.spec.run import OF_EXPERTS, DataSpec, Run
from trainwright.train.door import require_trainable

# With both ends of every choice in reach: shards, a pipeline, a window, rotary scaling.
RUN = Run(
    layout=Layout(tp=2, pp=2, dp=2),
    recipe=Recipe(seq_len=64, global_batch=16, precision="fp32"),
    model=dense_model().changed(
        rope=Rope(scaling=RopeScaling(kind="llama3", factor=8.0, original_max_positions=32))
    ),
    data=DataSpec(vocab_size=512),
    cluster=cluster(devices=64),
)

EXPERTS = {
    "d_ff_shared": 32,
    "shared_gate": True,
    "balance_bias": True,
    "num_groups": 4,
    "top_groups": 2,
    "gated": True,
}
MOE_RUN = RUN.changed(model=moe_model(num_dense=0, latent=False)).changed(layout=Layout(tp=2, dp=4, ep=2))
"""The same with experts, whose fields the other's have no meaning for."""

PLACES: dict[str, type[Noun]] = {
    "layout": Layout,
    "recipe": Recipe,
    "recipe.optimizer": Optimizer,
    "recipe.overlap": Overlap,
    "model": ModelSpec,
    "model.rope": Rope,
    "model.rope.scaling": RopeScaling,
    "attention": GroupedQueryAttention,
    "mlp": DenseMlp,
    "experts": MoeMlp,
}
"""Where the nouns stand; the last three in each layer, experts in another model's."""

OTHERS: dict[str, tuple[Any, ...]] = {
    "layout.tp": (1, 4),
    "layout.cp": (2,),
    "layout.pp": (4,),
    "layout.vpp": (2,),
    "layout.ep": (1, 4),
    "layout.etp": (2,),
    "layout.dp": (1, 4),
    "layout.stage_layers": ((1, 3), (4, 0)),
    "recipe.seq_len": (32,),
    "recipe.global_batch": (8,),
    "recipe.micro_batch": (2,),
    "recipe.recompute_ops": (("norm",), ("attention", "mlp"), ("norm", "activation")),
    "recipe.recompute_layers": (1,),
    "recipe.recompute_budget_bytes": (10**9,),
    "recipe.dp_replicate": (2,),
    "recipe.dropout": (0.1,),
    "recipe.loss_chunks": (2,),
    "recipe.z_loss": (1e-4,),
    "recipe.capacity_factor": (1.0, 1.5),
    "recipe.expert_imbalance": (1.5,),
    "recipe.mtp_loss_weight": (0.1,),
    "recipe.grad_clip": (0.0,),
    "recipe.seed": (1,),
    "recipe.amax_history_steps": (16,),
    "recipe.precision_report_steps": (1,),
    "recipe.optimizer.lr": (1e-3,),
    "recipe.optimizer.beta1": (0.8,),
    "recipe.optimizer.beta2": (0.99,),
    "recipe.optimizer.epsilon": (1e-6,),
    "recipe.optimizer.weight_decay": (0.0,),
    "recipe.optimizer.warmup_steps": (0,),
    "recipe.optimizer.min_lr_fraction": (0.0,),
    "recipe.optimizer.decay_fraction": (0.5,),
    "model.d_model": (32,),
    "model.vocab_size": (1024,),
    "model.norm_epsilon": (1e-6,),
    "model.rope": (None,),
    "model.learned_positions": (64,),
    "model.max_positions": (64,),
    "model.logit_softcap": (30.0,),
    "model.mtp_depth": (1,),
    "model.rope.theta": (5e5,),
    "model.rope.local_theta": (1e4,),
    "model.rope.fraction": (0.5,),
    "model.rope.scaling": (None,),
    "model.rope.scaling.factor": (4.0,),
    "model.rope.scaling.original_max_positions": (16,),
    "model.rope.scaling.low_frequency_factor": (2.0,),
    "model.rope.scaling.high_frequency_factor": (8.0,),
    "model.rope.scaling.beta_fast": (16.0,),
    "model.rope.scaling.beta_slow": (2.0,),
    "model.rope.scaling.mscale": (0.5,),
    "model.rope.scaling.mscale_all_dim": (0.5,),
    "attention.num_heads": (8,),
    "attention.num_kv_heads": (4,),
    "attention.d_head": (32,),
    "attention.sliding_window": (8,),
    "attention.logit_softcap": (50.0,),
    "attention.query_scale": (0.5,),
    "mlp.d_ff": (64,),
    "recipe.balance_loss": (0.01,),
    "recipe.balance_rate": (0.01,),
    "experts.num_experts": (16,),
    "experts.top_k": (1,),
    "experts.d_ff": (64,),
    "experts.d_ff_shared": (64,),
    "experts.routed_scale": (2.5,),
    "experts.num_groups": (2,),
    "experts.top_groups": (1,),
}
"""Of fields that are no switches and no lists of words, whose other values are known."""

SAYS_NOTHING = {
    "model.name": "a name",
    "model.source": "a note",
    "recipe.expert_imbalance": "what the planner expects of the router, which does as it does",
}
"""Fields that change no program, and why."""

PARTS = {"recipe.optimizer", "recipe.overlap", "model.layer_groups", "attention.kind", "mlp.kind", "experts.kind"}
"""Flipped field by field, or with another noun in their place (`train` refuses all but those above)."""

COMPANIONS: dict[tuple[str, Any], dict[str, Any]] = {
    ("layout.vpp", 2): {"recipe.schedule": "interleaved_1f1b"},
    ("recipe.schedule", "interleaved_1f1b"): {"layout.vpp": 2},
    ("recipe.schedule", "breadth_first"): {"layout.vpp": 2},
    ("recipe.schedule", "zb_v"): {"layout.vpp": 2},
    ("recipe.schedule", "dualpipe"): {"layout.vpp": 2},
    ("recipe.schedule", "dualpipe_v"): {"layout.vpp": 2},
    ("recipe.dropout", 0.1): {"recipe.attention_kernel": "unfused"},
    ("recipe.gradient_format", "bf16"): {"recipe.precision": "bf16", "recipe.zero": 0},
    ("recipe.recompute_layers", 1): {"recipe.recompute": "full"},
    ("recipe.recompute_budget_bytes", 10**9): {"recipe.recompute": "budget"},
    **{
        ("recipe.recompute_ops", operations): {"recipe.recompute": "selective"}
        for operations in (("norm",), ("attention", "mlp"), ("norm", "activation"))
    },
    ("recipe.reshard_after_forward", False): {"recipe.zero": 3},
    ("recipe.emulate_precision", True): {"recipe.precision": "fp8-block"},
    ("recipe.precision_fallback", True): {"recipe.precision": "fp8-block"},
    ("recipe.amax_history_steps", 16): {"recipe.precision": "fp8-delayed"},
    ("recipe.precision_report_steps", 1): {"recipe.precision": "fp8-block"},
    **{("recipe.precision", each): {"recipe.emulate_precision": True} for each in ("mxfp8", "nvfp4")},
    ("recipe.gather_fp8", True): {"recipe.precision": "fp8-block"},
    ("recipe.dispatch_fp8", True): {"recipe.precision": "fp8-block"},
    ("recipe.activations_fp8", True): {"recipe.precision": "fp8-block"},
    ("recipe.overlap.dp", False): {"recipe.zero": 0},
    ("recipe.mtp_loss_weight", 0.1): {"model.mtp_depth": 1},
    **{
        (f"model.rope.scaling.{field}", value): {"model.rope.scaling.kind": "yarn"}
        for field, value in (
            ("beta_fast", 16.0),
            ("beta_slow", 2.0),
            ("mscale", 0.5),
            ("mscale_all_dim", 0.5),
            ("truncate", False),
        )
    },
}
"""What else a value needs."""

OBEYED: dict[str, tuple[Any, ...] | None] = {
    "layout.tp": None,
    "layout.cp": None,
    "layout.pp": None,
    "layout.vpp": None,
    "layout.dp": None,
    "layout.ep": None,
    "layout.etp": None,
    "layout.order": None,
    "layout.stage_layers": None,
    "recipe.seq_len": None,
    "recipe.global_batch": None,
    "recipe.micro_batch": None,
    "recipe.precision": ("fp32", "bf16", "fp64", *LOW_PRECISION),
    "recipe.emulate_precision": None,
    "recipe.amax_history_steps": None,
    "recipe.precision_report_steps": None,
    "recipe.precision_fallback": None,
    "recipe.gather_fp8": None,
    "recipe.recompute": ("none", "selective", "full"),
    "recipe.recompute_ops": None,
    "recipe.recompute_layers": None,
    "recipe.compile": None,
    "recipe.zero": None,
    "recipe.reshard_after_forward": None,
    "recipe.dp_replicate": None,
    "recipe.sequence_parallel": None,
    "recipe.cp_method": None,
    "recipe.schedule": None,
    "recipe.gradient_format": None,
    "recipe.attention_kernel": ("flash", "unfused"),
    "recipe.dropout": None,
    "recipe.loss_kernel": None,
    "recipe.loss_chunks": None,
    "recipe.z_loss": None,
    "recipe.mtp_loss_weight": None,
    "recipe.grad_clip": None,
    "recipe.seed": None,
    **{
        f"recipe.optimizer.{field}": None
        for field in (
            "lr",
            "beta1",
            "beta2",
            "epsilon",
            "weight_decay",
            "name",
            "moments",
            "warmup_steps",
            "schedule",
            "min_lr_fraction",
            "decay_fraction",
        )
    },
    "recipe.overlap.dp": None,
    "recipe.overlap.pp": None,
    "recipe.overlap.tp": None,
    "recipe.overlap.ep": None,
    "model.d_model": None,
    "model.vocab_size": None,
    "model.tied_embeddings": None,
    "model.head_bias": None,
    "model.norm": None,
    "model.norm_epsilon": None,
    "model.norm_placement": None,
    "model.zero_centered_norm": None,
    "model.parallel_residual": None,
    "model.scaled_embedding": None,
    "model.logit_softcap": None,
    "model.mtp_depth": None,
    "model.rope": None,
    "model.learned_positions": None,
    "model.max_positions": None,
    "model.rope.theta": None,
    "model.rope.local_theta": None,
    "model.rope.fraction": None,
    "model.rope.scaling": None,
    **{f"model.rope.scaling.{field}": None for field in RopeScaling.model_fields},
    "attention.num_heads": None,
    "attention.num_kv_heads": None,
    "attention.d_head": None,
    "attention.sliding_window": None,
    "attention.qkv_bias": None,
    "attention.out_bias": None,
    "attention.qk_norm": None,
    "attention.sinks": None,
    "attention.logit_softcap": None,
    "attention.query_scale": None,
    "mlp.d_ff": None,
    "mlp.gated": None,
    "mlp.activation": None,
    "mlp.bias": None,
    "recipe.capacity_factor": None,
    "recipe.balance_loss": None,
    "recipe.balance_rate": None,
    "recipe.expert_matmuls": None,
    **{f"experts.{field}": None for field in MoeMlp.model_fields if field != "kind"},
}
"""What the trainer does as it is told: any value, or these."""

RESOLVED = (("recipe.recompute", "budget"), ("recipe.recompute_budget_bytes", 10**9))
"""What the planner turns into other fields before a run is trained."""

CHECKED_ALONE = {"model.max_positions"}
"""Obeyed by `Run.check`, which bounds other fields by it."""


def with_choice(run: Run, path: str, value: object) -> Run:
    """`run` with the field at `path`; in every layer, where it is a layer's."""
    place, _, field = path.rpartition(".")
    if place not in ("attention", "mlp", "experts"):
        return run.with_value(path, value)
    layer, place = run.model.layers[0], place.replace("experts", "mlp")
    layer = layer.changed(**{place: getattr(layer, place).changed(**{field: value})})
    group = LayerGroup(repeat=run.model.num_layers, pattern=(LayerSpec.parse(layer.model_dump()),))
    return run.changed(model=run.model.changed(layer_groups=(group,)))


def base_of(path: str) -> Run:
    """The run in which a field means something."""
    place, _, field = path.rpartition(".")
    of_experts = place == "experts" or path in ("layout.ep", "layout.etp", "recipe.overlap.ep")
    if not of_experts and not (place == "recipe" and field in OF_EXPERTS):
        return RUN
    experts = MOE_RUN.model.layers[0].mlp.changed(**EXPERTS)
    layer = LayerSpec(attention=MOE_RUN.model.layers[0].attention, mlp=experts)
    group = LayerGroup(repeat=MOE_RUN.model.num_layers, pattern=(layer,))
    return MOE_RUN.changed(model=MOE_RUN.model.changed(layer_groups=(group,)))


def value_at(run: Run, path: str) -> object:
    at: Any = run.model.layers[0] if path.startswith(("attention.", "mlp.", "experts.")) else run
    for part in path.replace("experts.", "mlp.").split("."):
        at = getattr(at, part)
    return at


def fields() -> Iterator[str]:
    for place, noun in PLACES.items():
        yield from (f"{place}.{name}" for name in noun.model_fields)


def other_values(path: str) -> tuple[Any, ...]:
    """Legal values of a field that aren't the run's own."""
    place, _, name = path.rpartition(".")
    if path in OTHERS:
        return OTHERS[path]
    annotation = PLACES[place].model_fields[name].annotation
    words = (False, True) if annotation is bool else ()
    if get_origin(annotation) is Literal:
        words = get_args(annotation)
    return tuple(word for word in words if word != value_at(base_of(path), path))


def flips() -> list[tuple[str, Any]]:
    return [(path, value) for path in fields() for value in other_values(path)]


def flipped(path: str, value: object) -> Run:
    companions = COMPANIONS.get((path, value))
    if companions is None:
        return with_choice(base_of(path), path, value)
    return base_of(path).with_values([*companions.items(), (path, value)])


def test_the_runs_are_trainable_themselves() -> None:
    require_trainable(RUN.check())
    require_trainable(base_of("layout.ep").check())


def test_a_dispatch_has_to_have_shared_experts_to_hide_behind() -> None:
    run = base_of("recipe.overlap.ep").with_value("recipe.overlap.ep", value=True)
    require_trainable(run.check())
    alone = with_choice(with_choice(run, "experts.shared_gate", value=False), "experts.d_ff_shared", 0)
    with pytest.raises(InvalidSpec, match=r"recipe.overlap.ep=True: .*shared experts.* set it to false"):
        require_trainable(alone.check())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"recipe.sequence_parallel": False}, "set recipe.sequence_parallel=true, or this to false"),
        ({"recipe.compile": True}, "not trained yet with recipe.compile=true, .*; set it to false"),
        ({"recipe.precision": "fp8-block"}, "not trained yet with recipe.precision=fp8-block, .* set it to false"),
    ],
)
def test_tp_goes_beside_plain_matmuls_of_cut_sequences(values: dict[str, Any], said: str) -> None:
    run = RUN.with_value("recipe.overlap.tp", value=True)
    require_trainable(run.check())
    require_trainable(run.with_values([*values.items(), ("layout.tp", 1)]).check())
    with pytest.raises(InvalidSpec, match=f"recipe.overlap.tp=True: .*{said}"):
        require_trainable(run.with_values([*values.items()]).check())


def test_a_draft_with_dropout_has_the_kernel_that_drops() -> None:
    def drafted(*assignments: str) -> Recipe:
        options = {"seq_len": 64, "global_batch": 16, "precision": "fp32", "tokens": None}
        return draft(dense_model(), cluster(), **options, assignments=[*assignments]).recipe

    recipe = drafted("recipe.dropout=0.1")
    require_trainable(RUN.changed(recipe=recipe, layout=Layout(cp=2)).check())
    said = drafted("recipe.dropout=0.1", "recipe.attention_kernel=flash")
    assert (said.attention_kernel, said.cp_method) == ("flash", "all_gather")


def test_up_projections_are_not_made_again_where_cp_exchanges_heads() -> None:
    run = RUN.changed(model=moe_model()).with_values(
        [("layout.cp", 2), ("recipe.recompute", "selective"), ("recipe.recompute_ops", ("latent_up",))]
    )
    require_trainable(run.check())
    with pytest.raises(InvalidSpec, match=r"recipe\.cp_method='all_to_all': gives up nothing"):
        require_trainable(run.with_value("recipe.cp_method", "all_to_all").check())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recipe.zero": 0}, "is of parameters that are sharded, and with zero=0 over 2 rank"),
        ({"recipe.dp_replicate": 2}, "is of parameters that are sharded, and with zero=1 over 1 rank"),
        ({"recipe.precision": "nvfp4", "recipe.emulate_precision": True}, ".*two of whose values share a byte"),
        ({"recipe.precision_fallback": True}, "leaves no weights in bf16 for layers that fall back"),
    ],
)
def test_codes_are_gathered_where_there_is_something_to_gather(fields: dict[str, Any], said: str) -> None:
    fp8 = {"recipe.precision": "fp8-block", "recipe.gather_fp8": True, "recipe.zero": 1}
    run = RUN.with_values(fp8.items())
    require_trainable(run.check())
    with pytest.raises(InvalidSpec, match=rf"recipe\.gather_fp8=True: {said}.*set .*false$"):
        require_trainable(run.with_values(fields.items()).check())


@pytest.mark.parametrize("precision", ["fp8-rowwise", "mxfp8"])
def test_weights_that_are_cast_twice_are_not_gathered_cast(precision: str) -> None:
    with pytest.raises(
        InvalidSpec, match=rf"gather_fp8=True: needs weights that are cast once.* {precision} casts"
    ):
        RUN.with_values([("recipe.precision", precision), ("recipe.gather_fp8", True)])


def test_every_field_is_flipped() -> None:
    untouched = [path for path in fields() if not other_values(path) and path not in PARTS | set(SAYS_NOTHING)]
    assert not untouched, "no other value is known of these; give one in OTHERS"
    assert set(OBEYED) <= set(fields()), "fields that no longer exist"


@pytest.mark.parametrize(("path", "value"), RESOLVED)
def test_what_the_planner_resolves_is_refused_until_it_has(path: str, value: object) -> None:
    run = flipped(path, value).check()
    with pytest.raises(InvalidSpec, match=r"recipe\.recompute='budget': is resolved by the planner first"):
        require_trainable(run)
    require_trainable(resolved(run).run)


@pytest.mark.parametrize(("path", "value"), [each for each in flips() if each not in RESOLVED], ids=str)
def test_a_flipped_field_is_obeyed_or_refused(path: str, value: object) -> None:
    run, obeyed = flipped(path, value), OBEYED.get(path, ())
    assert value_at(run, path) == value
    if path in SAYS_NOTHING:
        require_trainable(run)
    elif obeyed is None or value in obeyed:
        require_trainable(run.check())
    else:
        with pytest.raises(InvalidSpec) as refused:
            require_trainable(run)
        message = str(refused.value)
        assert f"{path.replace('experts.', 'mlp.')}=" in message
        assert "trained yet" in message
        assert "\n" not in message


def test_what_is_obeyed_is_read_by_the_trainer() -> None:
    folder = Path(trainwright.train.door.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name != "door.py"]
    read = {
        node.attr for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    }
    unread = [path for path in OBEYED if path.rpartition(".")[2] not in read and path not in CHECKED_ALONE]
    assert not unread, "obeyed in name only"
