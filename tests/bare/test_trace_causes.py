"""Traces into causes: intervals made by hand, names as the libraries write them, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest

from tests.bare.conftest import Asked
from tests.bare.traces import collective, event, kernel, step, trace
from trainwright.cli import catalogue
from trainwright.cli.files import read_run
from trainwright.cli.main import run as command
from trainwright.measure.trace import parse_trace
from trainwright.measure.trace_causes import seen_step, shared_out
from trainwright.spec import toml
from trainwright.spec.explanation import RECOMPUTED, SeenStep
from trainwright.spec.run import Run

ROOT = Path(__file__).parents[2]
MATMUL = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"
FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>"
NORM = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>(int)"
ADAM = (
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float>>"
)
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@pytest.fixture
def example() -> Run:
    """16 ranks: tp 4, pp 2, dp 2."""
    return read_run(ROOT / "runs" / "example-16_a100x16.toml", ["recipe.recompute=none"])


def seen(text: str, run: Run) -> SeenStep:
    return seen_step(parse_trace(text, "trace.json", run), run, catalogue.kernels())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (MATMUL, "matmul"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment",
            "matmul",
        ),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matmul"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64", "matmul"),
        ("void cutlass::device_kernel<deep_gemm::sm90_bf16_gemm>", "matmul"),
        (FLASH, "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        (NORM, "elementwise"),
        ("triton_poi_fused_add_mul_silu_0", "elementwise"),
        (ADAM, "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        (REDUCE, "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "communication"),
        ("gloo:all_reduce", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::mm", "matmul"),
        ("aten::mul", "elementwise"),
    ],
)
def test_names_of_kernels(name: str, kind: str) -> None:
    assert catalogue.kernels().kind(name) == kind


def test_names_of_collectives_and_groups() -> None:
    table = catalogue.kernels()
    names = [REDUCE, GATHER, SEND, "_allgather_base", "allreduce", "all_to_allv", "send", "broadcast", "barrier"]
    assert [table.collective_of(name) for name in names] == [
        *("reduce_scatter", "all_gather", "send_receive", "all_gather"),
        *("all_reduce", "all_to_all", "send_receive", "broadcast", "other"),
    ]
    said = ["TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp", "DATA_PARALLEL_GROUP_WITH_CP", "mesh_dp_shard", "mesh_pp"]
    assert [table.axis(each) for each in said] == ["tp", "tp", "dp", "dp", "pp"]
    assert table.axis("EXPERT_MODEL_PARALLEL_GROUP") == table.axis("mesh_ep") == "ep"
    assert table.axis("CONTEXT_PARALLEL_GROUP") == "cp"
    assert table.axis("default_pg") is None


def test_every_moment_has_one_cause() -> None:
    """By hand: matmul 0-4, dp 2-7 (of which 4-5 elementwise), copies 6-9, nothing 9-10."""
    marked = [(0.0, 4.0, "matmul"), (2.0, 7.0, "dp"), (4.0, 5.0, "elementwise"), (6.0, 9.0, "copies")]
    seconds = shared_out(marked, (0.0, 10.0))
    assert seconds == {"matmul": 4, "elementwise": 1, "dp": 2, "copies": 2, "idle": 1}


def test_exposed_and_hidden_communication_of_a_gpu(example: Run) -> None:
    group = {"Process_Group_Description": "mesh_dp_shard", "Group_size": 2, "Process_Group_Ranks": "[0, 8]"}
    tensor = {"Process_Group_Description": "undefined", "Group_size": 4, "Process_Group_Ranks": "[0, 1, 2, 3]"}
    stages = {"Process_Group_Description": "undefined", "Group_size": 2}
    events = [
        step(3, 0, 1000),
        step(4, 1000, 1000),
        event("cpu_op", "aten::mm", 5, 10, 4242),
        kernel("a kernel of the step before", -500, 400),
        kernel(MATMUL, 0, 400),
        collective(GATHER, "_allgather_base", 100, 200, **group),  # hidden
        kernel(FLASH, 400, 100),
        collective(REDUCE, "_reduce_scatter_base", 450, 150, **group),  # 50 hidden, 100 exposed
        kernel(NORM, 600, 50),
        collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "allreduce", 650, 250, **tensor),  # exposed
        kernel(MATMUL, 1000, 500),
        collective(SEND, "recv", 1500, 300, **stages),  # exposed: a bubble
        kernel(ADAM, 1800, 100),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 1900, 40, 7),
        kernel(NORM, 1900, 40),  # in the update
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1940, 20, 7),
    ]
    found = seen(trace(events, distributedInfo={"backend": "nccl", "rank": 0, "world_size": 16}), example)
    assert found.steps == 2
    assert found.step_s == pytest.approx(1e-3)
    micros = {cause: round(value * 1e6, 3) for cause, value in found.seconds.items() if value}
    assert micros == {
        "matmul": 450,
        "attention": 50,
        "elementwise": 25,
        "dp": 50,
        "tp": 125,
        "pp": 150,
        "optimizer": 70,
        "copies": 10,
        "idle": 70,
    }
    assert {axis: round(value * 1e6, 3) for axis, value in found.hidden.items()} == {"dp": 125}
    kinds = {kind: round(value * 1e6, 3) for kind, value in found.collectives.items()}
    assert kinds == {"all_gather": 100, "reduce_scatter": 75, "all_reduce": 125, "send_receive": 150}
    assert "steps 3 to 4" in found.source


def test_steps_of_the_device_go_before_those_of_the_program(example: Run) -> None:
    """The program runs ahead: its step ends long before its kernels do."""
    later = event("gpu_user_annotation", "ProfilerStep#3", 500, 1000, 7)
    found = seen(trace([step(3, 0, 100), later, kernel(MATMUL, 600, 800)]), example)
    assert found.step_s == pytest.approx(1e-3)
    assert found.seconds["matmul"] == pytest.approx(8e-4)


def test_where_a_run_recomputes_compute_is_one_cause(example: Run) -> None:
    again = example.with_value("recipe.recompute", "full")
    events = [step(1, 0, 1000), kernel(MATMUL, 0, 400), kernel(FLASH, 400, 100), kernel(NORM, 500, 300)]
    found = seen(trace(events), again)
    assert found.seconds[RECOMPUTED] == pytest.approx(8e-4)
    assert "matmul" not in found.seconds


def test_a_cpu_without_our_annotations(example: Run) -> None:
    """gloo's threads communicate 100 to 400; the program computes until 200, then has nothing open, and computes
    from 300 to 800: a hundred microseconds are exposed. Of one axis alone, the axis is known."""
    run = example.with_values([("layout.tp", 1), ("layout.pp", 1), ("layout.vpp", 1), ("layout.dp", 16)])
    run = run.with_values([("recipe.schedule", "1f1b"), ("recipe.global_batch", 64), ("layout.stage_layers", [])])
    events = [
        step(1, 0, 1000),
        event("cpu_op", "aten::linear", 0, 200, 4242),
        event("cpu_op", "aten::addmm", 20, 150, 4242),
        event("user_annotation", "gloo:all_reduce", 100, 300, 77),
        event("cpu_op", "aten::mul", 300, 500, 4242),
        event("user_annotation", "gloo:send", 10, 20, 4242),  # until it has left, beside what the program does
        event("cpu_op", "aten::mm", 0, 1000, 99),  # of another thread
    ]
    found = seen(trace(events), run)
    micros = {cause: round(value * 1e6, 3) for cause, value in found.seconds.items() if value}
    assert micros == {"matmul": 200, "elementwise": 500, "dp": 100, "idle": 200}
    assert {axis: round(value * 1e6, 3) for axis, value in found.hidden.items()} == {"dp": 220}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (trace([step(1, 0, 10), kernel(MATMUL, 0, 5)])[:-40], "ends early, as if its writer had been stopped"),
        (trace([step(1, 0, 10), kernel(MATMUL, 0, 5)])[:-1], "ends early, as if its writer had been stopped"),
        (trace([step(1, 0, 10), kernel(MATMUL, 0, 5)])[:-2], "ends early, as if its writer had been stopped"),
        ("{}", "has no traceEvents; expected is the Chrome JSON"),
        ('{"traceEvents": 3}', "has no traceEvents"),
        ("[1, 2]", "no whole step"),
        (trace([kernel(MATMUL, 0, 5)]), "no whole step (an annotation ProfilerStep#N"),
        (trace([step(1, 0, 10)]), "has neither kernels nor operators"),
        (trace([step(1, 0, 10), kernel(MATMUL, 50, 5)]), "its steps have no kernels on the device"),
        (trace([step(1, 0, 10), {**kernel(MATMUL, 0, 5), "ts": "x"}]), "ts='x', dur=5"),
        (trace([step(1, 0, 10), {**kernel(MATMUL, 0, 5), "dur": float("nan")}]), "ts=0, dur=nan"),
        (trace([step(1, 0, 10)], trainwright_run_hash="0123456789ab"), "is of another run than the run file"),
        (trace([step(1, 0, 10)], distributedInfo={"world_size": 8}), "world_size=8"),
        ("{" + "[" * 100_000, "not"),
        ('{"a": 1, }', "not JSON"),
    ],
)
def test_what_is_no_trace_of_the_run_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], example: Run
) -> None:
    (tmp_path / "run.toml").write_text(toml.write(example))
    (tmp_path / "trace.json").write_text(text)
    assert command(["explain", str(tmp_path / "trace.json")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_explain_a_trace(tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str], example: Run) -> None:
    (tmp_path / "run.toml").write_text(toml.write(example))
    events = [step(5, 0, 4e5), kernel(MATMUL, 0, 1e5), kernel(FLASH, 1e5, 2e5), kernel(NORM, 3e5, 9e4)]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(trace(events, trainwright_run_hash=example.hash).encode()))
    document = asked("explain", path)
    assert document["run_hash"] == example.hash
    assert document["step_s"]["seen"] == pytest.approx(0.4)
    causes = {each["cause"]: each for each in document["causes"]}
    assert causes["attention"]["seen_s"] == pytest.approx(0.2)
    gaps = [each["gap_s"] for each in document["causes"]]
    assert gaps == sorted(gaps, reverse=True)
    for side in ("predicted", "seen"):
        points = sum(each[f"{side}_mfu_points"] for each in document["causes"])
        whole = 100 + points + document["other_mfu_points"][side]
        assert whole == pytest.approx(100 * document["mfu"][side])
    # By the definition of MFU: the model's FLOPs of a step, over what 16 devices at their peak do in it.
    flops = example.model.flops_per_token(example.recipe.seq_len, "full") * example.recipe.tokens_per_step
    assert document["mfu"]["seen"] == pytest.approx(flops / (16 * document["mfu_peak"]["flops_per_s"] * 0.4))
    assert command(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "where the MFU went" in text
    assert text.split("By cause")[1].splitlines()[3].split()[0] == document["causes"][0]["cause"]
    path.write_bytes(path.read_bytes()[:-30])
    assert command(["explain", str(path)]) == 2
    assert "ends early or is damaged" in capsys.readouterr().err


def test_advice_is_what_the_planner_finds_faster(tmp_path: Path, asked: Asked, example: Run) -> None:
    """Setting the fields that are named makes the prediction as much shorter as is said."""
    (tmp_path / "run.toml").write_text(toml.write(example))
    (tmp_path / "trace.json").write_text(trace([step(5, 0, 4e5), kernel(MATMUL, 0, 1e5)]))
    document = asked("explain", tmp_path / "trace.json")
    advised = [each for cause in document["causes"] for each in cause["try"]]
    assert advised
    before = asked("predict", tmp_path / "run.toml")
    for each in advised[:3]:
        fields = [
            part for name, value in each["fields"].items() for part in ("--set", f"{name}={json.dumps(value)}")
        ]
        after = asked("predict", tmp_path / "run.toml", *fields)
        assert after["fits"]
        assert 1 - after["step_s"] / before["step_s"] == pytest.approx(each["saves"])
        assert each["saves"] > 0.01


def test_no_run_no_explanation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "trace.json"
    path.write_text(trace([step(1, 0, 10)]))
    assert command(["explain", str(path)]) == 2
    assert "name the run that it is of with --run run.toml" in capsys.readouterr().err
