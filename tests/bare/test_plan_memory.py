"""Bytes by published formulas: the GPT layer's 34 s b h + 5 a s^2 b, what recompute drops, states, offload."""

import pytest

from tests.bare.plans import dense_model, moe_model
from tests.bare.test_plan_predict import run
from trainwright.plan.pieces import layer_piece
from trainwright.plan.predict import predict
from trainwright.plan.sharding import HOST_UPDATE_BYTES_PER_S
from trainwright.plan.table import Table, marks
from trainwright.spec.layout import Layout
from trainwright.spec.ledger import BytesCause

S, B, H, A = 256, 2, 64, 4


def gpt_layer(layout: Layout, **recipe: object):
    """A GPT layer: dropout, MHA, biases, an MLP of 4 h without a gate, attention that keeps its scores."""
    model = dense_model(num_kv_heads=A, d_ff=4 * H, gated=False, norm="layernorm", bias=True)
    choices = {"micro_batch": B, "attention_kernel": "unfused", "dropout": 0.1} | recipe
    return layer_piece(Table.of_run(run(layout, model=model, **choices)), model.layers[0])


def test_a_gpt_layer_keeps_34_sbh_and_5_as2b() -> None:
    """Korthikanti et al., arXiv:2205.05198 eq. 1 (a mask is one byte a value)."""
    assert gpt_layer(Layout()).tensor_bytes[0] == 34 * S * B * H + 5 * A * S**2 * B


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_divides_all_of_it(tp: int) -> None:
    """ibid. eq. 4."""
    assert gpt_layer(Layout(tp=tp)).tensor_bytes[0] == (34 * S * B * H + 5 * A * S**2 * B) / tp


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_alone_leaves_ten_sbh(tp: int) -> None:
    """ibid. eq. 2: norms' inputs, the two branches' inputs and their dropout masks are whole on every rank."""
    kept = gpt_layer(Layout(tp=tp), sequence_parallel=False).tensor_bytes[0]
    assert kept == S * B * H * (10 + 24 / tp) + 5 * A * S**2 * B / tp


def test_selective_recompute_leaves_34_sbh() -> None:
    """ibid. eq. 6."""
    piece = gpt_layer(Layout())
    dropped = piece.saved_bytes[0] - piece.kept_bytes(marks("attention"))[0]
    assert dropped == 5 * A * S**2 * B
    assert piece.tensor_bytes[0] - dropped == 34 * S * B * H


def test_full_recompute_leaves_2_sbh() -> None:
    assert gpt_layer(Layout()).kept_bytes(1 << 10)[0] > 0
    from trainwright.plan.table import FULL

    assert gpt_layer(Layout()).kept_bytes(FULL)[0] == 2 * S * B * H


def test_named_operations_drop_what_they_make_again() -> None:
    """A Llama layer: norms give up their outputs and keep a number per token, the activation its product."""
    table = Table.of_run(run())
    piece = layer_piece(table, dense_model().layers[0])
    tokens = 256
    assert piece.saved_bytes[0] - piece.kept_bytes(marks("norm"))[0] == 2 * tokens * 64 * 2
    assert piece.saved_bytes[0] - piece.kept_bytes(marks("activation"))[0] == tokens * 128 * 2
    # The whole MLP keeps its input, the norm's output.
    assert piece.saved_bytes[0] - piece.kept_bytes(marks("mlp"))[0] == 3 * tokens * 128 * 2


@pytest.mark.parametrize(("qk_norm", "norms"), [("per_head", 4 + 2), ("all_heads", 2)])
def test_norms_of_queries_and_keys_keep_them_and_a_statistic_each(qk_norm: str, norms: int) -> None:
    """Four heads of queries and two of keys, 16 wide, in bf16; a statistic is fp32."""
    table, layer = Table.of_run(run()), dense_model().layers[0]
    with_norms = layer.changed(attention=layer.attention.changed(qk_norm=qk_norm))
    more = layer_piece(table, with_norms).saved_bytes[0] - layer_piece(table, layer).saved_bytes[0]
    assert more == 256 * ((4 + 2) * 16 * 2 + norms * 4)


def test_a_parallel_residual_is_kept_once() -> None:
    model = dense_model()
    beside = model.changed(parallel_residual=True)
    both = [layer_piece(Table.of_run(run(model=each)), each.layers[0]).saved_bytes[0] for each in (model, beside)]
    assert both[0] - both[1] == 256 * 64 * 2


def test_latent_up_projections_give_up_queries_keys_and_values() -> None:
    model = moe_model()
    piece = layer_piece(Table.of_run(run(model=model)), model.layers[0])
    dropped = piece.saved_bytes[0] - piece.kept_bytes(marks("latent_up"))[0]
    assert dropped == 256 * 4 * (24 + 24 + 16) * 2


def test_queries_without_a_latent_are_not_given_up() -> None:
    model = moe_model()
    layer = model.layers[0]
    plain = layer.changed(attention=layer.attention.changed(q_lora_rank=None))
    piece = layer_piece(Table.of_run(run(model=model)), plain)
    assert piece.saved_bytes[0] - piece.kept_bytes(marks("latent_up"))[0] == 256 * 4 * (24 + 16) * 2
    again = [each.name for each in piece.operations if each.again & marks("latent_up")]
    assert again == ["kv_up"]


