"""A run scaled to one machine keeps what decides which code runs, and is legal whatever it is scaled from."""

from pathlib import Path

import pytest

from tests.bare.plans import cluster, dense_model
from trainwright.cli.catalogue import load_model, model_names
from trainwright.cli.files import read_run
from trainwright.spec.layout import Layout
from trainwright.spec.miniature import miniature, shrunk, without
from trainwright.spec.model import GroupedQueryAttention, LayerGroup, MoeMlp
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run
from trainwright.spec.schedule import SCHEDULES

RUNS = sorted((Path(__file__).parents[2] / "runs").glob("*.toml"))


@pytest.mark.parametrize(
    ("degrees", "processes", "found"),
    [
        ((4, 2), 8, (4, 2)),
        ((64, 8), 8, (2, 4)),  # of equals the outer one first: 8 x 8, 4 x 8, 4 x 4, 2 x 4
        ((128, 16, 8), 8, (2, 2, 2)),
        ((9, 5), 8, (3, 2)),
        ((3, 3), 4, (2, 2)),
        ((2, 2, 2, 2), 8, (1, 2, 2, 2)),  # the outermost is left out
        ((2, 2, 2), 2, (1, 1, 2)),
        ((7,), 1, (1,)),
    ],
)
def test_degrees_shrink_by_the_rule(degrees: tuple[int, ...], processes: int, found: tuple[int, ...]) -> None:
    named = {str(at): degree for at, degree in enumerate(degrees)}
    assert tuple(shrunk(named, processes).values()) == found


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8, 16])
def test_every_run_that_is_shipped_has_a_legal_miniature(path: Path, processes: int) -> None:
    run = read_run(path)
    small = miniature(run, processes)
    layout = small.run.layout
    assert layout.world <= processes
    assert small.run.recipe.precision == "fp64"
    assert small.run.recipe.zero == run.recipe.zero
    assert small.run.recipe.recompute == run.recipe.recompute
    assert small.run.model.params < 1_000_000
    assert {change.field for change in small.changes} >= {"model.d_model", "recipe.precision"}
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        if getattr(layout, axis) > 1:
            assert getattr(run.layout, axis) > 1
            other = without(small.run, axis)
            assert getattr(other.layout, axis) == 1
            assert other.model == small.run.model
            assert other.recipe.global_batch == small.run.recipe.global_batch


def run_of(layout: Layout, num_layers: int = 4, **recipe: object) -> Run:
    return Run(
        layout=layout,
        recipe=Recipe.parse({"seq_len": 64, "global_batch": 64, "precision": "fp32", **recipe}),
        model=dense_model(num_layers=num_layers),
        data=DataSpec(vocab_size=512),
        cluster=cluster(devices=64),
    ).check()


@pytest.mark.parametrize("name", model_names())
def test_every_model_keeps_its_kinds_of_layers(name: str) -> None:
    model = load_model(name)
    layers = [layer for layer in model.layers if isinstance(layer.attention, GroupedQueryAttention)]
    tp = 2 if all(layer.attention.num_heads % 2 == 0 for layer in layers) else 1
    ep = 2 if model.is_moe else 1
    base = run_of(Layout(tp=tp, dp=2))
    run = base.changed(model=model, layout=Layout(tp=tp, dp=2, ep=ep), data=DataSpec()).check()
    small = miniature(run).run.model
    assert small.is_moe == model.is_moe
    assert (small.norm, small.tied_embeddings, small.mtp_depth) == (
        model.norm,
        model.tied_embeddings,
        model.mtp_depth,
    )
    kinds = [
        (layer.attention.kind, layer.mlp.kind, layer.attention.sliding_window is None) for layer in model.layers
    ]
    small_kinds = [
        (layer.attention.kind, layer.mlp.kind, layer.attention.sliding_window is None) for layer in small.layers
    ]
    assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(small_kinds))
    for layer, tiny in zip(model.layers[-1:], small.layers[-1:], strict=True):
        if isinstance(layer.mlp, MoeMlp) and isinstance(tiny.mlp, MoeMlp):
            assert (layer.mlp.num_groups > 1) == (tiny.mlp.num_groups > 1)
            assert (layer.mlp.d_ff_shared > 0) == (tiny.mlp.d_ff_shared > 0)
            assert tiny.mlp.top_k < tiny.mlp.num_experts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("processes", "pp"), [(2, 2), (4, 2), (8, 4)])
def test_every_schedule_survives(schedule: str, processes: int, pp: int) -> None:
    vpp = 1 if schedule in ("1f1b", "gpipe", "zb_h1") else 2
    small = miniature(run_of(Layout(pp=4, vpp=vpp, dp=2), num_layers=8, schedule=schedule), processes).run
    assert (small.recipe.schedule, small.layout.pp, small.layout.vpp) == (schedule, pp, vpp)
    assert without(small, "pp").layout.pp == 1


def test_chosen_and_uneven_stages_stay_so() -> None:
    run = run_of(Layout(pp=4, dp=2, stage_layers=(0, 2, 1, 1)))
    small = miniature(run).run
    assert small.layout.stage_layers[0] == 0
    assert min(small.layout.stage_layers[1:]) >= 1
    assert sum(small.layout.stage_layers) == small.model.num_layers
    alone = miniature(run, 1).run
    assert alone.layout.stage_layers == ()


def test_replicas_and_shards_are_two_axes() -> None:
    small = miniature(run_of(Layout(dp=64), zero=3, dp_replicate=8), 4).run
    assert (small.layout.dp, small.recipe.dp_replicate) == (4, 2)


def test_width_of_experts_leaves_every_expert_its_replicas() -> None:
    """6 ranks of tp become 3, which 2 of etp don't divide; and 3 x 2 ranks of 2 each can't be 2 replicas."""
    wide = MoeMlp(num_experts=4, top_k=2, d_ff=96)
    model = dense_model(num_layers=4)
    layers = [
        layer.changed(mlp=wide, attention=layer.attention.changed(num_heads=6, num_kv_heads=6))
        for layer in model.layers
    ]
    groups = tuple(LayerGroup(repeat=1, pattern=(layer,)) for layer in layers)
    run = run_of(Layout(tp=2, dp=2)).changed(
        layout=Layout(tp=6, etp=2, dp=2),
        model=model.changed(layer_groups=groups),
        recipe=Recipe.parse({"seq_len": 96, "global_batch": 64, "precision": "fp32", "dp_replicate": 2}),
    )
    small = miniature(run.check()).run
    assert (small.layout.tp, small.layout.dp, small.layout.etp, small.recipe.dp_replicate) == (3, 2, 1, 2)


def test_formats_that_are_set_aside_are_told() -> None:
    run = run_of(Layout(dp=4), zero=3, precision="fp8-block", emulate_precision=True, gather_fp8=True)
    told = {each.field: each.after for each in miniature(run).changes}
    assert told["recipe.precision"] == "fp64"
    assert told["recipe.emulate_precision"] is False
    assert told["recipe.gather_fp8"] is False


def test_documents_are_masked_where_the_run_masks_them() -> None:
    run = run_of(Layout(cp=2, dp=2), cp_method="ring")
    masked = run.changed(data=run.data.changed(document_mask=True))
    assert [miniature(each).run.data.document_mask for each in (run, masked)] == [False, True]
