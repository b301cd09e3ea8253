"""Views show what the nouns say, fit 80 columns, and never cut a number."""

import io

import pytest
from rich.console import Console, RenderableType

from trainwright.cli import catalogue
from trainwright.plan.predict import predict
from trainwright.plan.search import search
from trainwright.present.clusters import calibration_view, cluster_view, clusters_view, measured_view
from trainwright.present.comparisons import comparison_view, verdict_view
from trainwright.present.fronts import pareto_section
from trainwright.present.models import model_view, models_view
from trainwright.present.parts import bar, sparkline
from trainwright.present.plans import answer_view, prediction_view
from trainwright.present.training import training_view
from trainwright.spec.answers import Answer, ComparedQuantity, Comparison, RankBytes
from trainwright.spec.model import CONVENTION_TEXT
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.record import Calibration, Fit, StepRecord
from trainwright.spec.run import Budget, Run
from trainwright.spec.units import bytes_text, count_text, seconds_text


def shown(view: RenderableType, width: int = 80) -> str:
    """The text of a view, without colour; checked to keep to its width."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    return text


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def question() -> Question:
    return Question(
        model=catalogue.load_model("llama-3.1-8b"),
        cluster=catalogue.load_cluster("h100-sxm"),
        devices=16,
        recipe=Recipe(seq_len=4096, global_batch=64),
        tokens=15 * 10**12,
        top=4,
    )


@pytest.fixture(scope="module")
def answer(question: Question) -> Answer:
    return search(question)


@pytest.fixture
def run(question: Question, answer: Answer) -> Run:
    plan = answer.plans[0]
    return Run(
        layout=plan.layout,
        recipe=plan.recipe,
        model=question.model,
        cluster=question.cluster,
        budget=Budget(tokens=15 * 10**12),
    )


def test_an_answer_shows_its_best_plan_in_full(question: Question, answer: Answer) -> None:
    text = squeezed(shown(answer_view(question, answer, 0.25)))
    plan = answer.plans[0]
    assert f"tp {plan.layout.tp} x cp {plan.layout.cp} x pp {plan.layout.pp} x dp {plan.layout.dp}" in text
    assert f"MFU {plan.mfu:.1%} of 989 TFLOP/s (dense bf16 peak)" in text
    assert CONVENTION_TEXT[plan.convention] in text
    assert f"Memory of the fullest rank at its peak: {bytes_text(plan.peak_bytes)}" in text
    assert f"Time of a step: {seconds_text(plan.step_s)}" in text
    for cause, value in plan.ledger.seconds.items():
        if value:
            assert f"{cause} {seconds_text(value)}" in text
    assert plan.gpu_hours is not None
    assert f"15.00 T tokens: {count_text(plan.gpu_hours)} device-hours" in text
    assert f"{answer.considered:,} plans considered, {answer.feasible:,} fit, in 250 ms" in text
    for reason in answer.why:
        assert reason in text


def test_plans_that_look_alike_are_told_apart(answer: Answer) -> None:
    plan = answer.plans[0]
    once = plan.changed(recipe=plan.recipe.changed(zero=3, reshard_after_forward=True))
    kept = plan.changed(recipe=plan.recipe.changed(zero=3, reshard_after_forward=False))
    assert shown(pareto_section([once, kept]), width=140).count("gathered until backward") == 1
    assert "gathered until backward" not in shown(pareto_section([kept]), width=140)


def test_no_answer_says_why(question: Question) -> None:
    small = question.changed(cluster=question.cluster.with_value("device.memory_bytes", 10**9))
    text = squeezed(shown(answer_view(small, search(small), 0.1)))
    assert "Nothing is feasible" in text
    assert "Why" in text


def test_a_prediction_that_does_not_fit_says_by_how_much(run: Run) -> None:
    assert "does not fit" not in shown(prediction_view(run, predict(run)))
    small = run.with_value("cluster.device.memory_bytes", 10**9)
    prediction = predict(small)
    text = squeezed(shown(prediction_view(small, prediction)))
    assert f"It does not fit: {bytes_text(prediction.short_by_bytes)} are missing" in text
    assert prediction.largest_bytes_cause in text


def test_models() -> None:
    names = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b")
    models = {name: catalogue.load_model(name) for name in names}
    text = shown(models_view(models), width=120)
    assert all(name in text for name in names)
    assert text.index("llama-3.1-8b") < text.index("deepseek-v3")
    for model in models.values():
        text = squeezed(shown(model_view(model, 4096)))
        assert f"{model.params:,}" in text
        assert f"{count_text(model.params)}" in text


def test_every_number_of_a_cluster_has_its_source() -> None:
    names = catalogue.cluster_names()
    clusters = {name: catalogue.load_cluster(name) for name in names}
    listed = shown(clusters_view(clusters), width=120)
    assert all(name in listed for name in names)
    for cluster in clusters.values():
        text = squeezed(shown(cluster_view(cluster)))
        for origin in cluster.provenance.values():
            assert origin.kind in text
        assert "device.memory_bytes" in text


def test_calibration() -> None:
    cluster = catalogue.load_cluster("local-cpu")
    fit = Fit(name="matmul fp32", samples=49, median_error=0.031, worst_error=0.2)
    assert "matmul fp32 49 3.1% 20.0%" in squeezed(
        shown(calibration_view(Calibration(cluster=cluster, fits=(fit,))))
    )
    assert "processes" in shown(measured_view(cluster))


def test_comparison() -> None:
    step = ComparedQuantity(name="step_s", predicted=2.0, seen=2.5)
    comparison = Comparison(
        run_name="small",
        run_hash="abc",
        steps_timed=9,
        quantities=(step,),
        ranks=(RankBytes(rank=0, quantities=(ComparedQuantity(name="peak_bytes", predicted=2**30, seen=2**29),)),),
        seconds=(
            ComparedQuantity(name="compute", predicted=1.75, seen=1.5),
            ComparedQuantity(name="ep", predicted=0.0, seen=0.0),
            ComparedQuantity(name="host", predicted=0.0, seen=0.375),
        ),
        bytes=(ComparedQuantity(name="parameters", predicted=100.0, seen=100.0),),
    )
    text = squeezed(shown(comparison_view(comparison)))
    assert "step 2.00 s 2.50 s +500 ms +25.0%" in text
    assert "0 1.00 GiB, 512 MiB -50.0%" in text
    assert "host 0 us 375 ms +375 ms not predicted" in text
    assert " ep " not in text
    assert "within the tolerance of 50%" in squeezed(shown(verdict_view(comparison, 0.5, True)))
    assert "OUT OF the tolerance" in squeezed(shown(verdict_view(comparison, 0.1, False)))
    short = squeezed(shown(comparison_view(comparison.changed(seconds=()))))
    assert "too short for an instrumented step" in short


def test_training(run: Run) -> None:
    records = [
        StepRecord(
            step=step,
            loss=9.0 - step,
            tokens_per_s=1000,
            step_s=0.5,
            mfu=0.1,
            grad_norm=1,
            peak_bytes=2**30,
            lr=1e-3,
        )
        for step in (1, 2, 3)
    ]
    text = squeezed(shown(training_view(run, records)))
    assert "loss 8.000 █▅▁ 6.000" in text
    assert "3 steps of 262,144 tokens" in text
    assert "diverged" not in text
    assert "no steps" in shown(training_view(run, []))
    lost = [each.changed(loss=loss) for each, loss in zip(records, (8.0, float("inf"), float("nan")), strict=True)]
    text = squeezed(shown(training_view(run, lost)))
    assert "loss 8.000 ▁×× nan" in text
    assert "diverged the loss is no finite number from step 2 on" in text


def test_bars_and_sparklines() -> None:
    assert [bar(share, 4) for share in (-1, 0, 0.125, 0.5, 1, 7)] == ["", "", "▌", "██", "████", "████"]
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(1000), columns=60)) == 60
    assert sparkline([float("nan"), 1, 2, float("inf")]) == "×▁█×"
    assert sparkline([float("nan")]) == "×"
