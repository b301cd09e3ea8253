"""The search equals brute force: every legal run of a small space, one by one through `predict`."""

import itertools
from collections.abc import Iterable, Iterator

import pytest

from tests.bare.plans import cluster, dense_model, moe_model
from trainwright.plan.candidates import MICRO_BATCHES, SEARCHED_SCHEDULES, candidates, policies, replicas_of
from trainwright.plan.predict import predict
from trainwright.plan.search import search
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import ORDERS, Layout
from trainwright.spec.model import ModelSpec
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run
from trainwright.spec.schedule import SCHEDULES


def question(devices: int, model: ModelSpec, on: ClusterSpec, **choices: object) -> Question:
    recipe = Recipe(seq_len=64, global_batch=16)
    return Question.parse({"model": model, "cluster": on, "devices": devices, "recipe": recipe} | choices)


def every_run(asked: Question) -> Iterator[Run]:
    """All runs that `Run.check` accepts, from all integers and names that could be meant, with the values that
    the question fixes."""

    def allowed(field: str, options: Iterable[int]) -> list[int]:
        return [option for option in options if asked.fixed.get(field, option) == option]

    devices, layers = asked.devices, asked.model.num_layers
    degrees, experts = range(1, devices + 1), range(1, devices + 1 if asked.model.is_moe else 2)
    planes = itertools.product(degrees, degrees, allowed("pp", degrees), degrees)
    for tp, cp, pp, dp in planes:
        if tp * cp * pp * dp != devices or cp & (cp - 1) or tp > asked.cluster.fabric.link_domain:
            continue
        inside = tp * cp < asked.cluster.fabric.link_domain
        orders = ORDERS if pp > 1 and dp > 1 and inside else list(ORDERS)[:1]
        micro_batches, chunks = allowed("micro_batch", MICRO_BATCHES), range(1, max(layers, 2) + 1)
        recipes = itertools.product(SEARCHED_SCHEDULES, chunks, micro_batches, policies(asked))
        for (schedule, vpp, micro_batch, policy), ep, etp in itertools.product(recipes, experts, {1, tp}):
            if pp == 1 and (schedule, vpp) != ("1f1b", 1):
                continue
            if etp > 1 and not asked.model.is_moe:
                continue
            try:
                SCHEDULES[schedule].check(pp, vpp, asked.recipe.global_batch // (micro_batch * dp))
            except InvalidSpec:
                continue
            stages = SCHEDULES[schedule].num_stages(pp, vpp)
            if policy.layers is not None and policy.layers >= -(-layers // stages):
                continue
            shardings = itertools.product(allowed("zero", (0, 1, 2, 3)), replicas_of(asked), (True, False))
            for (zero, replicas, reshard), order in itertools.product(shardings, orders):
                if zero and dp * cp // replicas == 1:
                    continue
                try:
                    yield Run(
                        layout=Layout(tp=tp, cp=cp, pp=pp, dp=dp, vpp=vpp, ep=ep, etp=etp, order=order),
                        recipe=asked.recipe.changed(
                            micro_batch=micro_batch,
                            zero=zero,
                            dp_replicate=replicas,
                            reshard_after_forward=reshard,
                            recompute=policy.recompute,
                            recompute_ops=policy.ops,
                            recompute_layers=policy.layers,
                            schedule=schedule,
                        ),
                        model=asked.model,
                        cluster=asked.cluster,
                        data=DataSpec(vocab_size=300),
                    ).check()
                except ValueError:  # pydantic's own and InvalidSpec
                    continue


DENSE, TIED = dense_model(), dense_model(num_layers=3, tied=True)
WIDE = dense_model(num_layers=6, num_heads=6, num_kv_heads=6, d_model=96)
EXPERTS = moe_model(num_layers=3, num_experts=4)
TWO_HEADS = moe_model(num_layers=3, num_dense=2, num_experts=6, mtp_depth=1, latent=False)
TIGHT, TWO_A_NODE = cluster(memory_bytes=3_000_000), cluster(devices=2, nics=2, memory_bytes=4_000_000)
SHARED_CORES = cluster(devices=8, concurrent=2, nics=0)

SPACES: list[tuple[int, ModelSpec, ClusterSpec, dict[str, int | str]]] = [
    (1, DENSE, cluster(), {}),
    (1, EXPERTS, TIGHT, {}),
    (2, DENSE, cluster(), {}),
    (2, WIDE, TIGHT, {}),
    (2, TIED, SHARED_CORES, {}),
    (2, dense_model(num_layers=7), TWO_A_NODE, {"recompute": "full"}),
    (2, EXPERTS, cluster(), {"zero": 1}),
    (2, TWO_HEADS, TWO_A_NODE, {"micro_batch": 2}),
    (3, TIED, cluster(devices=3), {"micro_batch": 1}),
    (4, DENSE, cluster(), {"micro_batch": 1, "recompute": "selective"}),
    (4, WIDE, TIGHT, {"micro_batch": 2, "pp": 2}),
    (4, TIED, SHARED_CORES, {"zero": 1, "pp": 2}),
    (4, dense_model(num_layers=7), TWO_A_NODE, {"micro_batch": 1, "recompute": "none"}),
    (4, EXPERTS, TWO_A_NODE, {"recompute": "none", "pp": 2, "micro_batch": 1}),
    (4, TWO_HEADS, TIGHT, {"recompute": "none", "pp": 1}),
    (6, WIDE, cluster(), {"micro_batch": 1, "pp": 3, "recompute": "none"}),
    (6, dense_model(num_layers=7), TWO_A_NODE, {"pp": 6}),
    (8, DENSE, TIGHT, {"pp": 4, "micro_batch": 1, "zero": 2}),
    (8, TIED, SHARED_CORES, {"recompute": "full", "pp": 1}),
    (8, EXPERTS, TWO_A_NODE, {"pp": 2, "zero": 1, "micro_batch": 1, "recompute": "selective"}),
]
"""Devices, model, cluster, and fixed fields, so that every space is small and each axis is free in some."""


@pytest.mark.parametrize("space", range(len(SPACES)))
def test_the_search_equals_brute_force(space: int) -> None:
    devices, model, on, fixed = SPACES[space]
    asked = question(devices, model, on, fixed=fixed, top=3)
    runs = list(every_run(asked))
    answer = search(asked)
    assert answer.considered == len(runs) > 0
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
