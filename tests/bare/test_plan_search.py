"""The search equals brute force: every legal run of a small space, one by one through `predict`."""

import itertools
from collections.abc import Iterator

import pytest

from tests.bare.plans import cluster, dense_model
from trainwright.plan.candidates import MICRO_BATCHES, candidates
from trainwright.plan.predict import predict
from trainwright.plan.search import search
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.model import ModelSpec
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run


def question(devices: int, model: ModelSpec, on: ClusterSpec, **choices: object) -> Question:
    recipe = Recipe(seq_len=64, global_batch=16)
    return Question.parse({"model": model, "cluster": on, "devices": devices, "recipe": recipe} | choices)


def every_run(asked: Question) -> Iterator[Run]:
    """All runs that `Run.check` accepts, from all integers and names that could be meant."""
    devices, layers = asked.devices, asked.model.num_layers
    degrees = range(1, devices + 1)
    for tp, cp, pp, dp in itertools.product(degrees, repeat=4):
        if tp * cp * pp * dp != devices or cp & (cp - 1) or tp > asked.cluster.fabric.link_domain:
            continue
        for vpp, micro_batch in itertools.product(range(1, layers + 1), MICRO_BATCHES):
            for zero, recompute in itertools.product((0, 1, 2, 3), ("none", "selective", "full")):
                if zero and dp * cp == 1:
                    continue
                schedule = "1f1b" if vpp == 1 else "interleaved_1f1b"
                try:
                    yield Run(
                        layout=Layout(tp=tp, cp=cp, pp=pp, dp=dp, vpp=vpp),
                        recipe=asked.recipe.changed(
                            micro_batch=micro_batch, zero=zero, recompute=recompute, schedule=schedule
                        ),
                        model=asked.model,
                        cluster=asked.cluster,
                        data=DataSpec(vocab_size=300),
                    ).check()
                except ValueError:  # pydantic's own and InvalidSpec
                    continue


SPACES = [
    (devices, model, on)
    for devices in (1, 2, 4, 6, 8)
    for model, on in [
        (dense_model(), cluster()),
        (dense_model(num_layers=6, num_heads=6, num_kv_heads=6, d_model=96), cluster(memory_bytes=3_000_000)),
        (dense_model(num_layers=3, tied=True), cluster(devices=8, concurrent=2, nics=0)),
        (dense_model(num_layers=7), cluster(devices=2, nics=2, memory_bytes=4_000_000)),
    ]
]


@pytest.mark.parametrize("space", range(len(SPACES)))
def test_the_search_equals_brute_force(space: int) -> None:
    asked = question(*SPACES[space], top=3)
    runs = list(every_run(asked))
    answer = search(asked)
    assert answer.considered == len(runs)
    judged = [(predict(run), run) for run in runs]
    fitting = sorted((each.step_s, str(run.layout), str(run.recipe)) for each, run in judged if each.fits)
    assert answer.feasible == len(fitting)
    assert [plan.step_s for plan in answer.plans] == pytest.approx([each[0] for each in fitting[:3]], rel=1e-12)
    assert answer.why


def test_fixed_fields_are_kept() -> None:
    answer = search(question(8, dense_model(), cluster(), fixed={"tp": 2, "zero": 3, "recompute": "full"}, top=20))
    assert answer.plans
    assert all(
        plan.layout.tp == 2 and plan.recipe.zero == 3 and plan.recipe.recompute == "full" for plan in answer.plans
    )


def test_the_winner_of_a_table_is_what_predict_says() -> None:
    """The table of length one is the same code path: equal to the last bit."""
    asked = question(8, dense_model(), cluster(), top=5, tokens=10**6)
    for plan in search(asked).plans:
        run = Run(
            layout=plan.layout,
            recipe=plan.recipe,
            model=asked.model,
            cluster=asked.cluster,
            data=DataSpec(vocab_size=300),
        )
        assert predict(run).ledger == plan.ledger


def test_the_same_question_has_the_same_answer_to_the_byte() -> None:
    asked = question(8, dense_model(), cluster(), top=4)
    assert search(asked).model_dump_json() == search(asked).model_dump_json()


def test_nothing_fits_says_how_far_and_why() -> None:
    answer = search(question(2, dense_model(), cluster(memory_bytes=100_000)))
    assert answer.feasible == 0
    assert not answer.plans
    assert any("short by" in line and "largest cause" in line for line in answer.why)


@pytest.mark.parametrize(
    ("devices", "choices", "message"),
    [
        (7, {}, "no layout of 7 devices splits it"),
        (8, {"fixed": {"tp": 3}}, "no legal layout of 8 devices has it"),
        (8, {"fixed": {"recompute": "some"}}, "may be none, selective, full"),
        (8, {"fixed": {"tpp": 2}}, "did you mean tp or pp or vpp"),
    ],
)
def test_what_leaves_no_candidate_is_named(devices: int, choices: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        candidates(question(devices, dense_model(num_layers=3), cluster(), **choices))


def test_a_cluster_without_network_holds_what_it_holds() -> None:
    with pytest.raises(InvalidSpec, match="has no network and holds 8"):
        candidates(question(16, dense_model(), cluster(nics=0)))


def test_a_budget_too_large_for_the_cluster_is_called_so() -> None:
    answer = search(question(8, dense_model(), cluster(), tokens=10**15))
    assert any("the cluster is small for the budget" in line for line in answer.why)
