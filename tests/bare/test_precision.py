"""Low precision as it is planned: bytes by hand for each recipe, casts, emulation, refusals, and what it buys."""

import re
from typing import Any

import numpy as np
import pytest

from tests.bare.conftest import Asked
from tests.bare.plans import cluster, dense_model, moe_model
from tests.bare.test_plan_predict import run
from trainwright.cli.catalogue import devices_with, load_cluster, load_model
from trainwright.cli.main import run as command
from trainwright.plan.candidates import candidates
from trainwright.plan.exact.counts import predicted_counts
from trainwright.plan.exact.standing import Standing
from trainwright.plan.exact.tensors import chunk_tensors
from trainwright.plan.gain import gain
from trainwright.plan.operations import Piece
from trainwright.plan.pieces import layer_piece
from trainwright.plan.predict import predict
from trainwright.plan.sharding import Sharing
from trainwright.plan.table import Table, marks
from trainwright.spec.answers import Prediction
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec, LacksHardware
from trainwright.spec.layout import Layout
from trainwright.spec.model import ModelSpec
from trainwright.spec.modules import modules_of, precision_text
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run

T, D, F = 200, 64, 128
"""Tokens that no block goes into evenly; widths of the small dense model, whose keys and values are 32 wide."""

BYTES_OF_A_COLUMN = {
    "fp8-delayed": 200,
    "fp8-current": 200,
    "fp8-rowwise": 200 + 4,
    "fp8-block": 200 + 2 * 4,
    "mxfp8": 200 + 7 * 1,
    "nvfp4": 104 + 13 * 1,
}
"""Of T values that a weight gradient sums: blocks of 128, 32 and 16 are 2, 7 and 13, the last one shorter but for
nvfp4's, which its transform fills up."""


def on(device: dict[str, float | None] | None = None, scales: tuple[str, ...] = ("mx", "nvfp4")) -> ClusterSpec:
    """The small cluster, its device with other peaks and with blocks' scales."""
    made = cluster()
    peaks = made.device.peak_flops_per_s.changed(**(device or {"fp4": 4e14}))
    flat = made.rates.matmul["bf16"]
    rates = made.rates.changed(matmul={**made.rates.matmul, "fp4": flat})
    return made.changed(device=made.device.changed(peak_flops_per_s=peaks, block_scales=scales), rates=rates)


def low(precision: str, layout: Layout | None = None, model: ModelSpec | None = None, **recipe: object) -> Run:
    made = run(layout or Layout(), model=model, precision=precision, **{"seq_len": T} | recipe)
    return made.changed(cluster=on())


def layer(made: Run, number: int = 0) -> Piece:
    return layer_piece(Table.of_run(made), made.model.layers[number])


def quantized(made: Run) -> int:
    """Bytes by the exact counts of a rank's step."""
    return sum(each.bytes for each in predicted_counts(made, 0).saved if each.tensors == "quantized")


@pytest.mark.parametrize(("precision", "column"), BYTES_OF_A_COLUMN.items())
def test_a_layer_keeps_each_input_once(precision: str, column: int) -> None:
    """Columns: the one input of query, key and value; that of out; the one of up and gate; that of down."""
    columns = D + D + D + F
    norms = 2 * (2 * T * D + 4 * T)
    core = 2 * T * (D + 2 * 32 + D) + 4 * T * 4
    up_and_gate = 2 * 2 * T * F
    assert layer(low(precision)).saved_bytes[0] == norms + core + up_and_gate + columns * column
    case = low(precision)
    assert quantized(case) == case.model.num_layers * case.num_microbatches * columns * column


