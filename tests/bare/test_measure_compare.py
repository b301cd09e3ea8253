"""Residuals by hand-made numbers, utilization by its convention, records by their lines."""

import json

import pytest

from trainwright.measure.compare import compare, within_tolerance
from trainwright.measure.mfu import hardware_utilization, utilization
from trainwright.measure.records import parse_rank_records, parse_samples
from trainwright.spec.answers import ComparedQuantity, Comparison, Prediction, StageMemory
from trainwright.spec.cluster import ClusterSpec, Curve, Device, Fabric, Node, PeakFlops, Provenance, Rates
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.ledger import Ledger
from trainwright.spec.model import DenseMlp, GroupedQueryAttention, LayerGroup, LayerSpec, ModelSpec
from trainwright.spec.recipe import Recipe
from trainwright.spec.record import RankRecord
from trainwright.spec.run import DataSpec, Run

MODEL = ModelSpec(
    name="tiny",
    d_model=64,
    vocab_size=512,
    layer_groups=(
        LayerGroup(
            repeat=2,
            pattern=(
                LayerSpec(
                    attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=16), mlp=DenseMlp(d_ff=128)
                ),
            ),
        ),
    ),
)
FLAT = Curve(size=(1.0,), fraction=(1.0,))
CLUSTER = ClusterSpec(
    name="desk",
    device=Device(
        name="core",
        kind="cpu",
        peak_flops_per_s=PeakFlops(fp32=1e9),
        memory_bytes=10**9,
        memory_bytes_per_s=1e9,
        num_sms=1,
    ),
    node=Node(devices=2, concurrent_devices=2),
    fabric=Fabric(link="wire", link_domain=2, link_bytes_per_s=1e9),
    rates=Rates(
        matmul={"fp32": FLAT},
        attention_forward={"fp32": FLAT},
        attention_backward={"fp32": FLAT},
        memory=1.0,
        launch_s=0.0,
        link=1.0,
        link_latency_s=0.0,
        network=1.0,
        network_latency_s=0.0,
    ),
    provenance=dict.fromkeys(
        ("device", "node", "fabric", "rates", "framework_bytes"), Provenance(kind="assumed", source="for a test")
    ),
)
RUN = Run(
    layout=Layout(tp=2),
    recipe=Recipe(seq_len=100, global_batch=10, precision="fp32"),
    data=DataSpec(vocab_size=512),
    model=MODEL,
    cluster=CLUSTER,
)
LEDGER = Ledger(
    seconds={"matmul": 1.0, "attention": 0.5, "launch": 0.25, "tp": 0.125, "bubble": 0.0, "optimizer": 0.125},
    bytes={
        "parameters": 100,
        "gradients": 50,
        "optimizer": 200,
        "activations": 30,
        "logits": 20,
        "framework": 77,
    },
)
PREDICTION = Prediction(
    layout=RUN.layout,
    recipe=RUN.recipe,
    ledger=LEDGER,
    stages=(StageMemory(pp_rank=0, layers=2, ledger=LEDGER),),
    mfu=0.25,
    hfu=0.25,
    convention="full",
    peak_format="fp32",
    peak_flops_per_s=1e9,
    model_flops_per_device=5e8,
    capacity_bytes=1e9,
)


def record(rank: int, **choices: object) -> RankRecord:
    values: dict[str, object] = {
        "run_hash": RUN.hash,
        "rank": rank,
        "pp_rank": 0,
        "steps_timed": 9,
        "step_s": 2.5,
        "tokens_per_s": 400.0,
        "seconds": {"compute": 2.0, "tp": 0.25, "optimizer": 0.125, "host": 0.125},
        "bytes": {"parameters": 100, "gradients": 50, "optimizer": 210},
        "peak_bytes": 450.0,
    }
    return RankRecord.parse({**values, **choices})


def by_name(quantities: tuple[ComparedQuantity, ...]) -> dict[str, tuple[float, float, float]]:
    return {each.name: (each.predicted, each.seen, each.residual) for each in quantities}


@pytest.fixture
def comparison() -> Comparison:
    faster = {"compute": 1.0, "tp": 0.75, "optimizer": 0.125, "host": 0.625}
    return compare(RUN, PREDICTION, [record(0), record(1, seconds=faster, peak_bytes=400.0)])


def test_seconds_are_means_over_ranks_and_predicted_causes_are_summed(comparison: Comparison) -> None:
    seconds = by_name(comparison.seconds)
    assert seconds["compute"] == (1.75, 1.5, -0.25)
    assert seconds["tp"] == (0.125, 0.5, 0.375)
    assert seconds["pp"] == (0.0, 0.0, 0.0)
    assert seconds["host"] == (0.0, 0.375, 0.375)
    residuals = sum(residual for _, _, residual in seconds.values())
    assert residuals == pytest.approx(by_name(comparison.quantities)["step_s"][2])


def test_speed(comparison: Comparison) -> None:
    quantities = by_name(comparison.quantities)
    assert quantities["step_s"] == (2.0, 2.5, 0.5)
    assert quantities["tokens_per_s"] == (500.0, 400.0, -100.0)
    seen_mfu = 400.0 / 2 * MODEL.flops_per_token(100, "full") / 1e9
    assert quantities["mfu"][:2] == (0.25, pytest.approx(seen_mfu))


