"""Predictions: what must be conserved over ranks, what must sum, and figures done by hand."""

import numpy as np
import pytest

from tests.bare.plans import cluster, computed_flops_per_token, dense_model
from trainwright.plan.assembly import assembly
from trainwright.plan.collectives import collective_s as group_s
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.operations import AttentionCore, Collective, Matmul
from trainwright.plan.pieces import embedding_piece, head_piece, layer_piece
from trainwright.plan.predict import predict
from trainwright.plan.table import Floats, Ints, Table
from trainwright.spec.cluster import ClusterSpec, CollectiveOp, CollectiveRate
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.ledger import BytesCause
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Overlap, Recipe
from trainwright.spec.run import Budget, Run

STATES: tuple[BytesCause, ...] = ("parameters", "gradients", "optimizer")

LAYOUTS = [
    Layout(),
    Layout(dp=4),
    Layout(tp=2),
    Layout(tp=4, dp=2),
    Layout(pp=2),
    Layout(pp=4, dp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(cp=2, tp=2),
    Layout(tp=2, cp=2, pp=2, dp=2),
]


ONE = Layout()


def run(layout: Layout = ONE, *, model: ModelSpec | None = None, **recipe: object) -> Run:
    choices = {"seq_len": 256, "global_batch": 16, "micro_batch": 1, "zero": 0, "precision": "bf16"} | recipe
    return Run(
        layout=layout,
        recipe=Recipe.parse(choices),
        model=model or dense_model(),
        cluster=cluster(),
    ).changed(data={"vocab_size": 258})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_of_all_ranks_are_the_models(layout: Layout) -> None:
    """Summed over tp and pp, each tensor once; what tensor parallelism copies (norms) counts tp times."""
    model = dense_model(num_kv_heads=4)
    evaluation = Evaluation(Table.of_run(run(layout, model=model)))
    params = assembly(evaluation.shape(0)).ranks @ evaluation.parts.figures().params[:, 0]
    copied = (model.num_layers * 2 + 1) * model.norm_params
    assert layout.tp * params.sum() == pytest.approx(model.params + (layout.tp - 1) * copied, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("window", [None, 64])
def test_flops_of_all_ranks_are_the_models(layout: Layout, window: int | None) -> None:
    model = dense_model(num_kv_heads=4, window=window, gated=window is None)
    table = Table.of_run(run(layout, model=model))
    pieces = [
        (layer_piece(table, model.layers[0]), model.num_layers),
        (embedding_piece(table), 1),
        (head_piece(table), 1),
    ]
    forward = sum(
        count * each.forward_flops[0]
        for piece, count in pieces
        for each in piece.operations
        if isinstance(each, (Matmul, AttentionCore))
    )
    ranks_per_microbatch = layout.tp * layout.cp
    tokens = 256
    assert 3 * forward * ranks_per_microbatch == pytest.approx(
        computed_flops_per_token(model, 256) * tokens, rel=1e-12
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_causes_sum_to_the_step_and_to_the_peak(layout: Layout, recompute: str) -> None:
    predicted = predict(run(layout, recompute=recompute))
    assert predicted.step_s == pytest.approx(sum(predicted.ledger.seconds.values()))
    assert all(seconds >= 0 for seconds in predicted.ledger.seconds.values())
    assert predicted.peak_bytes == max(stage.ledger.total_bytes for stage in predicted.stages)
    assert (predicted.hfu > predicted.mfu) == (recompute != "none")


def test_a_layer_saves_what_its_operations_read() -> None:
    """One Llama layer in bf16, by hand: seq 256, batch 1, D 64, N 4, K 2, H 16, F 128."""
    table = Table.of_run(run())
    tokens, size = 256, 2
    norms = 2 * (tokens * 64 * size + 4 * tokens)  # each norm: its input and an fp32 statistic
    inputs = 2 * tokens * 64 * size  # what the qkv and the up projections read
    core = tokens * (64 + 2 * 32 + 64) * size + 4 * tokens * 4  # q, k and v, out, logsumexp
    mlp = 3 * tokens * 128 * size  # gate, up, their product
    assert layer_piece(table, dense_model().layers[0]).saved_bytes[0] == norms + inputs + core + mlp


def test_sequence_parallelism_divides_all_saved_bytes_by_tp() -> None:
    model = dense_model(num_kv_heads=4)
    whole = layer_piece(Table.of_run(run(model=model)), model.layers[0]).saved_bytes[0]
    cut = layer_piece(Table.of_run(run(Layout(tp=4), model=model)), model.layers[0]).saved_bytes[0]
    assert cut == pytest.approx(whole / 4, rel=1e-12)


@pytest.mark.parametrize(
    ("zero", "per_param"),
    [(0, (6, 4, 8)), (1, (2 + 4 / 4, 4, 8 / 4)), (2, (2 + 4 / 4, 4 / 4, 8 / 4)), (3, (4 / 4, 4 / 4, 8 / 4))],
)
def test_states_of_mixed_precision_by_zero_stage(zero: int, per_param: tuple[float, float, float]) -> None:
    predicted = predict(run(Layout(dp=4), zero=zero))
    states = [predicted.ledger.bytes[cause] / dense_model().params for cause in STATES]
    np.testing.assert_allclose(states, per_param, rtol=1e-12)


def test_fp32_needs_sixteen_bytes_a_parameter() -> None:
    predicted = predict(run(precision="fp32"))
    assert sum(predicted.ledger.bytes[cause] for cause in STATES) == 16 * dense_model().params


def test_recompute_trades_memory_for_time() -> None:
    none, full = predict(run(micro_batch=8)), predict(run(micro_batch=8, recompute="full"))
    assert full.ledger.bytes["activations"] < none.ledger.bytes["activations"]
    assert full.step_s > none.step_s


def test_the_first_rank_of_1f1b_holds_most() -> None:
    stages = predict(run(Layout(pp=4))).stages
    activations = [stage.ledger.bytes["activations"] for stage in stages]
    assert activations[1] > activations[2]
    assert stages[-1].ledger.bytes["logits"] > 0
    assert all(stage.ledger.bytes["logits"] == 0 for stage in stages[:-1])


def test_the_bubble_of_equal_stages_is_p_minus_1_microbatches() -> None:
    model = dense_model(num_layers=8, vocab_size=258)
    seconds = predict(run(Layout(pp=2), model=model)).ledger.seconds
    busy = sum(seconds[cause] for cause in ("matmul", "attention", "elementwise", "launch"))
    assert seconds["bubble"] == pytest.approx(busy / 16, rel=0.15)


def test_budget_gives_days_hours_and_dollars() -> None:
    base = run(Layout(dp=4))
    predicted = predict(base.changed(budget=Budget(tokens=1_000_000)))
    steps = -(-1_000_000 // (16 * 256))
    assert predicted.gpu_hours == pytest.approx(steps * predicted.step_s * 4 / 3600)
    assert predicted.days == pytest.approx(steps * predicted.step_s / 86400)
    assert predicted.cost_usd == pytest.approx(2.0 * (predicted.gpu_hours or 0))


def test_overlap_hides_dp_communication_and_its_switch_does_not() -> None:
    hidden = predict(run(Layout(dp=8), zero=1)).ledger.seconds["dp"]
    shown = predict(run(Layout(dp=8), zero=1, overlap=Overlap(dp=False))).ledger.seconds["dp"]
    assert hidden == pytest.approx(shown / 2)


def test_blocking_sends_cost_more() -> None:
    free = predict(run(Layout(pp=4))).ledger.seconds["pp"]
    assert predict(run(Layout(pp=4), overlap=Overlap(pp=False))).ledger.seconds["pp"] > free


def collective_s(on: ClusterSpec, op: CollectiveOp, message: Floats, size: Ints, stride: Ints) -> Floats:
    """Over groups of `size` ranks that stand `stride` apart."""
    return group_s(on, op, message, size, np.clip(on.fabric.link_domain // stride, 1, size))


def test_ring_collectives_by_hand() -> None:
    """8 ranks in one domain: 7/8 of the message at 0.8 x 100 GB/s, and 7 hops of 2 us; all_reduce twice that."""
    message, eight, one = np.array([8e8]), np.array([8]), np.array([1])
    gather = collective_s(cluster(), "all_gather", message, eight, one)[0]
    assert gather == pytest.approx(7 * 2e-6 + 7e8 / 8e10)
    assert collective_s(cluster(), "all_reduce", message, eight, one)[0] == pytest.approx(2 * gather)
    assert collective_s(cluster(), "all_gather", message, one, one)[0] == 0


def test_a_ring_over_nodes_uses_the_nics_of_its_members() -> None:
    """16 ranks 8 apart have one NIC each; 16 neighbouring ranks have 8 NICs a node, so links bound them."""
    message, sixteen = np.array([1.6e9]), np.array([16])
    apart = collective_s(cluster(), "all_gather", message, sixteen, np.array([8]))[0]
    assert apart == pytest.approx(15 * 1e-5 + 1.5e9 / (0.8 * 1e10))
    together = collective_s(cluster(), "all_gather", message, sixteen, np.array([1]))[0]
    assert together == pytest.approx(14 * 2e-6 + 1e-5 + 1.5e9 / (0.8 * 8e10))


def test_a_measured_collective_goes_before_the_formula() -> None:
    base = cluster()
    line = CollectiveRate(op="all_gather", group_size=4, latency_s=0.5, bytes_per_s=1e6)
    measured = base.changed(rates=base.rates.changed(collectives=(line,)))
    seconds = collective_s(measured, "all_gather", np.array([2e6]), np.array([4]), np.array([1]))[0]
    assert seconds == pytest.approx(2.5)


def test_more_ranks_than_cores_wait_for_cores() -> None:
    shared = run(Layout(dp=4)).changed(cluster=cluster(devices=4, concurrent=2, nics=0))
    alone = run(Layout(dp=4)).changed(cluster=cluster(devices=4, nics=0))
    seconds = predict(shared).ledger.seconds
    busy = sum(seconds[cause] for cause in ("matmul", "attention", "elementwise", "launch"))
    assert seconds["core_sharing"] == pytest.approx(busy, rel=1e-9)
    assert predict(alone).ledger.seconds["core_sharing"] == 0


def test_a_tied_head_on_another_stage_holds_its_own_copy() -> None:
    model = dense_model(tied=True, vocab_size=4096)
    one, two = predict(run(model=model)), predict(run(Layout(pp=2), model=model))
    table = 4096 * 64
    assert one.ledger.bytes["optimizer"] == 8 * model.params
    assert sum(stage.ledger.bytes["optimizer"] for stage in two.stages) == 8 * (model.params + table)


def test_what_does_not_fit_says_by_how_much_and_why() -> None:
    small = run(micro_batch=16).changed(cluster=cluster(memory_bytes=10**6))
    predicted = predict(small)
    assert not predicted.fits
    assert predicted.short_by_bytes == predicted.peak_bytes - 10**6
    assert predicted.largest_bytes_cause in ("activations", "logits")


def test_a_precision_without_a_rate_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"recipe\.precision='fp64'"):
        predict(run(precision="fp64"))


def with_slower_nics(base: Run) -> Run:
    return base.changed(cluster=base.cluster.with_value("fabric.nic_bytes_per_s", 1e8))


@pytest.mark.parametrize(
    ("layout", "crosses"),
    [
        (Layout(tp=2, cp=2, pp=2, dp=2), True),  # one stage's cp peers share a node, its dp peers don't
        (Layout(tp=2, cp=2, dp=2), False),
        (Layout(tp=2, pp=4, dp=2), True),
        (Layout(cp=2, dp=4), False),
    ],
)
def test_dp_over_nodes_needs_the_network(layout: Layout, crosses: bool) -> None:
    """Ranks are ordered tp, cp, pp, dp: the next dp peer is tp*cp*pp away, whatever cp is."""
    base = run(layout, zero=1)
    slower = predict(with_slower_nics(base)).ledger.seconds["dp"] > predict(base).ledger.seconds["dp"]
    assert slower == crosses


def test_hsdp_replicas_on_other_nodes_need_the_network_once_a_step() -> None:
    def network_s(micro_batch: int) -> float:
        choices = {"zero": 2, "dp_replicate": 2, "micro_batch": micro_batch, "overlap": Overlap(dp=False)}
        base = run(Layout(cp=2, pp=4, dp=2), **choices)
        return predict(with_slower_nics(base)).ledger.seconds["dp"] - predict(base).ledger.seconds["dp"]

    assert network_s(1) > 0
    assert network_s(1) == pytest.approx(network_s(4))  # fewer microbatches, still one reduction over replicas


def test_a_send_has_its_own_nic_and_goes_no_faster_than_a_link() -> None:
    message, size = np.array([1e9]), np.array([64])
    for stride in (1, 2, 8):
        seconds = collective_s(cluster(), "send", message, size, np.array([stride]))[0]
        assert seconds == pytest.approx(1e-5 + 1e9 / (0.8 * 1e10))


def test_context_parallelism_gathers_keys_and_values_again_and_holds_them() -> None:
    layouts = Layout(cp=2), Layout()
    cut, whole = (layer_piece(Table.of_run(run(layout)), dense_model().layers[0]) for layout in layouts)
    kv_bytes = 256 * 2 * 2 * 16 * 2
    gradients = (3 * 128 + 2 * 64) * 2
    assert whole.working_bytes[0] == 256 * gradients
    assert cut.working_bytes[0] == 128 * gradients + 2 * kv_bytes
    (gather,) = [each for each in cut.operations if isinstance(each, Collective) and each.axis == "cp"]
    assert gather.message_bytes[0] == kv_bytes
    assert gather.backward == ("all_gather", "reduce_scatter")


def test_the_unit_around_the_layers_is_gathered_too() -> None:
    """zero 3: embedding and head stay gathered in bf16; their gradients come when activations are gone."""
    model = dense_model(vocab_size=65536)
    held = predict(run(Layout(dp=4), model=model, zero=3)).ledger.bytes["communication"]
    root = 2 * 65536 * 64 + 64
    assert held >= 2 * root


def test_hfu_counts_recomputed_attention_as_mfu_counts_attention() -> None:
    """Full recompute does every layer's forward again: a third of the layers' model FLOPs, none of the head's."""
    base = run(recompute="full", seq_len=2048)
    predicted = predict(base)
    model = base.model
    head = 6 * model.vocab_size * model.d_model
    layers = model.flops_per_token(2048, "full") - head
    assert predicted.hfu / predicted.mfu == pytest.approx(1 + layers / 3 / (layers + head), rel=1e-12)