@pytest.mark.parametrize(("precision", "column"), BYTES_OF_A_COLUMN.items())
def test_what_is_gathered_again_is_kept_as_its_shard(precision: str, column: int) -> None:
    """tp 2 with sequence parallelism: half of the tokens in bf16 before the two ways in."""
    case = low(precision, Layout(tp=2))
    per_layer = (D // 2 + F // 2) * column
    assert quantized(case) == 4 * case.num_microbatches * per_layer
    shards = 2 * (T // 2) * D * 2
    norms = 2 * (2 * (T // 2) * D + 4 * (T // 2))
    core = 2 * T * (32 + 2 * 16 + 32) + 4 * T * 2
    assert layer(case).saved_bytes[0] == norms + core + 2 * 2 * T * F // 2 + per_layer + shards
    # Without sequence parallelism nothing is gathered, and every rank casts the whole input.
    whole = low(precision, Layout(tp=2), sequence_parallel=False)
    assert quantized(whole) == 4 * case.num_microbatches * (2 * D + D // 2 + F // 2) * column


def test_an_mlp_that_runs_again_keeps_what_it_reads_and_no_casts() -> None:
    piece, column = layer(low("fp8-block")), BYTES_OF_A_COLUMN["fp8-block"]
    dropped = piece.saved_bytes[0] - piece.kept_bytes(marks("mlp"))[0]
    assert dropped == (D + F) * column + 2 * 2 * T * F - 2 * T * D
    # While its backward runs, both are there.
    assert piece.inputs_bytes(marks("mlp"))[0] == 2 * T * D


@pytest.mark.parametrize(("precision", "column"), BYTES_OF_A_COLUMN.items())
def test_every_expert_has_blocks_of_its_own(precision: str, column: int) -> None:
    """8 experts of 32, two for each token, so 50 rows each; a shared one of 32; latents of 24 and 16, heads
    4 x 16. Queries' way down and the latent's read the same input; so do the shared expert's up and gate."""
    of_50 = {"fp8-rowwise": 54, "fp8-block": 54, "mxfp8": 52, "nvfp4": 32 + 4}.get(precision, 50)
    dense = (D + 24 + 16 + 4 * 16 + D + 32) * column
    case = low(precision, model=moe_model(num_layers=1, num_dense=0))
    assert quantized(case) == case.num_microbatches * (dense + 8 * (D + 32) * of_50)
    found = {each.tensors: each.bytes for each in predicted_counts(case, 0).saved}
    assert "rows of experts" not in found
    # The router stays in bf16, and keeps what it reads.
    assert found["normed"] % case.num_microbatches == 0
    assert found["normed"] // case.num_microbatches >= 2 * T * D


@pytest.mark.parametrize(("precision", "weight"), [("fp8-current", 1.0), ("fp8-block", 1 + 4 / 128**2)])
def test_linear_layers_alone_have_casts(precision: str, weight: float) -> None:
    """Both orientations beside the copy in bf16; none of embedding, head and norms; none at all with zero 3."""
    model = dense_model()
    linear = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F)
    held = predict(low(precision)).ledger.bytes["parameters"]
    assert held == pytest.approx(model.params * 6 + 2 * weight * linear, rel=1e-12)
    sharded = predict(low(precision, Layout(dp=2), zero=3)).ledger.bytes["parameters"]
    assert sharded == pytest.approx(model.params * 4 / 2, rel=1e-12)


def test_gathering_in_the_low_format_is_for_linear_layers_alone() -> None:
    linear = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F)
    plain = low("fp8-block", Layout(dp=2), zero=1)
    cast = plain.changed(recipe=plain.recipe.changed(gather_fp8=True))
    less = predict(plain).ledger.bytes["parameters"] - predict(cast).ledger.bytes["parameters"]
    assert less == pytest.approx(2 * linear, rel=1e-12)


def test_questions_take_their_latency() -> None:
    """Two ranks, 2 us each way, 16 microbatches of 4 layers. Cut are what out and down read, the gradients of the
    five others' outputs, and once a step the seven weights; with zero 3 over two ranks weights twice a use."""

    def asked_s(layout: Layout, **recipe: object) -> float:
        current, rows = (
            predict(low(each, layout, sequence_parallel=False, **recipe)).ledger.seconds["tp"]
            for each in ("fp8-current", "fp8-rowwise")
        )
        return current - rows

    assert asked_s(Layout(tp=2)) == pytest.approx(4 * (16 * 7 + 7) * 4e-6, rel=1e-3)
    assert asked_s(Layout(tp=2, dp=2), zero=3) == pytest.approx(8 * 4 * (7 + 2 * 7) * 4e-6, rel=1e-3)


def casts_s(model: ModelSpec, wide: int, activation: float, weight: float) -> float:
    """Of a step of 16 microbatches: every input and output's gradient read once and written in both orientations,
    and every weight once; at 0.8 of 1e12 bytes/s."""
    inputs, outputs = D + D + D + F, D + 32 + 32 + D + F + F + D
    linear = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F)
    per_value = wide + 2 * activation
    return (16 * 4 * T * (inputs + outputs) * per_value + linear * (wide + 2 * weight)) / 0.8e12


@pytest.mark.parametrize(
    ("precision", "activation", "weight"),
    [("fp8-current", 1.0, 1.0), ("fp8-block", 1 + 4 / 128, 1 + 4 / 128**2), ("nvfp4", 0.5625, 0.5 + 1 / 256)],
)
def test_seconds_of_casts(precision: str, activation: float, weight: float) -> None:
    expected = casts_s(dense_model(), 2, activation, weight)
    assert predict(low(precision)).ledger.seconds["quantize"] == pytest.approx(expected, rel=1e-9)


def test_zero_3_casts_weights_at_each_use() -> None:
    """Read and written in forward and in backward of each of 8 microbatches, and not once in both orientations."""
    linear = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F)
    once, often = (
        predict(low("fp8-current", Layout(dp=2), zero=zero)).ledger.seconds["quantize"] for zero in (2, 3)
    )
    assert often - once == pytest.approx(linear * (8 * 2 * 3 - 4) / 0.8e12, rel=1e-9)


@pytest.mark.parametrize("scales", [("mx", "nvfp4"), ()])
def test_emulation_takes_the_time_of_bf16_and_of_casts(scales: tuple[str, ...]) -> None:
    """With hardware or without. A value is rounded by operators that move 25 bytes of it and made wide again by
    some that move 19; every tensor is rounded twice, each product's two operands are made wide."""
    without = on({"fp8": None, "fp4": None}, scales)
    case = low("fp8-block", emulate_precision=True).changed(cluster=without)
    plain = predict(run(seq_len=T).changed(cluster=without))
    emulated = predict(case)
    assert emulated.ledger.seconds["matmul"] == plain.ledger.seconds["matmul"]
    assert (emulated.peak_format, emulated.peak_flops_per_s) == ("bf16", plain.peak_flops_per_s)
    # Every matmul's own input, though some share one.
    read, made = 3 * D + D + 2 * D + F, D + 32 + 32 + D + F + F + D
    linear = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F)
    rounded = 16 * 4 * T * (D + D + D + F + made) * 2 * 25 + linear * (2 + 2 * (1 + 4 / 128**2))
    widened = 16 * 2 * (4 * T * (read + made) + linear) * 19
    expected = (rounded + widened) / 0.8e12
    assert emulated.ledger.seconds["quantize"] == pytest.approx(expected, rel=1e-9)
    hardware = low("fp8-block", emulate_precision=True)
    assert predict(hardware).ledger.seconds == emulated.ledger.seconds
    assert predict(hardware).ledger.bytes == emulated.ledger.bytes