def test_memory_is_of_the_fullest_rank_without_the_framework(comparison: Comparison) -> None:
    fullest, parts = comparison.ranks[0], by_name(comparison.bytes)
    quantities = by_name(fullest.quantities)
    assert fullest.rank == 0
    assert quantities["peak_bytes"] == (400, 450, 50)
    assert quantities["optimizer_bytes"] == (200, 210, 10)
    assert parts["working set"] == (50, 90, 40)
    assert sum(residual for _, _, residual in parts.values()) == quantities["peak_bytes"][2]


def test_gradients_that_come_after_the_peak_are_not_seen_at_it() -> None:
    ledger = Ledger(bytes={**LEDGER.bytes, "gradients": 0}, seconds=LEDGER.seconds)
    stage = StageMemory(pp_rank=0, layers=2, ledger=ledger)
    prediction = PREDICTION.model_copy(update={"stages": (stage,)})
    comparison = compare(RUN, prediction, [record(0), record(1)])
    assert by_name(comparison.bytes)["gradients"] == (0, 0, 0)
    assert by_name(comparison.bytes)["working set"] == (50, 140, 90)
    assert by_name(comparison.ranks[0].quantities)["peak_bytes"] == (350, 450, 100)


def test_tolerance_is_a_fraction_of_the_prediction(comparison: Comparison) -> None:
    assert within_tolerance(comparison, 0.25)
    assert not within_tolerance(comparison, 0.24)


def test_a_short_run_has_no_seconds_by_cause() -> None:
    seen = compare(RUN, PREDICTION, [record(0, seconds={}), record(1, seconds={})])
    assert seen.seconds == ()
    assert by_name(seen.quantities)["step_s"][1] == 2.5


def test_records_of_another_run_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="run_hash='feed': the ledger is of another run"):
        compare(RUN, PREDICTION, [record(0), record(1, run_hash="feed")])
    with pytest.raises(InvalidSpec, match="ledger='1 ranks': the run has 2"):
        compare(RUN, PREDICTION, [record(0)])


def test_utilization_names_its_counting_and_compares_only_alike() -> None:
    named = {"seq_len": 100, "tokens_per_s_per_device": 200.0, "peak_format": "bf16", "peak_flops_per_s": 1e9}
    full = utilization(MODEL, convention="full", **named)
    causal = utilization(MODEL, convention="causal", **named)
    assert full.fraction == pytest.approx(200 * MODEL.flops_per_token(100, "full") / 1e9)
    assert "MFU" in str(full)
    assert "dense bf16 peak" in str(full)
    assert "causal attention" in str(causal)
    assert full.ratio_to(full.changed(flops_per_s=full.flops_per_s / 2)) == pytest.approx(2.0)
    with pytest.raises(InvalidSpec, match="convention='full': does not compare with causal"):
        full.ratio_to(causal)
    with pytest.raises(InvalidSpec, match="peak_format='bf16': does not compare with fp8"):
        full.ratio_to(full.changed(peak_format="fp8"))
    hfu = hardware_utilization(full, recomputed_flops_per_s=1e8)
    assert hfu.fraction == pytest.approx(full.fraction + 0.1)
    assert "recompute counted" in str(hfu)
    with pytest.raises(InvalidSpec, match="recompute_counted"):
        hfu.ratio_to(full)


def text_of(*records: RankRecord) -> str:
    return "".join(f"{each.model_dump_json()}\n" for each in records)


def test_records_are_read_in_order_of_rank() -> None:
    assert parse_rank_records(text_of(record(1), record(0)) + "\n", "l") == (record(0), record(1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "l: has no lines"),
        (text_of(record(0))[:-40], "l, line 1: not JSON: .*it ends early"),
        (text_of(record(0)) + "Segmentation fault\n", "l, line 2: not JSON"),
        (text_of(record(0)) + "[1]\n", "l, line 2: .* is not a JSON object"),
        (text_of(record(0)) + '{"rank": 1}\n', "l, line 2: run_hash: missing"),
        (text_of(record(0)) + json.dumps({**record(1).plain(), "rnk": 3}), "l, line 2: rnk: unknown field.*rank"),
        (text_of(record(0), record(2)), r"l: holds ranks \[0, 2\]; each rank must be there once"),
        (text_of(record(0), record(0)), r"l: holds ranks \[0, 0\]"),
        ("[" * 100_000, "l, line 1: not JSON: can't be read"),
        ("1" * 5_000, "l, line 1: not JSON: can't be read"),
    ],
)
def test_wrong_lines_are_named(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        parse_rank_records(text, "l")


def test_samples() -> None:
    line = '{"op": "copy", "precision": "fp32", "size": 8.0, "work": 8.0, "busy_ranks": 1, "seconds": [0.5, 0.25]}'
    (sample,) = parse_samples(line, "s")
    assert sample.seconds == (0.5, 0.25)
    with pytest.raises(InvalidSpec, match="s, line 1: op='copied'"):
        parse_samples(line.replace("copy", "copied"), "s")