def test_heads_that_cp_exchanges_are_kept_whatever_is_made_again() -> None:
    model = moe_model()
    for cp, dropped in ((1, True), (2, False)):
        exchanged = run(Layout(cp=cp), model=model, cp_method="all_to_all")
        piece = layer_piece(Table.of_run(exchanged), model.layers[0])
        assert (piece.kept_bytes(marks("latent_up"))[0] < piece.saved_bytes[0]) == dropped


def test_recompute_of_some_layers_lies_between_none_and_all() -> None:
    peaks, steps = [], []
    for choices in ({}, {"recompute_layers": 1}, {"recompute_layers": 3}, {"recompute_layers": None}):
        mode = {"recompute": "full"} if choices else {}
        predicted = predict(run(micro_batch=8, **mode, **choices))
        peaks.append(predicted.ledger.bytes["activations"])
        steps.append(predicted.step_s)
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert len(set(steps)) == 4


@pytest.mark.parametrize(("moments", "per_moment"), [("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / 256)])
def test_moments_by_format(moments: str, per_moment: float) -> None:
    base = run()
    changed = base.with_value("recipe.optimizer.moments", moments)
    assert predict(changed).ledger.bytes["optimizer"] == 2 * per_moment * dense_model().params


def test_muon_has_one_moment_of_a_layers_matrices() -> None:
    model = dense_model()
    held = predict(run().with_value("recipe.optimizer.name", "muon")).ledger.bytes["optimizer"]
    around = model.embedding_params + model.head_params + model.norm_params
    assert held == pytest.approx(4 * (model.params + around), rel=1e-12)


def test_offload_leaves_the_device_and_costs_the_host_link() -> None:
    base = run(Layout(dp=2), zero=1)
    away = base.with_value("recipe.optimizer.offload", True)
    held, kept = predict(away), predict(base)
    gone: tuple[BytesCause, ...] = ("optimizer",)
    assert all(held.ledger.bytes[cause] == 0 for cause in gone)
    params = dense_model().params
    assert kept.ledger.bytes["parameters"] - held.ledger.bytes["parameters"] == 4 * params / 2
    slow = away.changed(cluster=away.cluster.with_value("node.host_bytes_per_s", 1e9))
    # Gradients out and weights back; the update's 28 bytes a parameter at the host's rate, for every device of a
    # node, and no longer at the device's.
    link_s = params / 2 * (4 + 2) / 1e9
    host_s = params / 2 * 28 * base.cluster.node.devices / HOST_UPDATE_BYTES_PER_S
    device_s = params / 2 * 28 / (base.cluster.device.memory_bytes_per_s * base.cluster.rates.memory)
    difference = predict(slow).ledger.seconds["optimizer"] - kept.ledger.seconds["optimizer"]
    assert difference == pytest.approx(link_s + host_s - device_s, rel=1e-9)


def test_chunked_loss_holds_one_chunk_of_logits() -> None:
    model = dense_model(vocab_size=65536)
    # Logits in bf16, the fp32 softmax, and that rounded; of a chunk the gradient of the one before is there too.
    whole = predict(run(model=model)).ledger.bytes["logits"]
    logits, matrix = whole / 8, 65536 * model.d_model
    # The matrix's gradient is summed in fp32, of which the half counts among activations.
    chunked = predict(run(model=model, loss_chunks=8)).ledger.bytes["logits"]
    assert chunked == pytest.approx(10 * logits / 8 + 2 * matrix)


def test_parameters_that_are_not_resharded_stay_gathered() -> None:
    kept = predict(run(Layout(dp=4), zero=3, reshard_after_forward=False)).ledger
    freed = predict(run(Layout(dp=4), zero=3)).ledger
    model = dense_model()
    # All of it gathered in bf16, and beside the loss what the last layer was gathered into.
    assert kept.bytes["communication"] == 2 * model.params + 2 * model.layer_params(model.layers[0])
    assert kept.seconds["dp"] < freed.seconds["dp"]


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("breadth_first", 2)])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_zero_2_reduces_as_often_as_the_rows_say(schedule: str, vpp: int, microbatches: int) -> None:
    from trainwright.plan.sharding import reductions
    from trainwright.spec.schedule import SCHEDULES, round_ends

    base = run(Layout(pp=2, dp=2, vpp=vpp), schedule=schedule, zero=2, global_batch=2 * microbatches)
    for row in SCHEDULES[schedule].rows(2, vpp, microbatches):
        ends = [chunk for _, chunk in round_ends(row)]
        assert reductions(Table.of_run(base))[0] == ends.count(0)


def test_zero_2_of_an_interleaved_schedule_holds_one_chunks_gradients() -> None:
    model = dense_model(num_layers=8)
    held = (
        predict(run(Layout(pp=2, dp=2, vpp=2), model=model, schedule="interleaved_1f1b", zero=2)).stages[1].ledger
    )
    alone = (
        predict(run(Layout(pp=2, dp=2, vpp=2), model=model, schedule="interleaved_1f1b", zero=1)).stages[1].ledger
    )
    more = held.bytes["communication"] - alone.bytes["communication"]
    head = model.vocab_size * model.d_model + model.norm_params
    assert more == pytest.approx((2 * model.layer_params(model.layers[0]) + head) * 4)