def test_emulation_is_in_fp32_where_there_is_no_bf16() -> None:
    bare = on({"fp8": None, "fp4": None, "bf16": None})
    case = low("fp8-block", emulate_precision=True).changed(cluster=bare)
    plain = predict(run(seq_len=T, precision="fp32").changed(cluster=bare))
    assert predict(case).peak_format == "fp32"
    assert predict(case).ledger.seconds["matmul"] == pytest.approx(plain.ledger.seconds["matmul"], rel=0.05)


@pytest.mark.parametrize(
    ("precision", "on_cluster", "has", "lacks"),
    [
        ("fp8-block", "a100-80gb-sxm", "h100-sxm", "a100"),
        ("mxfp8", "h100-sxm", "mi355x", "h100-sxm"),
        ("nvfp4", "mi355x", "b200", "mi355x"),
    ],
)
def test_a_device_without_the_hardware_is_refused_and_others_are_named(
    capsys: pytest.CaptureFixture[str], precision: str, on_cluster: str, has: str, lacks: str
) -> None:
    options = ["--cluster", on_cluster, "--gpus", "8", "--seq-len", "1024", "--global-batch", "64"]
    assert command(["plan", "llama-3.2-1b", *options, "--precision", precision]) == 2
    said = capsys.readouterr().err
    assert re.match(
        rf"trainwright: recipe\.precision='{precision}': .* has no hardware for it; it may be fp32", said
    )
    assert "recipe.emulate_precision=true" in said
    devices = said.rsplit("devices that have it: ", 1)[1]
    assert has in devices
    assert lacks not in devices
    assert len(said.strip().splitlines()) == 1
    emulated = [*options, "--precision", precision, "--set", "recipe.emulate_precision=true", "--top", "1"]
    assert command(["plan", "llama-3.2-1b", *emulated]) == 0


