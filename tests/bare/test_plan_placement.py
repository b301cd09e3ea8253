"""Where groups stand, and what they hold there: the planner against the groups themselves, counted one by one."""

from typing import Any

import numpy as np
import pytest

from tests.bare.test_present_pictures import groups_of, run_of
from trainwright.plan import geometry
from trainwright.plan.assembly import assembly
from trainwright.plan.attention import attention_operations
from trainwright.plan.collectives import line
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.mlp import load
from trainwright.plan.operations import Collective
from trainwright.plan.predict import predict
from trainwright.plan.table import Table
from trainwright.spec.run import Run
from trainwright.spec.wiring import GroupAxis, wiring

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek-v3", {"pp": 4, "dp": 64, "ep": 64}),
    ("deepseek-v3", {"pp": 4, "dp": 64, "ep": 64, "order": "tp-cp-dp-pp"}),
    ("deepseek-v3", {"tp": 4, "pp": 2, "dp": 36, "ep": 16, "order": "tp-cp-dp-pp"}),
    ("deepseek-v3", {"tp": 2, "cp": 2, "pp": 3, "dp": 24, "ep": 32}),
    ("llama-3.1-405b", {"tp": 16, "pp": 2, "dp": 4}),
    ("llama-3.1-405b", {"tp": 8, "cp": 2, "pp": 9, "dp": 4}),
]


def most_near(run: Run, axis: GroupAxis, domain: int) -> set[int]:
    """How many of a group share a domain with most of its members, over all groups."""
    return {int(np.bincount([rank // domain for rank in group]).max()) for group in groups_of(wiring(run), axis)}


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_members_are_those_of_the_real_groups(model: str, layout: dict[str, Any]) -> None:
    """On racks of 72, whose size few layouts divide."""
    run = run_of(model, "gb200-nvl72", layout, global_batch=4608)
    table = Table.of_run(run)
    domain = int(table.per_domain[0])
    assert domain <= 72
    assert domain == run.layout.per_domain(72, 1)
    for axis in ("tp", "cp", "pp", "dp"):
        assert most_near(run, axis, domain) == {int(geometry.members(table, axis)[0])}
    if run.model.is_moe:
        c = table.columns
        assert most_near(run, "ep", domain) == {int(geometry.expert_members(table, c.etp, c.ep)[0])}


def test_a_pair_of_a_mesh_has_one_link() -> None:
    run = run_of("llama-3.1-8b", "mi300x", {"dp": 8})
    sizes = np.array([2, 4, 8])
    found = line(run.cluster, "all_gather", sizes, sizes).s_per_byte
    link = run.cluster.fabric.link_bytes_per_s / 7 * run.cluster.rates.link
    assert found == pytest.approx([1 / 2 / link, 3 / 4 / (3 * link), 7 / 8 / (7 * link)])
    assert line(run.cluster, "send", sizes, sizes).s_per_byte == pytest.approx(1 / link)


def test_no_rank_has_more_than_all_tokens_of_its_expert_group() -> None:
    layout = {"dp": 8, "ep": 1}
    even, uneven = (run_of("mixtral-8x7b", "h200", layout, expert_imbalance=each) for each in (1.0, 2.0))
    assert predict(even).step_s == predict(uneven).step_s
    assert load(Table.of_run(run_of("mixtral-8x7b", "h200", layout | {"ep": 2}, expert_imbalance=3.0))) == 2


def test_multi_token_prediction_has_its_words_where_it_runs() -> None:
    """The embedding's table stands on the last rank too, unless the first stage does."""
    for schedule, vpp, copies in (("1f1b", 1, 1), ("zb_v", 2, 0), ("dualpipe", 2, 0)):
        layout = {"pp": 8, "vpp": vpp, "dp": 64, "ep": 64}
        shape = Evaluation(Table.of_run(run_of("deepseek-v3", "h200", layout, schedule=schedule))).shape(0)
        made = assembly(shape)
        assert made.ranks[made.stage_of.argmax() // vpp][-1] == copies


def test_dealt_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    """8 key/value heads of 128 over tp 8 and cp 8: beside 8 query and 8 output heads a rank's one goes to 8."""
    run = run_of("llama-3.1-70b", "h100-sxm", {"tp": 8, "cp": 8, "dp": 2}, cp_method="all_to_all")
    (layer,) = run.model.layer_counts()
    operations = attention_operations(Table.of_run(run), layer)
    there, back = (each for each in operations if isinstance(each, Collective) and each.axis == "cp")
    assert there.message_bytes == 4096 / 8 * (8 + 8 + 8) * 128 * 2
    assert back.message_bytes == 4096 / 8 * 8 * 128 * 2


def test_replicas_of_shards_must_hold_all_experts() -> None:
    with pytest.raises(ValueError, match="replicas of every expert"):
        run_of("deepseek-v3", "h800", {"dp": 64, "ep": 64}, zero=3, dp_replicate=32)


@pytest.mark.parametrize(
    ("field", "size", "per_domain", "gain"),
    [
        ("link_sharp", 8, 8, 1.3),
        ("link_sharp", 6, 6, 1.19),  # measured; a rule over two points
        ("link_sharp", 2, 2, 1.0),
        ("link_sharp", 64, 8, 1.0),  # the network is in the way
        ("network_sharp", 64, 8, 1.27),
        ("network_sharp", 8, 8, 1.0),
    ],
)
def test_switches_that_add_make_all_reduce_faster(field: str, size: int, per_domain: int, gain: float) -> None:
    plain = run_of("llama-3.1-8b", "h100-sxm", {"dp": 64}, global_batch=64).cluster
    adding = plain.changed(fabric=plain.fabric.changed(**{field: True}))
    slopes = {
        op: [line(each, op, np.array([size]), np.array([per_domain])).s_per_byte[0] for each in (plain, adding)]
        for op in ("all_reduce", "all_gather")
    }
    assert slopes["all_reduce"][0] / slopes["all_reduce"][1] == pytest.approx(gain, rel=0.05)
    assert slopes["all_gather"][0] == slopes["all_gather"][1]
