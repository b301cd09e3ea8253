"""Models with experts: what is conserved over ranks, what tokens travel, and figures done by hand."""

import random

import numpy as np
import pytest

from tests.bare.plans import cluster, computed_flops_per_token, moe_model
from tests.bare.test_plan_predict import run
from trainwright.plan.acts import Clock
from trainwright.plan.assembly import assembly
from trainwright.plan.collectives import domains_of_a_token
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.geometry import expert_members
from trainwright.plan.operations import AttentionCore, Dispatch, Matmul
from trainwright.plan.pieces import embedding_piece, head_piece, layer_piece, mtp_piece
from trainwright.plan.predict import predict
from trainwright.plan.table import Table
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.model import MoeMlp

LAYOUTS = [
    Layout(),
    Layout(dp=4, ep=4),
    Layout(dp=8, ep=2),
    Layout(tp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(cp=2, dp=2, ep=4),
    Layout(tp=2, pp=2, dp=2, ep=4),
    Layout(tp=2, cp=2, pp=2, dp=2, ep=8, order="tp-cp-dp-pp"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("latent", [True, False])
def test_parameters_of_all_ranks_are_the_models(layout: Layout, latent: bool) -> None:
    model = moe_model(latent=latent)
    evaluation = Evaluation(Table.of_run(run(layout, model=model)))
    figures, ranks = evaluation.parts.figures(), assembly(evaluation.shape(0)).ranks
    experts = (ranks @ figures.expert_params[:, 0]).sum() * layout.ep * layout.etp
    moe = model.layers[-1].mlp
    assert isinstance(moe, MoeMlp)
    assert experts == pytest.approx(3 * moe.num_experts * moe.expert().params(64), rel=1e-12)
    # Beside the experts, norms and routers (and MLA's way down) are copied over tp.
    attention = model.layers[0].attention
    latent_copied = 64 * (16 + 8) + 16 + 65 * 24 if latent else 0
    copied = 9 * 64 + 3 * 64 * moe.num_experts + 4 * latent_copied
    assert attention.params(64) > latent_copied
    dense = (ranks @ figures.params[:, 0]).sum() * layout.tp
    whole = model.params - 3 * moe.num_experts * moe.expert().params(64)
    assert dense == pytest.approx(whole + (layout.tp - 1) * copied, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("latent", [True, False])
def test_flops_of_all_ranks_are_the_models(layout: Layout, latent: bool) -> None:
    model = moe_model(latent=latent)
    table = Table.of_run(run(layout, model=model))
    pieces = [(layer_piece(table, layer), count) for layer, count in model.layer_counts().items()]
    pieces += [(embedding_piece(table), 1), (head_piece(table), 1)]
    # What every tp rank does alike counts once: the way down to latents. A router sees its rank's tokens alone.
    copied = {"q_down", "kv_down"}
    forward = sum(
        count * each.forward_flops[0] / (layout.tp if each.name in copied else 1)
        for piece, count in pieces
        for each in piece.operations
        if isinstance(each, (Matmul, AttentionCore))
    )
    assert 3 * forward * layout.tp * layout.cp == pytest.approx(
        computed_flops_per_token(model, 256) * 256, rel=1e-12
    )


def test_multi_token_prediction_adds_a_layer_a_head_and_a_projection() -> None:
    model = moe_model(mtp_depth=1)
    table = Table.of_run(run(model=model))
    piece = mtp_piece(table)
    assert piece.all_params[0] == model.mtp_params
    flops = sum(each.forward_flops[0] for each in piece.operations if isinstance(each, (Matmul, AttentionCore)))
    pieces = layer_piece(table, model.layers[-1]), head_piece(table)
    around = sum(
        each.forward_flops[0]
        for one in pieces
        for each in one.operations
        if isinstance(each, (Matmul, AttentionCore))
    )
    assert flops == pytest.approx(around + 2 * 256 * (2 * 64) * 64, rel=1e-12)
    more = predict(run(model=model)).step_s - predict(run(model=moe_model())).step_s
    assert more > 0


@pytest.mark.parametrize(
    ("choices", "load"),
    [({}, 1.0), ({"capacity_factor": 1.25}, 1.25), ({"expert_imbalance": 1.5}, 1.5)],
)
def test_experts_compute_what_reaches_the_busiest_rank(choices: dict[str, float], load: float) -> None:
    model = moe_model()
    table = Table.of_run(run(Layout(dp=4, ep=4), model=model, **choices))
    (up,) = [each for each in layer_piece(table, model.layers[-1]).operations if each.name == "expert up"]
    assert isinstance(up, Matmul)
    assert up.groups is not None
    assert up.m[0] * up.groups[0] == pytest.approx(256 * 2 * load)


def test_tokens_that_stay_cost_no_communication_and_others_ride_the_slowest_link() -> None:
    model = moe_model()

    def ep_s(layout: Layout, **choices: object) -> float:
        return predict(run(layout, model=model, **choices)).ledger.seconds.get("ep", 0.0)

    assert ep_s(Layout(dp=8)) == 0
    inside = ep_s(Layout(dp=8, ep=8))
    # The same eight ranks with pp between them stand on two nodes.
    outside = ep_s(Layout(dp=8, pp=2, ep=8))
    near = ep_s(Layout(dp=8, pp=2, ep=8, order="tp-cp-dp-pp"))
    assert 0 < inside < outside
    assert near < outside


def test_hierarchical_dispatch_crosses_once_for_each_node() -> None:
    moe = moe_model(num_experts=8, top_k=4).layers[-1].mlp
    assert isinstance(moe, MoeMlp)
    # Four draws of two nodes: both are met but once in eight times; of one node there is one.
    np.testing.assert_allclose(domains_of_a_token(np.array([1.0, 2.0]), 4, moe), [1, 2 * (1 - 0.5**4)])
    limited = moe.changed(num_experts=16, num_groups=8, top_groups=2)
    # Two groups of eight are picked, one in each of eight domains: four draws of the two.
    np.testing.assert_allclose(domains_of_a_token(np.array([8.0]), 4, limited), [2 * (1 - 0.5**4)])


def test_domains_of_a_token_are_those_of_random_routing() -> None:
    """Against drawing: DeepSeek-V3's router, 4 of 8 groups of 32, then 8 experts of them."""
    draw = random.Random(0)
    moe = moe_model(num_experts=256, top_k=8).layers[-1].mlp
    assert isinstance(moe, MoeMlp)
    moe = moe.changed(num_groups=8, top_groups=4)
    for nodes in (2, 4, 8, 16):
        met = 0
        for _ in range(4000):
            groups = draw.sample(range(8), 4)
            chosen = draw.sample([group * 32 + at for group in groups for at in range(32)], 8)
            met += len({expert * nodes // 256 for expert in chosen})
        assert domains_of_a_token(np.array([float(nodes)]), 8, moe)[0] == pytest.approx(met / 4000, rel=0.03)


def test_dispatch_by_hand() -> None:
    """Eight ranks in one node: 7/8 of two copies of each of 256 tokens of 64 bf16 values, over one link."""
    model = moe_model()
    table = Table.of_run(run(Layout(dp=8, ep=8), model=model))
    clock, piece = Clock(table), layer_piece(table, model.layers[-1])
    moe = model.layers[-1].mlp
    assert isinstance(moe, MoeMlp)
    (out,) = [
        one for one in clock.timed(piece, moe) if isinstance(one.each, Dispatch) and one.each.name == "dispatch"
    ]
    assert out.forward[0] == pytest.approx(2e-6 * 8**0.5 + 2 * 256 * 128 * 7 / 8 / 8e10)


def test_members_of_expert_groups_in_a_domain() -> None:
    for layout, members in [
        (Layout(dp=16, ep=16), 8),
        (Layout(dp=16, pp=2, ep=16), 4),
        (Layout(dp=16, pp=2, ep=16, order="tp-cp-dp-pp"), 8),
        (Layout(tp=4, dp=16, ep=16), 8),
        (Layout(tp=4, dp=16, ep=16, etp=4), 2),
        (Layout(tp=4, pp=4, dp=4, ep=8), 4),
    ]:
        table = Table.of_run(run(layout, model=moe_model(num_experts=16)).changed(cluster=cluster()))
        ranks = layout.expert_groups()[0]
        assert expert_members(table, table.columns.etp, table.columns.ep)[0] == members
        assert len([rank for rank in ranks if rank // 8 == ranks[0] // 8]) == members


def test_states_of_experts_are_cut_over_those_that_hold_the_same() -> None:
    model = moe_model(num_dense=0)
    whole = predict(run(Layout(dp=8), model=model, zero=1)).ledger.bytes["optimizer"]
    spread = predict(run(Layout(dp=8, ep=8), model=model, zero=1)).ledger.bytes["optimizer"]
    # Eight replicas of all experts cut eight ways are as large as an eighth of the experts, held once.
    assert spread == pytest.approx(whole, rel=1e-12)


def test_tp_with_experts_needs_sequence_parallelism() -> None:
    with pytest.raises(InvalidSpec, match=r"recipe\.sequence_parallel=False: must be true"):
        predict(run(Layout(tp=2), model=moe_model(), sequence_parallel=False))
