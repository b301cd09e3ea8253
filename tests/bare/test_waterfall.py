"""The waterfall sums from the peak to the MFU exactly, and its bars are what can be worked out by hand."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.bare.plans import dense_model, moe_model
from tests.bare.test_plan_predict import run
from tests.golden.cases import CASES as GOLDEN_CASES
from trainwright.cli.main import run as command
from trainwright.plan.predict import predict
from trainwright.present.waterfall import waterfall_section
from trainwright.spec.answers import ComputedFlops
from trainwright.spec.layout import Layout
from trainwright.spec.run import Run
from trainwright.spec.waterfall import waterfall, waterfall_of

EXAMPLE = str(Path(__file__).parents[2] / "runs" / "example-16_a100x16.toml")
MOE = moe_model(num_layers=8, num_dense=1, mtp_depth=1)

CASES = {
    "one device": run(),
    "pipeline": run(Layout(tp=2, pp=2, dp=2), recompute="full"),
    "context": run(Layout(cp=2, dp=2), zero=3),
    "fp8": run(Layout(dp=2), precision="fp8-current"),
    "unfused": run(attention_kernel="unfused"),
    "window": run(model=dense_model(window=64)),
    "experts": run(Layout(tp=2, pp=2, dp=2, ep=2), model=MOE, expert_imbalance=1.3),
    "both ways": run(Layout(pp=2, vpp=2, dp=2, ep=2), model=MOE, schedule="dualpipe"),
    "405B": GOLDEN_CASES["llama-3.1-405b 16384 h100"],
    "cores shared": run(Layout(pp=4, dp=2)).with_value("cluster.node.concurrent_devices", 2),
    "fast software": run(Layout(pp=2)).with_value("cluster.rates.time_factor", 0.8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_bars_sum_from_the_peak_to_the_mfu(case: Run) -> None:
    predicted = predict(case)
    fell = waterfall_of(predicted)
    assert abs(fell.mfu - predicted.mfu) < 1e-12
    assert abs(1 + sum(bar.share for bar in fell.bars) - predicted.mfu) < 1e-12
    rate = fell.peak_flops_per_s + sum(bar.flops_per_s for bar in fell.bars)
    assert rate == pytest.approx(predicted.flops_per_s_per_device, rel=1e-12)
    counted = sum(each.counted_flops for each in predicted.computed.values())
    assert counted == pytest.approx(predicted.model_flops_per_device, rel=1e-12)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_operation_is_faster_than_its_peak(case: Run) -> None:
    predicted = predict(case)
    for kind, computed in predicted.computed.items():
        assert computed.at_peak_s <= predicted.ledger.seconds[kind]
    named = {bar.name: bar.share for bar in waterfall_of(predicted).bars}
    for cause, seconds in predicted.ledger.seconds.items():
        if cause not in predicted.computed:
            assert named.get(cause, 0.0) == pytest.approx(-seconds / predicted.step_s, abs=1e-14)


def shares(case: Run) -> dict[str, float]:
    return {bar.name: bar.share for bar in waterfall_of(predict(case)).bars}


def test_bars_of_one_device_by_hand() -> None:
    """Attention computes 3.5 times the masked forward, and 3 times the whole one, which is twice that, is
    counted."""
    predicted = predict(run())
    flops = dense_model().flops_per_token(256, "full") * 256 * 16
    forward = flops - 6 * dense_model().active_matmul_params * 256 * 16
    attention = predicted.computed["attention"]
    assert attention.counted_flops == pytest.approx(forward)
    # Of 256 keys a query meets 128.5.
    computed = forward * 3.5 / 6 * 257 / 256
    assert attention.mean_flops == attention.busiest_flops == pytest.approx(computed)
    bar = shares(run())["attention counted in full"]
    assert bar == pytest.approx((forward - computed) / 1e14 / predicted.step_s)
    assert "other ranks compute less" not in shares(run())
    assert "matmuls that are not counted" not in shares(run())


def test_formats_of_a_lower_peak() -> None:
    """Attention and the head stay in bf16, at half of the peak of fp8."""
    predicted = predict(run(precision="fp8-current"))
    head = 6 * 512 * 64 * 256 * 16
    lost_s = (head + predicted.computed["attention"].busiest_flops) * (1 / 1e14 - 1 / 2e14)
    found = shares(run(precision="fp8-current"))["formats of a lower peak"]
    assert found == pytest.approx(-lost_s / predicted.step_s)
    assert "formats of a lower peak" not in shares(run())


def test_what_is_computed_and_not_counted() -> None:
    even = run(Layout(dp=2, ep=2), model=MOE)
    padded = even.with_value("recipe.capacity_factor", 2.0)
    assert shares(even)["matmuls that are not counted"] < 0, "the modules of multi-token prediction"
    computed = [predict(case).computed["matmul"].mean_flops for case in (even, padded)]
    assert computed[1] > computed[0]
    assert predict(even).computed["matmul"].counted_flops == predict(padded).computed["matmul"].counted_flops
    # Latent attention's down projections are computed by both tp ranks alike.
    plain = moe_model(num_layers=8, num_dense=1)
    assert shares(run(Layout(tp=2), model=plain))["matmuls that are not counted"] < 0
    assert abs(shares(run(model=plain)).get("matmuls that are not counted", 0.0)) < 1e-12


def test_the_last_stage_has_the_head_and_computes_more() -> None:
    assert shares(run(Layout(pp=2)))["other ranks compute less"] < 0


def test_plain_values_do() -> None:
    computed = ComputedFlops(busiest_flops=4.0, mean_flops=3.0, at_peak_s=1.0, counted_flops=5.0)
    fell = waterfall({"matmul": 2.0, "bubble": 1.0, "software": -0.5}, 4.0, {"matmul": computed})
    assert [(bar.name, bar.share) for bar in fell.bars] == [
        ("matmuls below their peak", pytest.approx(-0.4)),
        ("bubble", pytest.approx(-0.4)),
        ("software", pytest.approx(0.2)),
        ("other ranks compute less", pytest.approx(-0.1)),
        ("matmuls counted beyond those computed", pytest.approx(0.2)),
    ]
    assert fell.mfu == pytest.approx(5.0 / 2.5 / 4.0)


def test_the_view_and_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    predicted = predict(CASES["pipeline"])
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(waterfall_section(predicted))
    text = captured.get()
    assert "From the dense bf16 peak to MFU" in text
    assert f"{predicted.mfu:.1%}" in text.splitlines()[-1] or f"{predicted.mfu:.1%}" in text
    assert command(["predict", EXAMPLE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    fell = document["waterfall"]
    assert set(fell) == {"peak_tflops_per_gpu", "bars", "mfu"}
    assert set(fell["bars"][0]) == {"name", "mfu_points", "tflops_per_gpu"}
    assert fell["mfu"] == pytest.approx(document["mfu"], abs=1e-12)
    assert 100 + sum(bar["mfu_points"] for bar in fell["bars"]) == pytest.approx(100 * document["mfu"])
    assert command(["predict", EXAMPLE]) == 0
    assert "matmuls below their peak" in capsys.readouterr().out