def test_run_and_search_refuse_alike() -> None:
    bare = on({"fp8": None, "fp4": None})
    with pytest.raises(LacksHardware):
        low("fp8-block").changed(cluster=bare).check()
    asked = low("fp8-block")
    with pytest.raises(LacksHardware):
        candidates(Question(model=asked.model, cluster=bare, devices=1, recipe=asked.recipe))
    with pytest.raises(LacksHardware):
        low("mxfp8").changed(cluster=on(scales=())).check()
    low("fp8-block").changed(cluster=on(scales=())).check()
    assert "h100-sxm" in devices_with("fp8-block")
    with pytest.raises(InvalidSpec, match=r"emulate_precision=True: needs an fp8 or fp4 precision, not bf16"):
        Recipe.parse({"seq_len": 8, "global_batch": 1, "emulate_precision": True})


@pytest.mark.parametrize("model", [dense_model(bias=True), moe_model(mtp_depth=1), dense_model(norm="layernorm")])
def test_modules_are_the_trainers(model: ModelSpec) -> None:
    """Every parameter of the program belongs to a row, and matrices in low precision are the linear layers'."""
    case = low("fp8-block", model=model)
    rows = {row.name: row for row in modules_of(model, case.recipe)}
    standing = Standing(case, 0)
    tensors = [each for chunk in standing.chunks for each in chunk_tensors(standing, chunk)]
    found = set()
    for each in tensors:
        parts = each.name.removesuffix(".weight").removesuffix(".bias").split(".")
        if parts[0] in ("layers", "later"):
            parts = parts[2:] if parts[0] == "layers" or parts[2] != "layer" else parts[3:]
        found.add(".".join(parts))
    inner = {"attention.query_norm", "attention.latent_norm", "hidden_norm", "token_norm"}
    assert found - set(rows) == found & inner
    assert set(rows) - found <= {"attention.core"}
    kept = {"embedding", "head", "mlp.router"} | {name for name in rows if "norm" in name or "core" in name}
    assert {name for name, row in rows.items() if row.fprop == ("e4m3/1x128", "e4m3/128x128")} == set(rows) - kept
    assert all(rows[name].why and rows[name].master == "fp32" for name in rows)
    assert sum(row.modules for name, row in rows.items() if name == "attention.out") == 4 + model.mtp_depth


def test_operands_of_the_three_products() -> None:
    rows = {row.name: row for row in modules_of(dense_model(), low("fp8-delayed").recipe)}
    up = rows["mlp.up"]
    assert (up.fprop, up.dgrad, up.wgrad) == (
        ("e4m3/tensor", "e4m3/tensor"),
        ("e5m2/tensor", "e4m3/tensor"),
        ("e5m2/tensor", "e4m3/tensor"),
    )
    text = precision_text(dense_model(), low("nvfp4").recipe)
    assert "Hadamard" in text[0]
    assert any("weight e2m1/16x16" in line for line in text)
    assert all(each.source for each in LOW_PRECISION.values())


def answered(**recipe: Any) -> tuple[Question, Prediction]:
    case = low("fp8-block", **recipe)
    return Question(model=case.model, cluster=on(), devices=1, recipe=case.recipe), predict(case)


def test_the_causes_of_what_it_buys_add_up() -> None:
    question, plan = answered()
    found = gain(question, plan)
    assert found.without is not None
    assert found.peak_ratio == 2
    assert sum(each.plain_s for each in found.causes) == pytest.approx(found.without.step_s, rel=1e-12)
    assert sum(each.low_s for each in found.causes) == pytest.approx(plan.step_s, rel=1e-12)
    beyond = sum(each.beyond_s(2) for each in found.causes)
    assert beyond == pytest.approx(plan.step_s - found.without.step_s / 2, rel=1e-12)
    linear = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F)
    # Flash attention does two matmuls forward and five backward, each over the keys before a query.
    core = 4 * 7 * 2 * 4 * 16 * (T + 1) / 2
    whole = 6 * (linear + 512 * D) + core
    assert found.low_flops_share == pytest.approx(6 * linear / whole, rel=1e-9)
    assert sum(each.share for each in found.matmuls) < 1
    assert found.layer.low_bytes < found.layer.plain_bytes
    dollars = found.usd_per_trillion_tokens(plan)
    assert dollars == pytest.approx(1e12 / (16 * T) * plan.step_s / 3600 * 2.0)


