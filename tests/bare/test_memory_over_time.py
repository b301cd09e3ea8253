"""Memory over time comes to the peak that is predicted, on every rank, over schedules, recompute and sharding."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.bare.plans import dense_model, moe_model
from tests.bare.test_plan_predict import run
from trainwright.cli.main import run as command
from trainwright.plan.memory_over_time import memory_over_time
from trainwright.plan.predict import predict
from trainwright.present.memory import memory_svg, memory_view
from trainwright.spec.layout import Layout
from trainwright.spec.ledger import BYTES_CAUSES
from trainwright.spec.memory import RankMemory, StepMemory
from trainwright.spec.run import Run

EXAMPLE = str(Path(__file__).parents[2] / "runs" / "example-16_a100x16.toml")

MODELS = {
    "dense": dense_model(num_layers=8),
    "tied, many words": dense_model(num_layers=8, vocab_size=65_536, tied=True),
    "experts": moe_model(num_layers=8, num_dense=1),
    "experts, multi-token": moe_model(num_layers=8, num_dense=1, mtp_depth=1),
}
SHAPES = [
    *(("1f1b", 1, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("zb_h1", 4, 1)),
    *(("interleaved_1f1b", 2, 2), ("interleaved_1f1b", 2, 4), ("breadth_first", 2, 2), ("zb_v", 2, 2)),
    *(("dualpipe", 2, 2), ("dualpipe_v", 2, 2)),
]
RECIPES: list[dict[str, object]] = [
    {"zero": 0, "recompute": "none"},
    {"zero": 1, "recompute": "selective"},
    {"zero": 2, "recompute": "full"},
    {"zero": 3, "recompute": "full", "recompute_layers": 1},
    {"zero": 2, "recompute": "none"},
    {"zero": 3, "recompute": "none", "reshard_after_forward": False},
]


def made_of(model: str, schedule: str, pp: int, vpp: int, **recipe: object) -> Run:
    ep = 2 if model.startswith("experts") else 1
    return run(Layout(pp=pp, vpp=vpp, dp=2, ep=ep), model=MODELS[model], schedule=schedule, **recipe)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("schedule", "pp", "vpp"), SHAPES)
def test_the_most_of_all_times_is_the_predicted_peak(model: str, schedule: str, pp: int, vpp: int) -> None:
    for recipe in RECIPES:
        case = made_of(model, schedule, pp, vpp, **recipe)
        for rank, stage in zip(memory_over_time(case).ranks, predict(case).stages, strict=True):
            predicted = stage.ledger.total_bytes
            assert rank.peak_bytes <= predicted * (1 + 1e-12)
            if over_counts(schedule, recipe):
                continue
            assert rank.peak_bytes == pytest.approx(predicted, rel=1e-12)
            assert rank.peak_ledger.bytes == pytest.approx(stage.ledger.bytes, rel=1e-12)


def over_counts(schedule: str, recipe: dict[str, object]) -> bool:
    """Where the prediction may have more: it adds the largest working set of any of the rank's chunks, whichever
    of them runs its backward; where chunks differ, that may never be the case while most is held."""
    return schedule == "dualpipe" and recipe["recompute"] == "full"


def test_uneven_chunks_hold_at_most_what_is_predicted() -> None:
    for schedule, vpp in (("interleaved_1f1b", 2), ("zb_v", 2), ("breadth_first", 2), ("dualpipe_v", 2)):
        case = run(Layout(pp=2, vpp=vpp), model=dense_model(num_layers=7), schedule=schedule)
        for rank, stage in zip(memory_over_time(case).ranks, predict(case).stages, strict=True):
            assert 0.8 * stage.ledger.total_bytes < rank.peak_bytes <= stage.ledger.total_bytes * (1 + 1e-12)


def doing(rank: RankMemory, what: str) -> list[int]:
    return [column for column, does in enumerate(rank.doing) if does.startswith(what)]


def test_forwards_add_and_backwards_remove() -> None:
    """Of the first stage of 1f1b: pp microbatches are held at most, and nothing in the end."""
    case = run(Layout(pp=4))
    rank = memory_over_time(case).ranks[0]
    first = doing(rank, "forward")[0]
    one_bytes = rank.bytes["activations"][first]
    assert one_bytes > 0
    assert [rank.bytes["activations"][at] for at in doing(rank, "forward")[:4]] == [
        pytest.approx(count * one_bytes) for count in (1, 2, 3, 4)
    ]
    backward = doing(rank, "backward")[0]
    assert rank.bytes["activations"][backward] > 4 * one_bytes
    assert rank.bytes["activations"][-1] == rank.bytes["logits"][-1] == 0
    for cause in ("parameters", "optimizer", "framework"):
        assert len(set(rank.bytes[cause])) == 1
    # Gradients are made by the first backward.
    assert set(rank.bytes["gradients"][: backward + 1]) == {0.0}
    assert len(set(rank.bytes["gradients"][backward + 1 : -1])) == 1
    assert list(rank.borders_s) == sorted(rank.borders_s)
    assert rank.borders_s[-1] == pytest.approx(predict(case).step_s)


def test_logits_live_on_the_last_stage_from_forward_to_backward() -> None:
    ranks = memory_over_time(run(Layout(pp=2), model=MODELS["tied, many words"])).ranks
    assert not any(ranks[0].bytes["logits"])
    held = [column for column, value in enumerate(ranks[1].bytes["logits"]) if value]
    assert held == sorted(doing(ranks[1], "forward") + doing(ranks[1], "backward"))


def test_weight_gradients_hold_what_they_read() -> None:
    rank = memory_over_time(run(Layout(pp=4), schedule="zb_h1", recompute="full")).ranks[0]
    first = doing(rank, "input gradient")[0]
    whole = rank.bytes["activations"][doing(rank, "forward")[0]]
    held = rank.bytes["activations"][doing(rank, "weight gradient")[-1]]
    assert rank.doing[first + 1].startswith(("waits", "forward", "weight gradient"))
    # Of a recomputed layer little is kept for backward, and more for the weight gradient.
    assert held > whole > 0


def test_the_head_is_reduced_when_activations_are_gone() -> None:
    """With many words and short sequences that is the peak."""
    case = run(Layout(dp=2), model=MODELS["tied, many words"], zero=3, seq_len=8)
    rank = memory_over_time(case).ranks[0]
    assert rank.doing[rank.peak].startswith("backward")
    assert rank.peak_ledger.bytes["activations"] == rank.peak_ledger.bytes["logits"] == 0
    assert rank.peak_bytes == pytest.approx(predict(case).peak_bytes, rel=1e-12)


def test_the_allocators_part_follows_what_is_held() -> None:
    assumed = {"kind": "assumed", "source": "a test's round number"}
    case = run(Layout(pp=2), zero=2).with_values(
        [("cluster.provenance.allocator_fraction", assumed), ("cluster.allocator_fraction", 0.1)]
    )
    for rank, stage in zip(memory_over_time(case).ranks, predict(case).stages, strict=True):
        assert rank.peak_bytes == pytest.approx(stage.ledger.total_bytes, rel=1e-12)
        assert max(rank.bytes["framework"]) > min(rank.bytes["framework"])


def test_a_long_step_is_shown_shorter_and_has_the_same_peak() -> None:
    long = run(Layout(pp=4), global_batch=400_000)
    made = memory_over_time(long)
    assert made.num_microbatches < made.of_microbatches == 400_000
    assert made.fullest.peak_bytes == pytest.approx(predict(long).peak_bytes, rel=1e-12)


def test_the_fullest_of_each_part() -> None:
    rank = RankMemory(
        pp_rank=0,
        borders_s=(0.0, 1.0, 3.0, 4.0),
        doing=("a", "b", "c"),
        bytes={"parameters": (1.0, 1.0, 1.0), "activations": (0.0, 5.0, 2.0)},
    )
    assert rank.fullest(4) == (0, 1, 1, 2)
    assert rank.fullest(1) == (1,)
    assert (rank.peak, rank.peak_bytes) == (1, 6.0)


@pytest.fixture(scope="module")
def example() -> StepMemory:
    return memory_over_time(made_of("dense", "interleaved_1f1b", 2, 2, zero=2))


def test_the_view_says_when_and_with_what(example: StepMemory) -> None:
    console = Console(width=100, record=True, file=None, highlight=False)
    with console.capture() as captured:
        console.print(memory_view(example, example.ranks[1]))
    text = captured.get()
    assert "Pipeline rank 1 over the step" in text
    assert "backward of microbatch" in text
    assert "activations" in text
    assert "█" in text


def test_the_drawing_is_the_same_each_time(example: StepMemory) -> None:
    drawn = memory_svg(example, example.ranks[0])
    assert drawn == memory_svg(example, example.ranks[0])
    assert drawn.rstrip().endswith("</svg>")
    for cause in ("parameters", "activations", "pipeline rank 0"):
        assert cause in drawn


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "memory.svg"
    assert command(["memory", EXAMPLE, "--rank", "1", "--svg", str(drawing), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {
        *(
            "run",
            "step_s",
            "microbatches",
            "of_microbatches",
            "capacity_bytes",
            "fits",
            "ranks",
            "rank",
            "over_time",
        ),
    }
    assert document["rank"] == 1
    assert set(document["ranks"][0]) == {"pp_rank", "peak_bytes", "peak_s", "peak_in", "bytes_by_cause"}
    assert set(document["over_time"][0]) == {"start_s", "end_s", "doing", "bytes_by_cause"}
    assert set(document["over_time"][0]["bytes_by_cause"]) == set(BYTES_CAUSES)
    assert drawing.read_text().rstrip().endswith("</svg>")
    assert command(["memory", EXAMPLE]) == 0
    assert "When each pipeline rank is fullest" in capsys.readouterr().out
    assert command(["memory", EXAMPLE, "--set", "cluster.device.memory_bytes=1_000_000_000"]) == 1
    assert "are missing" in capsys.readouterr().out
    for wrong in (["--rank", "2"], ["--rank", "-1"], ["--svg", str(tmp_path / "nowhere" / "m.svg")]):
        assert command(["memory", EXAMPLE, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_help_has_an_example_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["memory", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Example: trainwright memory" in text
    assert "--json" in text
