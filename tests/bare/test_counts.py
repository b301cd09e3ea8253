"""Counts and how they are compared, the groups of a layout, and what is set aside: without PyTorch."""

from pathlib import Path

import pytest

from tests.bare.plans import cluster, dense_model, moe_model
from tests.bare.test_plan_predict import run
from trainwright.cli import files
from trainwright.plan.exact.counts import predicted_counts
from trainwright.spec.counts import Inequality, part_of, unequal
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.groups import divisions
from trainwright.spec.layout import Layout
from trainwright.train.dryrun.passes import require_passes
from trainwright.train.dryrun.set_aside import trainable_form

RUNS = Path(__file__).parents[2] / "runs"


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("layers.3.attention.query", "query"),
        ("later.0.layer.mlp.experts", "experts"),
        ("later.0.join", "mtp join"),
        ("layers.3", "residual"),
        ("", "head"),
        ("layers.3.attention_norm", "attention_norm"),
    ],
)
def test_modules_have_the_planners_names(module: str, part: str) -> None:
    assert part_of(module) == part


def test_what_differs_is_named() -> None:
    counts = predicted_counts(run(), 0)
    assert unequal(counts, counts) == []
    first, *others = counts.flops
    more = counts.changed(flops=(first.changed(flops=first.flops + 1), *others))
    cause = f"FLOPs of {first.part}, {first.kind}, {first.phase}"
    assert unequal(counts, more) == [Inequality(cause, first.flops, first.flops + 1)]


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, dp=4, ep=4), Layout(tp=2, cp=2, dp=2, etp=2), Layout(pp=4)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_rank_is_in_one_group_of_every_axis(layout: Layout, replicas: int) -> None:
    if layout.dp % replicas:
        return
    for axis, groups in divisions(layout, replicas).items():
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.world)), axis


def test_states_of_all_ranks_are_the_models() -> None:
    """Shards of zero 3 over dp, cut over tp and pp, with what tp copies."""
    layout = Layout(tp=2, pp=2, dp=2)
    model = dense_model(num_kv_heads=4)
    case = run(layout, model=model, zero=3)
    held = sum(predicted_counts(case, rank).states["parameters"] for rank in range(layout.world))
    copied = (model.num_layers * 2 + 1) * model.norm_params
    assert held == 4 * (model.params + copied)


def test_what_the_trainer_lacks_is_set_aside_and_told() -> None:
    case = files.read_run(RUNS / "deepseek-v3_h800x2048_4k.toml", None)
    trained, changes = trainable_form(case)
    assert {each.field for each in changes} == {
        "recipe.dispatch",
        "recipe.dispatch_fp8",
        "recipe.activations_fp8",
    }
    assert trained.recipe.precision == "fp8-block"
    assert trainable_form(trained)[1] == ()


def test_rounds_of_zero_2_are_not_cut() -> None:
    layout = Layout(pp=4, vpp=2, dp=2)
    case = run(layout, model=dense_model(num_layers=8), zero=2, schedule="interleaved_1f1b")
    require_passes(case, 4)
    with pytest.raises(InvalidSpec, match="--microbatches=3: must be a multiple of pp=4"):
        require_passes(case, 3)
    with pytest.raises(InvalidSpec, match="reduces in uneven rounds"):
        require_passes(run(layout, model=dense_model(num_layers=8), zero=2, schedule="zb_v"), 4)


def test_experts_travel_in_whole_rows() -> None:
    case = run(Layout(dp=2, ep=2), model=moe_model()).changed(cluster=cluster())
    axes = {(each.axis, each.operation, each.dtype) for each in predicted_counts(case, 0).collectives}
    assert {("ep", "all_to_all", "bfloat16"), ("ep", "all_to_all", "int64")} <= axes
