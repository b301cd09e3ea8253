"""What `plan` answers beside the ranking: fronts, device counts, remedies, changes are each what a search says."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.bare.plans import cluster, dense_model, moe_model
from trainwright.cli.draft import usual_precision
from trainwright.cli.main import run as run_program
from trainwright.cli.planner import sized
from trainwright.plan import changes as changing
from trainwright.plan import shortlist as shortlisting
from trainwright.plan import sizing as sizing_module
from trainwright.plan.answer import SLOWEST, answer
from trainwright.plan.candidates import candidates
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import predict
from trainwright.plan.race import Race
from trainwright.plan.remedies import diagnosed
from trainwright.plan.search import ranked, search
from trainwright.plan.shortlist import least_makespans, shortlisted
from trainwright.plan.sizing import counts_to_try, device_counts, floor_days
from trainwright.spec.answers import Prediction
from trainwright.spec.cluster import PeakFlops
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run
from trainwright.spec.sizing import Goal


def question(devices: int = 8, **choices: object) -> Question:
    recipe = Recipe(seq_len=64, global_batch=16)
    asked = {"model": dense_model(), "cluster": cluster(), "devices": devices, "recipe": recipe}
    return Question.parse(asked | choices)


QUESTIONS = {
    "dense": question(),
    "tight": question(cluster=cluster(memory_bytes=2_000_000)),
    "experts": question(model=moe_model(), cluster=cluster(memory_bytes=3_000_000)),
    "two nodes": question(16, cluster=cluster(nics=2)),
    "shared cores": question(model=dense_model(num_layers=3), cluster=cluster(concurrent=2, nics=0)),
}


def run_of(asked: Question, plan: Prediction) -> Run:
    return Run(
        layout=plan.layout,
        recipe=plan.recipe,
        model=asked.model,
        cluster=asked.cluster,
        data=DataSpec(vocab_size=300),
    )


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_race_is_won_by_the_fastest_of_all(name: str) -> None:
    evaluation = Evaluation(candidates(QUESTIONS[name]))
    race = Race(evaluation)
    steps = np.array([evaluation.step_s(row) for row in range(len(evaluation.fits))])
    columns = evaluation.table.columns
    for among in (evaluation.fits, ~evaluation.fits, columns.pp > 1, columns.zero == 3):
        rows = np.flatnonzero(among)
        expected = rows[np.lexsort([rows, steps[rows]])][:4].tolist()
        assert race.fastest(among, 4) == expected
    slowest_s = float(np.median(steps))
    fast = np.flatnonzero(evaluation.fits & (steps <= slowest_s))
    lean = race.leanest(evaluation.fits, slowest_s)
    assert (lean is None) == (not len(fast))
    if lean is not None:
        assert evaluation.peak_bytes[lean] == evaluation.peak_bytes[fast].min()


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_front_is_what_no_other_plan_beats(name: str) -> None:
    evaluation = Evaluation(candidates(QUESTIONS[name]))
    every = [(evaluation.step_s(row), evaluation.peak_bytes[row]) for row in np.flatnonzero(evaluation.fits)]
    slowest_s = 1.5 * min(every)[0]
    unbeaten = {
        (step_s, peak)
        for step_s, peak in every
        if step_s <= slowest_s
        and not any(a <= step_s and b <= peak and (a, b) != (step_s, peak) for a, b in every)
    }
    front = Race(evaluation).front(evaluation.fits, slowest_s)
    assert [(evaluation.step_s(row), evaluation.peak_bytes[row]) for row in front] == sorted(unbeaten)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_shortlist_has_the_winners_of_the_whole_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlisting, "FIRST_JUDGED", 16)
    asked = QUESTIONS[name]
    whole = ranked(candidates(asked), 3)
    evaluation, best = shortlisted(asked, 3)
    expected = [whole.evaluation.step_s(row) for row in whole.rows]
    assert [evaluation.step_s(row) for row in best] == pytest.approx(expected, rel=1e-12)
    assert (least_makespans(whole.evaluation.table) <= whole.evaluation.bound_s).all()


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_plan_of_an_answer_is_what_predict_says(name: str) -> None:
    asked = QUESTIONS[name].changed(top=3, tokens=10**6)
    found = answer(asked)
    ranking = search(asked)
    assert (found.considered, found.feasible) == (ranking.considered, ranking.feasible)
    for plan in (*found.plans, *found.pareto):
        assert predict(run_of(asked, plan)).ledger == plan.ledger
        assert plan.fits
    steps = [plan.step_s for plan in found.plans]
    assert steps == sorted(steps)
    assert steps[0] <= ranking.plans[0].step_s
    for each in found.balanced:
        assert each.layout in [plan.layout for plan in found.plans]
        assert each.step_s < each.even_step_s
    assert found.model_dump_json() == answer(asked).model_dump_json()


def test_a_front_is_spread_and_every_member_has_more_room_than_the_one_before() -> None:
    found = answer(QUESTIONS["dense"])
    assert 1 < len(found.pareto) <= 9
    assert found.pareto[0].step_s == found.plans[0].step_s
    assert found.pareto[-1].step_s <= SLOWEST * found.plans[0].step_s
    for faster, leaner in zip(found.pareto, found.pareto[1:], strict=False):
        assert faster.step_s <= leaner.step_s
        assert faster.peak_bytes > leaner.peak_bytes


def test_uneven_stages_are_said_and_worth_it() -> None:
    """A head as heavy as three layers."""
    asked = question(4, model=dense_model(num_layers=8, vocab_size=1 << 14), fixed={"pp": 4, "vpp": 1, "zero": 0})
    found = answer(asked)
    assert found.balanced
    assert found.plans[0].layout.stage_layers
    assert found.why[0].startswith("stages of ")
    assert found.why[0].endswith(f"{found.balanced[0].saves:.1%} faster than even ones, compared below")


# Changes


@pytest.mark.parametrize("whole", [changing.WHOLE, 0], ids=["whole", "chances"])
@pytest.mark.parametrize("name", ["two nodes", "experts"])
def test_a_change_is_what_the_changed_question_is_answered(
    name: str, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "WHOLE", whole)
    asked = QUESTIONS[name]
    found = {each.name: each for each in answer(asked).changes}
    on, device = asked.cluster, asked.cluster.device
    faster = on.fabric.changed(nics_per_node=2 * on.fabric.nics_per_node)
    smaller = device.changed(memory_bytes=int(0.8 * device.memory_bytes))
    other = {
        "20% less HBM": asked.changed(cluster=on.changed(device=smaller)),
        "twice the global batch": asked.changed(recipe=asked.recipe.changed(global_batch=32)),
        "twice the devices": asked.changed(devices=2 * asked.devices),
    }
    if name == "two nodes":
        other["twice the NICs"] = asked.changed(cluster=on.changed(fabric=faster))
    assert set(found) == set(other)
    for change, changed in other.items():
        best = search(changed).plans
        plan = found[change].plan
        assert plan is not None or not best
        if plan is not None:
            assert plan.fits
            assert plan.step_s == pytest.approx(best[0].step_s, rel=1e-12 if whole else 0.02)


def test_changes_are_sentences_of_the_answer() -> None:
    found = answer(QUESTIONS["two nodes"])
    assert all(each.text in found.why for each in found.changes)
    texts = {each.name: each.text for each in found.changes}
    assert "faster" in texts["twice the NICs"] or "as fast" in texts["twice the NICs"]
    assert "x the tokens/s" in texts["twice the devices"]


# How many devices


BUDGET = 10**11


def test_device_counts_are_whole_nodes_where_there_are_several() -> None:
    assert device_counts(cluster(), 200) == [8, 16, 24, 32, 48, 64, 96, 128, 192]
    assert device_counts(cluster(nics=0), 200) == [1, 2, 3, 4, 6, 8]
    assert device_counts(cluster(), 7) == [1, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def scanned() -> dict[int, Prediction]:
    """The fastest balanced plan for every number of devices."""
    found = {}
    for count in device_counts(cluster(), 128):
        try:
            found[count] = answer(question(count, tokens=BUDGET)).plans[0]
        except InvalidSpec:
            continue
    return found


def test_the_fewest_devices_are_those_of_a_scan(scanned: dict[int, Prediction]) -> None:
    days = sorted(plan.days for plan in scanned.values() if plan.days)
    limit = days[len(days) // 2]
    sizing, found = sized(question(1, tokens=BUDGET), Goal(least="gpus", days=limit, most_devices=128))
    least = min(count for count, plan in scanned.items() if plan.days and plan.days <= limit)
    assert sizing.answer is not None
    assert sizing.answer.devices == least
    assert found.question.devices == least
    assert found.answer.plans[0].step_s == pytest.approx(scanned[least].step_s)
    assert sizing.text.startswith(f"{least} devices finish in {scanned[least].days:.1f} days")


def test_the_fewest_devices_may_be_no_round_number_of_nodes() -> None:
    """A batch that 5 nodes split: every number of nodes up to 8 is searched apart, as `plan` does it."""
    recipe = question(1).recipe.changed(global_batch=240)
    every = {}
    for count in range(8, 65, 8):
        try:
            every[count] = answer(question(count, tokens=BUDGET, recipe=recipe)).plans[0]
        except InvalidSpec:
            continue
    limit = every[40].days
    assert limit is not None
    goal = Goal(least="gpus", days=limit * (1 + 1e-9), most_devices=64)
    sizing, _ = sized(question(1, tokens=BUDGET, recipe=recipe), goal)
    assert sizing.answer is not None
    assert sizing.answer.devices == min(
        count for count, plan in every.items() if plan.days and plan.days <= goal.days
    )
    assert sizing.answer.devices == 40


def test_the_cheapest_number_is_that_of_a_scan(scanned: dict[int, Prediction]) -> None:
    limit = max(plan.days for plan in scanned.values() if plan.days)
    sizing, _ = sized(question(1, tokens=BUDGET), Goal(least="cost", days=limit, most_devices=128))
    cheapest = min(scanned, key=lambda count: scanned[count].cost_usd or math.inf)
    assert sizing.answer is not None
    assert sizing.answer.devices == cheapest
    assert "would cost" in sizing.text


def test_days_against_cost_is_a_front(scanned: dict[int, Prediction]) -> None:
    sizing, _ = sized(question(1, tokens=BUDGET), Goal(least="gpus", days=1e6, most_devices=128))
    every = [(each.days, each.price) for each in sizing.tried]
    front = [(each.days, each.price) for each in sizing.pareto]
    beaten = [one for one in every if any(a <= one[0] and b <= one[1] and (a, b) != one for a, b in every)]
    assert sorted(front) == sorted(set(every) - set(beaten))
    assert len(sizing.tried) == len(scanned)


def test_a_floor_is_below_what_is_predicted(scanned: dict[int, Prediction]) -> None:
    for count, plan in scanned.items():
        assert plan.days is not None
        assert floor_days(question(1, tokens=BUDGET), count) < plan.days


def test_numbers_that_cannot_be_in_time_are_not_searched() -> None:
    asked = question(1, tokens=BUDGET)
    limit = floor_days(asked, 40)
    counts = counts_to_try(asked, Goal(least="gpus", days=limit, most_devices=128))
    assert counts == [32, 48, 64, 96, 128], "the largest that is too late shows what is missed"


def test_nothing_in_time_says_what_comes_nearest() -> None:
    sizing, found = sized(question(1, tokens=BUDGET), Goal(least="gpus", days=1e-9, most_devices=16))
    assert sizing.answer is None
    assert found.answer.plans == ()
    assert "no number of devices up to 16 finishes in 1e-09 days; 16 come nearest, with" in sizing.text


def test_a_goal_that_cannot_be_judged_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="--tokens: missing"):
        counts_to_try(question(1), Goal(least="gpus", days=1))
    free = question(1, tokens=BUDGET, cluster=cluster().changed(usd_per_device_hour=None))
    with pytest.raises(InvalidSpec, match="cluster test has no price"):
        counts_to_try(free, Goal(least="cost", days=1))


def test_a_small_cluster_is_told_a_number_that_was_predicted() -> None:
    asked = question(8, tokens=BUDGET * 6000, recipe=Recipe(seq_len=256, global_batch=256))
    small = answer(asked)
    line = next(line for line in small.why if "the cluster is small for the budget" in line)
    count, days = (int(word.replace(",", "")) for word in line.split("; ")[1].split(" take "))
    assert days <= 90
    found = sizing_module.tried(asked, count)
    assert found is not None
    assert found.days == pytest.approx(days, abs=0.51)


# Remedies


def test_each_remedy_is_what_the_changed_question_is_answered() -> None:
    asked = question(8, cluster=cluster(memory_bytes=500_000), fixed={"recompute": "none", "tp": 1})
    diagnosis = diagnosed(asked)
    assert diagnosis.feasible == 0
    assert [plan.short_by_bytes for plan in diagnosis.nearest] == sorted(
        plan.short_by_bytes for plan in diagnosis.nearest
    )
    assert diagnosis.nearest[0].short_by_bytes > 0
    remedies = {each.name: each for each in diagnosis.remedies}
    recipe = asked.recipe
    offload = recipe.optimizer.changed(offload=True)
    expected = {
        "full recompute in place of recompute none": asked.changed(fixed={"recompute": "full", "tp": 1}),
        "tensor parallelism in place of tp 1": asked.changed(fixed={"recompute": "none"}),
        "optimizer states in host memory": asked.changed(recipe=recipe.changed(optimizer=offload)),
        "gradients in bf16": asked.changed(recipe=recipe.changed(gradient_format="bf16")),
    }
    assert set(expected) <= set(remedies)
    for name, changed in expected.items():
        best = search(changed).plans
        assert remedies[name].plan.fits == bool(best)
        if best:
            assert remedies[name].plan.step_s == pytest.approx(best[0].step_s, rel=1e-12)
    assert any(" devices" in name for name in remedies)
    fitting = [each for each in diagnosis.remedies if each.plan.fits and each.same_job]
    assert fitting
    assert diagnosis.cheapest is fitting[0]
    assert fitting[0].device_s_per_token == min(each.device_s_per_token for each in fitting)
    assert "zero 3" in diagnosis.tried
    assert "full recompute" not in diagnosis.tried


def test_what_fits_is_told_its_room() -> None:
    diagnosis = diagnosed(QUESTIONS["dense"])
    assert diagnosis.feasible
    assert diagnosis.remedies == ()
    fastest, roomiest = diagnosis.nearest
    assert fastest.step_s <= roomiest.step_s
    assert fastest.peak_bytes > roomiest.peak_bytes


# The program


Asked = Callable[..., tuple[int, str, str]]
PLAN = ["plan", "llama-3.2-1b", "--cluster", "h100-sxm", "--seq-len", "4096", "--global-batch", "64"]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    def ask(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_program([*PLAN, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return ask


def document(text: str) -> dict[str, Any]:
    return json.loads(text)


def test_the_program_sizes_a_cluster(asked: Asked) -> None:
    wanted = ("--tokens", "300B", "--min", "gpus", "--days", "8", "--gpus", "48", "--top", "1")
    status, out, _ = asked(*wanted, "--json")
    assert status == 0
    found = document(out)["sizing"]
    assert set(found) == {"min", "days", "most_devices", "devices", "text", "tried", "pareto", "illegal"}
    assert document(out)["plans"][0]["days"] <= 8
    layout = document(out)["plans"][0]["layout"]
    assert layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"] == found["devices"]
    assert {each["devices"] for each in found["tried"]} >= {found["devices"]}
    status, out, _ = asked(*wanted)
    assert status == 0
    assert found["text"] in " ".join(out.split())
    status, out, _ = asked("--tokens", "300T", "--min", "cost", "--days", "8", "--gpus", "16", "--json")
    assert status == 1
    assert document(out)["plans"] == []
    assert "come nearest" in document(out)["sizing"]["text"]


def test_the_program_explains_what_does_not_fit(asked: Asked) -> None:
    small = ("--gpus", "8", "--set", "cluster.device.memory_bytes=4_000_000_000", "--explain-infeasible")
    status, out, _ = asked(*small, "--json")
    assert status == 1
    found = document(out)["infeasible"]
    assert set(found) == {"considered", "feasible", "nearest", "tried", "remedies", "cheapest"}
    assert found["nearest"][0]["short_by_bytes"] > 0
    status, out, _ = asked(*small)
    assert status == 1
    assert "short by" in out
    assert found["cheapest"] in " ".join(out.split())
    status, out, _ = asked("--gpus", "8", "--explain-infeasible")
    assert status == 0
    assert "the roomiest" in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "--gpus: missing"),
        (["--gpus", "8", "--days", "3"], "--days=3.0: is for --min"),
        (["--min", "gpus"], "--min='gpus': needs --days"),
        (["--min", "watts", "--days", "3"], "--min='watts': may be gpus or cost"),
        (["--min", "gpus", "--days", "0"], "--days=0.0: must be above zero"),
        (["--min", "gpus", "--days", "nan"], "--days=nan: must be above zero"),
        (["--min", "gpus", "--days", "3"], "--tokens: missing"),
        (
            ["--min", "gpus", "--days", "3", "--tokens", "1B", "--explain-infeasible"],
            "--explain-infeasible: is for",
        ),
    ],
)
def test_options_that_do_not_go_together_are_one_clear_line(
    asked: Asked, options: list[str], complaint: str
) -> None:
    status, out, error = asked(*options)
    assert status == 2
    assert out == ""
    assert error.count("\n") == 1
    assert complaint in error


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({"fp32": 1e13, "bf16": 1e14}, "bf16"),
        ({"fp32": 1e13, "bf16": 1e14, "fp16": 1e14, "fp8": 2e14}, "bf16"),
        ({"fp32": 1e13, "fp16": 1e14}, "fp16"),  # a V100
        ({"fp32": 1e11, "bf16": 1e9}, "fp32"),  # a CPU that emulates bf16
    ],
)
def test_the_usual_precision_is_what_the_device_is_fastest_in(peaks: dict[str, float], expected: str) -> None:
    device = cluster().device.changed(peak_flops_per_s=PeakFlops(**peaks))
    assert usual_precision(cluster().changed(device=device)) == expected
