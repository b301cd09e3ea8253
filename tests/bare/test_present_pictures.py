"""Pictures of layouts, differences of runs and sweeps: what they say is what the nouns say, on 80 columns and in
SVG that is the same to the byte. `python -m tests.bare.test_present_pictures` writes the golden files anew."""

import io
import itertools
import math
import random
import re
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from trainwright.cli.catalogue import load_cluster, load_model
from trainwright.cli.files import read_run
from trainwright.plan.predict import predict
from trainwright.present.diff import diff_view, sentence
from trainwright.present.layout import layout_view, ranks_text
from trainwright.present.layout_drawing import layout_svg
from trainwright.present.sweep import sweep_svg, sweep_view
from trainwright.spec.cluster import Provenance
from trainwright.spec.difference import Difference, difference
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run
from trainwright.spec.sweep import IllegalPoint, Sweep, SweepPoint, axes, combinations, varied
from trainwright.spec.wiring import GroupAxis, Wiring, wiring

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "runs" / "example-16_a100x16.toml"
GOLDEN = ROOT / "tests" / "golden"


def shown(view: RenderableType, width: int = 80) -> str:
    """The text of a view, without colour; checked to keep to its width and to cut nothing."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    return "\n".join(lines) + "\n"


def squeezed(text: str) -> str:
    return " ".join(text.split())


def run_of(model: str, cluster: str, layout: dict[str, Any], **recipe: Any) -> Run:
    return Run(
        name="pictured",
        layout=Layout.parse(layout),
        recipe=Recipe.parse({"seq_len": 4096, "global_batch": 1024, **recipe}),
        data=DataSpec(vocab_size=300),
        model=load_model(model),
        cluster=load_cluster(cluster),
    ).check()


def groups_of(wired: Wiring, axis: GroupAxis) -> tuple[tuple[int, ...], ...]:
    return next(each.groups for each in wired.axes if each.axis == axis)


@pytest.fixture(scope="module")
def example() -> Run:
    return read_run(EXAMPLE)


def test_the_layout_of_16_is_the_golden_picture(example: Run) -> None:
    wired = wiring(example)
    assert shown(layout_view(wired)) == (GOLDEN / "layout_16.txt").read_text()
    assert layout_svg(wired) == (GOLDEN / "layout_16.svg").read_text()


def test_the_classic_groups_of_16(example: Run) -> None:
    wired = wiring(example)
    assert groups_of(wired, "tp") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert groups_of(wired, "pp") == tuple((rank, rank + 4) for rank in (0, 1, 2, 3, 8, 9, 10, 11))
    assert groups_of(wired, "dp") == tuple((rank, rank + 8) for rank in range(8))
    rides = {each.axis: each.rides for each in wired.axes}
    assert rides == {"tp": {"link": 4}, "cp": {"alone": 16}, "pp": {"network": 8}, "dp": {"network": 8}}


def test_the_order_of_ranks_is_the_layout_s(example: Run) -> None:
    other = wiring(example.with_value("layout.order", "tp-cp-dp-pp"))
    assert groups_of(other, "dp")[0] == (0, 4)
    assert groups_of(other, "pp")[0] == (0, 8)
    text = shown(layout_view(other))
    assert re.search(r"dp 0 │  0  1  2  3 │──│  8  9 10 11 │\n +└ node 0 ─+┘  └ node 2 ─+┘", text)


WIRED = [
    ("llama-3.1-8b", "h100-sxm", {"tp": 2, "cp": 2, "pp": 2, "dp": 4}, {}),
    (
        "llama-3.1-8b",
        "h100-sxm",
        {"tp": 2, "cp": 2, "pp": 2, "dp": 4, "order": "tp-cp-dp-pp"},
        {"dp_replicate": 2},
    ),
    ("llama-3.1-405b", "gb200-nvl72", {"tp": 16, "pp": 2, "dp": 4}, {}),
    ("mixtral-8x7b", "h100-sxm", {"tp": 2, "pp": 2, "dp": 16, "ep": 8, "etp": 2}, {"dp_replicate": 2, "zero": 3}),
    ("mixtral-8x7b", "h100-sxm", {"tp": 4, "cp": 2, "dp": 4, "ep": 8, "order": "tp-cp-dp-pp"}, {"zero": 2}),
]


@pytest.mark.parametrize(("model", "cluster", "layout", "recipe"), WIRED)
def test_groups_are_a_partition_and_ride_what_they_span(
    model: str, cluster: str, layout: dict[str, Any], recipe: dict[str, Any]
) -> None:
    run = run_of(model, cluster, layout, **recipe)
    wired = wiring(run)
    domain = wired.domain_ranks
    for each in wired.axes:
        assert sorted(itertools.chain(*each.groups)) == list(range(run.layout.world))
        assert {len(group) for group in each.groups} == {each.degree}
        crossing = [group for group in each.groups if len({rank // domain for rank in group}) > 1]
        assert sum(count for kind, count in each.rides.items() if kind in ("network", "both")) == len(crossing)
        lone = [group for group in crossing if len({rank // domain for rank in group}) == len(group)]
        assert each.rides.get("network", 0) == len(lone)
    shown(layout_view(wired))
    xml.etree.ElementTree.fromstring(layout_svg(wired))


def test_gradients_travel_over_dp_and_cp_and_replicas_apart() -> None:
    _, _, layout, recipe = WIRED[1]
    run = run_of("llama-3.1-8b", "h100-sxm", layout, **recipe)
    wired = wiring(run)
    shards, replicas = groups_of(wired, "dp_shard"), groups_of(wired, "dp_replicate")
    places = [run.layout.coordinate(rank) for rank in shards[0]]
    assert {(at.cp, at.dp) for at in places} == {(cp, dp) for cp in (0, 1) for dp in (0, 1)}
    assert len(replicas[0]) == 2
    assert abs(run.layout.coordinate(replicas[0][1]).dp - run.layout.coordinate(replicas[0][0]).dp) == 2
    assert "dp_shard" not in {each.axis for each in wiring(run_of("llama-3.1-8b", "h100-sxm", {"dp": 8})).axes}


@pytest.mark.parametrize("at", [3, 4])
def test_the_axes_of_experts_span_the_plane_of_a_stage(at: int) -> None:
    model, cluster, layout, recipe = WIRED[at]
    run = run_of(model, cluster, layout, **recipe)
    wired = wiring(run)
    axes_of_experts = [each.groups for each in wired.axes if each.axis in ("etp", "ep", "expert_dp")]
    for one, other in itertools.combinations(axes_of_experts, 2):
        assert all(len({*left} & {*right}) <= 1 for left in one for right in other)
    plane = run.layout.tp * run.layout.cp * run.layout.dp
    assert math.prod(len(groups[0]) for groups in axes_of_experts) == plane
    for group in itertools.chain(*axes_of_experts):
        assert len({run.layout.coordinate(rank).pp for rank in group}) == 1


def test_a_world_of_16384_is_instant_and_short() -> None:
    run = run_of(
        "llama-3.1-405b",
        "h100-sxm",
        {"tp": 8, "cp": 2, "pp": 16, "vpp": 4, "dp": 64},
        schedule="interleaved_1f1b",
    )
    started_s = time.perf_counter()
    wired = wiring(run)
    text = shown(layout_view(wired))
    assert time.perf_counter() - started_s < 2
    assert text.count("\n") < 90
    assert "and 63 more replicas (dp) like this one, each 256 ranks further" in text
    assert "pp 0   layers 0, 31-32, 63-64, 95-96 + embedding" in text
    assert "2,016 more are like these" in layout_svg(wired)


def test_256_ranks_are_all_drawn_and_no_world_is_too_large_unsaid() -> None:
    text = shown(layout_view(wiring(run_of("llama-3.1-8b", "h100-sxm", {"tp": 2, "pp": 4, "dp": 32}))))
    picture = text[text.index("Ranks") : text.index("Layers")]
    drawn = [range(int(low), int(high) + 1) for low, high in re.findall(r"(\d+)-(\d+): node", picture)]
    assert sorted(itertools.chain(*drawn)) == list(range(256))
    huge = run_of("llama-3.1-8b", "h100-sxm", {"dp": 2**21}, global_batch=2**21)
    with pytest.raises(InvalidSpec, match="layout='2097152 ranks': at most 1000000 are drawn"):
        wiring(huge)


def test_ranks_in_few_words() -> None:
    assert [ranks_text(ranks) for ranks in ((5,), range(8), (0, 8), (0, 1, 4, 5), range(0, 64, 8))] == [
        *("5", "0-7", "0, 8", "0-1, 4-5", "0, 8 .. 56"),
    ]


def test_a_drawing_is_the_same_to_the_byte_whatever_the_reader_s_settings(example: Run) -> None:
    import matplotlib

    first = layout_svg(wiring(example))
    with matplotlib.rc_context({"figure.facecolor": "red", "svg.fonttype": "path", "svg.hashsalt": None}):
        assert layout_svg(wiring(example)) == first
    assert "<dc:date>" not in first


def diffed(a: Run, b: Run) -> Difference:
    return difference(a, b, predict(a), predict(b))


def test_causes_sum_to_the_difference_exactly(example: Run) -> None:
    for field, value in (("recipe.recompute", "full"), ("recipe.zero", 3), ("recipe.seq_len", 8192)):
        b = example.with_value(field, value)
        found = diffed(example, b)
        assert [each.field for each in found.fields] == [field]
        for causes, total in ((found.seconds, "step_s"), (found.bytes, "peak_bytes")):
            shuffled = random.Random(0).sample(causes, len(causes))
            assert sum(each.difference for each in shuffled) == found.quantity(total).difference
            assert sum(each.a for each in shuffled) == found.quantity(total).a
            assert sum(each.b for each in shuffled) == found.quantity(total).b
            sizes = [abs(each.difference) for each in causes]
            assert sizes == sorted(sizes, reverse=True)
        assert found.quantity("step_s").b == pytest.approx(predict(b).step_s, rel=1e-14)
        shown(diff_view(found, "a.toml", "b.toml"))


def test_what_a_difference_says(example: Run) -> None:
    slower = diffed(example, example.with_value("recipe.recompute", "full"))
    step = slower.quantity("step_s")
    assert re.fullmatch(
        rf"B is {step.b / step.a - 1:.1%} slower; most of it is recompute \(\+[\d.]+ s\)", sentence(slower)
    )
    faster = diffed(example.with_value("recipe.recompute", "full"), example)
    assert re.match(r"B is [\d.]+% faster; most of it is recompute \(-[\d.]+ s\)", sentence(faster))
    longer = diffed(example, example.with_value("recipe.seq_len", 8192))
    assert re.match(r"B's step is [\d.]+% longer for 2 times the tokens \([+-][\d.]+% tokens/s", sentence(longer))
    alike = diffed(example, example)
    assert sentence(alike) == "A and B take the same time for a step"
    assert "differ in no field" in shown(diff_view(alike, "a", "b"))
    small = example.with_value("cluster.device.memory_bytes", 10**9)
    assert "B does not fit" in shown(diff_view(diffed(example, small), "a", "b"))


def test_another_model_is_summed_up_by_its_name_and_a_changed_one_is_not(example: Run) -> None:
    other = example.changed(model=load_model("llama-3.2-3b"), cluster=load_cluster("a100-80gb-sxm"))
    fields = {each.field: (each.a, each.b) for each in diffed(example, other).fields}
    assert fields == {
        "model": ("llama-3.1-8b", "llama-3.2-3b"),
        "cluster": ("a100-40gb-sxm-4", "a100-80gb-sxm"),
    }
    changed = example.with_values([("cluster.rates.link", 0.5), ("model.vocab_size", 128000)])
    said = Provenance(kind="assumed", source="for a test")
    changed = changed.changed(
        cluster=changed.cluster.changed(provenance={**changed.cluster.provenance, "rates": said})
    )
    assert {each.field for each in diffed(example, changed).fields} == {"cluster.rates.link", "model.vocab_size"}


def test_a_table_that_one_run_lacks_is_compared_field_by_field(example: Run) -> None:
    found = diffed(example.changed(budget=None), example)
    assert [(each.field, each.a, each.b) for each in found.fields] == [("budget.tokens", None, 100_000_000_000)]
    assert "days" not in {each.name for each in found.quantities}


def swept(run: Run, *over: str, gpus: str | None = None) -> Sweep:
    points, illegal = [], []
    values = axes(over, gpus)
    for each in combinations(values):
        try:
            points.append(SweepPoint(values=each, prediction=predict(varied(run, each))))
        except InvalidSpec as error:
            illegal.append(IllegalPoint(each, str(error)))
    return Sweep(run_name=run.name, fields=tuple(values), points=tuple(points), illegal=tuple(illegal))


def test_a_sweep_shows_each_point_or_why_it_is_none(example: Run) -> None:
    found = swept(example, "recipe.micro_batch=1,3,16", "recipe.recompute=none,full")
    assert [each.values for each in found.points] == [
        {"recipe.micro_batch": micro, "recipe.recompute": each} for micro in (1, 16) for each in ("none", "full")
    ]
    text = squeezed(shown(sweep_view(found)))
    assert f"6 points: 4 legal, of which {len(found.fitting)} fit" in text
    assert "3 none recipe.micro_batch=3: must divide global_batch=128" in text
    for each in found.points:
        assert f"{each.prediction.tokens_per_s_per_device:,.1f} {each.prediction.mfu:.1%}" in text
    assert "MFU of 312 TFLOP/s (dense bf16 peak)" in text
    assert "device-hours days USD" in text
    assert "device-hours" not in shown(sweep_view(swept(example.changed(budget=None), "recipe.micro_batch=1,2")))


def test_devices_grow_by_replicas_and_the_batch_stays(example: Run) -> None:
    found = swept(example, gpus="16,32,36,64,2048")
    layouts = [each.prediction.layout for each in found.points]
    assert [(each.world, each.dp, each.tp, each.pp) for each in layouts] == [
        (16, 2, 4, 2),
        (32, 4, 4, 2),
        (64, 8, 4, 2),
    ]
    assert [each.reason.split(":")[0] for each in found.illegal] == ["--gpus=36", "recipe.global_batch=128"]
    growth = found.growths()[1]
    shares = [
        {cause: value / each.prediction.step_s for cause, value in each.prediction.ledger.seconds.items()}
        for each in found.points
    ]
    rises = {cause: share - shares[0][cause] for cause, share in shares[1].items()}
    assert growth.cause == max(rises, key=lambda cause: rises[cause])
    assert set(found.growths()) == {1, 2}
    text = squeezed(shown(sweep_view(found)))
    assert f"{growth.cause} {growth.before:.1%} to {growth.after:.1%}" in text
    assert "--gpus=36: must be a multiple of tp*cp*pp=4*1*2=8" in text


def test_nothing_grows_where_nothing_changes(example: Run) -> None:
    assert swept(example, "name=a,b,c").growths() == {}


def test_devices_follow_degrees_that_are_swept_too(example: Run) -> None:
    found = swept(example, "layout.tp=2,4", gpus="16,32")
    assert [each.prediction.layout.dp for each in found.points] == [4, 2, 8, 4]
    assert list(found.lines()) == [("2",), ("4",)]
    assert found.lines()["2",] == [0, 2]


def test_a_plot_has_a_line_for_each_choice_of_the_other_fields(example: Run) -> None:
    found = swept(example, "recipe.micro_batch=4,1,2", "recipe.recompute=none,full")
    assert [found.points[place].values["recipe.micro_batch"] for place in found.lines()["none",]] == [1, 2, 4]
    text = sweep_svg(found)
    assert text == sweep_svg(found)
    for label in ("recompute none", "recompute full", "step (s)", "MFU (%)", "recipe.micro_batch"):
        assert f">{label}<" in text
    assert "hollow" not in text
    half = sweep_svg(swept(example, "cluster.device.memory_bytes=1_000_000_000,40e9"))
    assert "hollow: does not fit" in half
    assert half.count("fill: #ffffff; stroke: #0072b2") == 2
    xml.etree.ElementTree.fromstring(sweep_svg(swept(example, "recipe.recompute=none,selective,full")))


@pytest.mark.parametrize(
    ("over", "gpus", "complaint"),
    [
        ([], None, "--over: missing"),
        (["recipe.seed"], None, "must be field=values"),
        (["recipe.seed="], None, "must be field=values"),
        (["recipe.seed=1,,2"], None, "has an empty value"),
        (["recipe.seed=1,1"], None, "has 1 twice"),
        (["recipe.seed=1", "recipe.seed=2"], None, "a second time"),
        (["layout.dp=1"], "8", "is what --gpus chooses"),
        ([], "8,x", "must be whole numbers above zero"),
        ([], "0", "must be whole numbers above zero"),
        (
            [f"recipe.seed={','.join(map(str, range(101)))}", f"layout.tp={','.join(map(str, range(100)))}"],
            None,
            "10100",
        ),
    ],
)
def test_what_can_t_be_swept_is_said(over: list[str], gpus: str | None, complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(complaint)):
        axes(over, gpus)


def test_values_are_read_as_toml_or_as_texts() -> None:
    assert axes(["a=1,2e3,none", "b=true,false", "c=[1, 2],[3]", 'd="x,y",z'], "1, 2") == {
        "gpus": [1, 2],
        "a": [1, 2000.0, "none"],
        "b": [True, False],
        "c": [[1, 2], [3]],
        "d": ['"x', 'y"', "z"],
    }
    assert axes(['d="x,y","z"'], None) == {"d": ["x,y", "z"]}


if __name__ == "__main__":
    drawn = wiring(read_run(EXAMPLE))
    (GOLDEN / "layout_16.txt").write_text(shown(layout_view(drawn)))
    (GOLDEN / "layout_16.svg").write_text(layout_svg(drawn))