def test_flops_alone_never_reach_the_ratio() -> None:
    """Where matmuls are bound by compute each is twice as fast; the step isn't, for attention and casts."""
    model = load_model("llama-3.1-8b")
    case = low("fp8-current", model=model, seq_len=8192, global_batch=1)
    big = on().changed(device=on().device.changed(memory_bytes=10**12))
    question = Question(model=model, cluster=big, devices=1, recipe=case.recipe)
    found = gain(question, predict(case.changed(cluster=big)))
    assert {round(each.speedup, 6) for each in found.matmuls if each.n > 4000} == {2.0}
    assert found.speedup is not None
    assert 1 < found.speedup < 2
    assert found.speedup < 1 / (1 - found.low_flops_share / 2)
    seconds = {each.cause: each for each in found.causes}
    head_s = 3 * 2 * 8192 * model.vocab_size * model.d_model / 0.7e14
    assert seconds["matmuls of head and router"].plain_s == pytest.approx(head_s, rel=1e-9)
    assert seconds["matmuls of head and router"].low_s == pytest.approx(head_s, rel=1e-9)
    assert seconds["attention"].plain_s == seconds["attention"].low_s


def test_plan_says_what_it_buys_and_what_modules_get(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "llama-3.2-1b", "--cluster", "h100-sxm", "--gpus", "8", "--seq-len", "4096"]
    options += ["--global-batch", "64", "--precision", "fp8-block", "--explain-precision", "--tokens", "1B"]
    found = asked(*options)
    gained, plan = found["gain"], found["plans"][0]
    assert sum(each["low_s"] for each in gained["causes"]) == pytest.approx(plan["step_s"])
    assert sum(each["plain_s"] for each in gained["causes"]) == pytest.approx(gained["without"]["step_s"])
    assert gained["without"]["recipe"]["precision"] == "bf16"
    assert {each["name"] for each in found["precision"]} >= {"mlp.up", "head", "attention.core"}
    assert command(options) == 0
    said = capsys.readouterr().out
    assert "What fp8-block buys" in said
    assert "Why it isn't 2.00x" in said
    assert "attention.query" in said
    plain = asked(*options[: options.index("--precision")])
    assert not {"gain", "precision"} & set(plain)


def test_h100_lacks_no_peak_but_the_scales() -> None:
    assert load_cluster("h100-sxm").peak("fp8") is not None
    assert "h100-sxm" not in devices_with("mxfp8")


def test_a_layer_whose_mlp_runs_again_holds_both_of_its_inputs() -> None:
    """While it runs, it has what a layer keeps without recompute, and what it starts from."""
    model = dense_model(num_layers=1, d_ff=2048, vocab_size=258)
    again = low("fp8-block", model=model, recompute="selective", recompute_ops=["mlp"])
    more = [predict(each).ledger.bytes["activations"] for each in (low("fp8-block", model=model), again)]
    assert more[1] - more[0] == 2 * T * D


def test_what_is_gathered_is_low_where_matmuls_are() -> None:
    """Messages, and what they are gathered into: a byte for two of linear layers' weights."""
    linear, params = 4 * (D * (D + 32 + 32) + D * D + 3 * D * F), dense_model().params
    plain, cast = (low("fp8-current", Layout(dp=2), zero=3, gather_fp8=gathers) for gathers in (False, True))
    tables = [Table.of_run(each) for each in (plain, cast)]
    seconds = [
        Sharing.of(table).seconds(table, np.array([[float(count)]]), np.array([[float(linear)]])).gather
        for table, count in zip(tables, (params - linear / 2, params), strict=True)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)
    held = [predict(each).ledger.bytes["communication"] for each in (plain, cast)]
    # Of the layer that computes and the next, or of what is gathered at the loss.
    assert held[0] - held[1] in (pytest.approx(linear / 4), pytest.approx(2 * linear / 4))
