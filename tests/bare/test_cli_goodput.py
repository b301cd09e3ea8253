"""What scripts rely on of `goodput`, and of the budget with failures in `plan` and `predict`; the 54 days of Llama
3; one line for bad input."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.bare.conftest import Asked
from trainwright.cli import catalogue
from trainwright.cli.files import read_run
from trainwright.cli.main import run
from trainwright.plan.goodput.savings import failures_per_node_day, nodes_per_rack, saved_bytes, savings
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Optimizer

RUNS = Path(__file__).parents[2] / "runs"
EXAMPLE = RUNS / "example-16_a100x16.toml"
LLAMA = RUNS / "llama-3.1-405b_h100x16384_8k.toml"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a refused command says."""
    capsys.readouterr()
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("trainwright: ").strip()


def test_the_54_days_of_llama_3(asked: Asked) -> None:
    """arXiv:2407.21783 s3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100s, and more than 90% of the
    time effective. Rate from the paper, restarts and storage as the catalogue assumes."""
    document = asked("goodput", LLAMA, "--days", "50", "--runs", "400")
    assert document["nodes"] == 2048
    assert 1000 * document["failures_per_node_day"] == pytest.approx(3.79, abs=0.005)
    assert document["mttf_s"] == pytest.approx(54 * 86400 / 419, rel=2e-3)
    assert document["saved_bytes"] == pytest.approx(4.87e12, rel=2e-3)
    assert document["saved_bytes"] / 16384 == pytest.approx(297e6, rel=2e-3)
    for way in document["judged"]:
        seen = way["simulated"]
        days = 50 / seen["ettr"]
        assert seen["failures"] / days * 54 == pytest.approx(419, rel=0.01)
        assert 0.90 < seen["ettr"] < 0.95
        assert seen["ettr"] == pytest.approx(way["complete"], rel=2e-3)


KEYS = {
    *("run_name", "device", "devices", "nodes", "failures_per_node_day", "failures_source", "mttf_s", "step_s"),
    *("useful_s", "saved_bytes", "storage_bytes_per_s", "usd_per_device_hour", "spares", "nodes_in_repair"),
    *(
        "recovery",
        "recovery_sources",
        "judged",
        "placement",
        "mttf",
        "mttf_source",
        "changes",
        "over_interval",
        "over_devices",
        "notes",
    ),
}


def test_keys_and_sums(asked: Asked) -> None:
    document = asked("goodput", EXAMPLE, "--days", "30", "--runs", "50")
    assert set(document) == KEYS
    assert [way["saving"]["kind"] for way in document["judged"]] == ["synchronous", "asynchronous", "memory"]
    for way in document["judged"]:
        assert set(way) == {
            *("saving", "interval_s", "interval_steps", "storage_every", "checkfreq_steps", "young_s", "daly_s"),
            *("exact_s", "failures_alone", "first_order", "first_order_holds", "complete", "lost_s", "simulated"),
            *("notes", "average_storage_bytes_per_s"),
        }
        seen = way["simulated"]
        assert set(seen) == {"runs", "seed", "ettr", "ettr_error", "failures", "lost_s", "wall_s", "usd"}
        assert seen["wall_s"]["p10"] <= seen["wall_s"]["p50"] <= seen["wall_s"]["p90"]
        price = document["usd_per_device_hour"] * 16 / 3600
        assert seen["usd"]["p90"] == pytest.approx(seen["wall_s"]["p90"] * price)
        assert way["interval_s"] == pytest.approx(way["interval_steps"] * document["step_s"])
    published = {row["devices"]: row["published"]["mttf_s"] for row in document["mttf"] if "published" in row}
    assert published == pytest.approx({8: 47.7 * 86400, 1024: 7.9 * 3600, 16384: 1.8 * 3600, 131_072: 0.23 * 3600})
    line = {row["devices"]: row["published_line_s"] / 3600 for row in document["mttf"]}
    assert line[1024] == pytest.approx(28.8, abs=0.05)


def test_the_same_bytes_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "1", "2"):
        run(["goodput", str(EXAMPLE), "--days", "300", "--runs", "50", "--seed", seed, "--json"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0] != said[2]


def test_options_go_before_the_cluster(asked: Asked) -> None:
    plain = asked("goodput", EXAMPLE, "--days", "30", "--runs", "10")
    told = asked(
        *("goodput", EXAMPLE, "--days", "30", "--runs", "10", "--failure-rate", "100", "--detect-s", "5"),
        *("--restart-s", "7", "--storage-bytes-per-s", "1e8", "--repair-s", "864000", "--replicas", "4"),
        *("--interval-s", "600"),
    )
    assert told["mttf_s"] == pytest.approx(86400 / (0.1 * told["nodes"]))
    assert told["failures_source"] == "assumed: set by the user"
    write_s = told["saved_bytes"] / (told["nodes"] * 1e8)
    assert told["judged"][1]["saving"]["durable_s"] == pytest.approx(write_s)
    assert told["recovery"]["repair_s"] == 864000
    assert told["recovery_sources"]["detect_s"] == "assumed: set by the user"
    assert plain["recovery_sources"]["detect_s"].startswith("assumed: MegaScale")
    assert told["judged"][1]["saving"]["recover_s"] == pytest.approx(12 + write_s)
    assert told["nodes_in_repair"] == pytest.approx(10 * 0.1 * told["nodes"])
    assert told["placement"]["groups"] == {"4": 1}
    assert told["judged"][0]["interval_s"] == pytest.approx(600, abs=told["step_s"])
    assert told["judged"][0]["interval_s"] != plain["judged"][0]["interval_s"]
    rate = asked(
        "goodput", EXAMPLE, "--days", "30", "--runs", "10", "--set", "cluster.failures_per_device_day=1e-2"
    )
    assert rate["failures_per_node_day"] == pytest.approx(1e-2 * 16 / rate["nodes"])


def test_a_runs_own_interval(asked: Asked) -> None:
    saves = ("--set", "checkpoint.every_steps=50")
    document = asked("goodput", EXAMPLE, "--days", "30", "--runs", "10", *saves)
    by_kind = {way["saving"]["kind"]: way["interval_steps"] for way in document["judged"]}
    assert by_kind["asynchronous"] == 50 != by_kind["synchronous"]
    waits = asked(
        *("goodput", EXAMPLE, "--days", "30", "--runs", "10"), *saves, "--set", "checkpoint.asynchronous=false"
    )
    by_kind = {way["saving"]["kind"]: way["interval_steps"] for way in waits["judged"]}
    assert by_kind["synchronous"] == 50 != by_kind["asynchronous"]


def test_a_save_that_takes_longer_than_the_interval_is_said(asked: Asked) -> None:
    document = asked(
        *("goodput", EXAMPLE, "--days", "30", "--runs", "10", "--storage-bytes-per-s", "1e6", "--interval-s", "1")
    )
    way = document["judged"][1]
    assert way["interval_s"] >= way["saving"]["durable_s"] - way["saving"]["blocked_s"]
    assert "a save takes longer" in way["notes"][0]


def test_out_of_range_is_said_and_a_run_that_gets_nowhere_is_not_simulated(asked: Asked) -> None:
    often = asked("goodput", LLAMA, "--days", "1", "--runs", "10", "--failure-rate", "20")
    assert not often["judged"][0]["first_order_holds"]
    assert "out of its range" in often["judged"][0]["notes"][0]
    never = asked("goodput", LLAMA, "--days", "1", "--runs", "10", "--failure-rate", "1000")
    assert "simulated" not in never["judged"][0]
    assert any("gets nowhere" in note for note in never["judged"][0]["notes"])


@pytest.mark.parametrize(
    "options",
    [
        ("--failure-rate", "1e15", "--detect-s", "0"),
        ("--failure-rate", "1e-12", "--interval-s", "1e-12"),
        ("--interval-s", "1e15"),
        ("--failure-rate", "1e6", "--storage-bytes-per-s", "1"),
        ("--restart-s", "1e15", "--repair-s", "1e15", "--days", "1e-12"),
    ],
    ids=lambda options: " ".join(options),
)
def test_extreme_values_have_an_answer(asked: Asked, options: tuple[str, ...]) -> None:
    days = () if "--days" in options else ("--days", "30")
    for way in asked("goodput", EXAMPLE, "--runs", "10", *days, *options)["judged"]:
        assert 0 <= way["complete"] <= 1


def test_one_node_has_no_memory_tier(asked: Asked, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    plan = ("plan", "llama-local-6m", "--cluster", "local-cpu", "--gpus", "2", "--seq-len", "256")
    asked(*plan, "--global-batch", "8", "--tokens", "10M", "--out", path)
    document = asked("goodput", path, "--failure-rate", "10000", "--runs", "20")
    assert [way["saving"]["kind"] for way in document["judged"]] == ["synchronous", "asynchronous"]
    assert "no memory tier" in document["notes"][0]
    assert "placement" not in document


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--days='none': the run has no token budget" in complaint(
        capsys, "goodput", RUNS / "megatron-1t_a100x512_2k.toml"
    )
    days = ("--days", "30")
    assert "--failure-rate=-1.0: must be a number above zero" in complaint(
        capsys, "goodput", EXAMPLE, *days, "--failure-rate", "-1"
    )
    assert "--restart-s=nan: must be a number from zero on" in complaint(
        capsys, "goodput", EXAMPLE, *days, "--restart-s", "nan"
    )
    assert "--days=1000001.0: must be at most 1,000,000" in complaint(
        capsys, "goodput", EXAMPLE, "--days", "1000001"
    )
    assert "cluster.recovery.storage_bytes_per_s=1e-09: a save would take" in complaint(
        capsys, "goodput", EXAMPLE, *days, "--storage-bytes-per-s", "1e-9"
    )
    assert "--days=inf" in complaint(capsys, "goodput", EXAMPLE, "--days", "inf")
    assert "--replicas=1: must be from 2 to 64" in complaint(capsys, "goodput", EXAMPLE, *days, "--replicas", "1")
    assert "--runs=5: must be from 10" in complaint(capsys, "goodput", EXAMPLE, *days, "--runs", "5")
    assert "--seed=-1" in complaint(capsys, "goodput", EXAMPLE, *days, "--seed", "-1")
    assert "there is no directory" in complaint(
        capsys, "goodput", EXAMPLE, *days, "--svg", tmp_path / "nowhere" / "a.svg"
    )
    local = RUNS / "llama-local-6m_cpu4.toml"
    assert "cluster.failures_per_device_day='none': is not known of local-cpu; give --failure-rate" in complaint(
        capsys, "goodput", local, *days
    )


def test_the_drawing_is_whole_and_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        assert run(["goodput", str(EXAMPLE), "--days", "30", "--runs", "10", "--svg", str(path)]) == 0
    text = one.read_text()
    assert text == two.read_text()
    assert text.rstrip().endswith("</svg>")
    for words in ("work between two saves (s)", "devices, each at its best interval", "beside steps"):
        assert words in text
    assert "Replicas in memory" in capsys.readouterr().out


PLAN = (
    "plan",
    "llama-3.1-8b",
    "--cluster",
    "h100-sxm",
    "--gpus",
    "8",
    "--seq-len",
    "4096",
    "--global-batch",
    "64",
)


def test_plan_and_predict_have_the_budget_with_failures(asked: Asked, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    plan = asked(*PLAN, "--tokens", "100B", "--out", path)["plans"][0]
    failing = plan["with_failures"]
    assert set(failing) == {"kind", "ettr", "mttf_s", "interval_s", "gpu_hours", "days", "cost_usd"}
    assert failing["kind"] == "asynchronous"
    for name in ("gpu_hours", "days", "cost_usd"):
        assert failing[name] == pytest.approx(plan[name] / failing["ettr"])
        assert failing[name] > plan[name]
    assert failing["mttf_s"] == pytest.approx(86400 / (8 * 4.74e-4))
    assert asked("predict", path)["with_failures"] == failing
    often = asked("predict", path, "--set", "cluster.failures_per_device_day=1.0")
    assert often["with_failures"]["ettr"] < failing["ettr"]
    waits = asked(
        *("predict", path, "--set", "checkpoint.every_steps=100", "--set", "checkpoint.asynchronous=false")
    )["with_failures"]
    assert (waits["kind"], waits["interval_s"]) == ("synchronous", pytest.approx(100 * plan["step_s"]))
    told = asked("goodput", path, "--runs", "10")["judged"][1]
    assert told["complete"] == pytest.approx(failing["ettr"])


def test_the_view_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--tokens", "100B", "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert "with failures: " in said
    assert "of the time counts)" in said


def test_every_gpu_cluster_knows_how_it_recovers_and_old_files_are_helped_out() -> None:
    for name in catalogue.cluster_names():
        cluster = catalogue.load_cluster(name)
        assert cluster.recovery is not None
        assert cluster.provenance_of("recovery.detect_s") is not None
    run_file = read_run(LLAMA)
    assert run_file.cluster.recovery is None
    helped = catalogue.with_recovery(run_file.cluster)
    assert helped.recovery == catalogue.load_cluster("h100-sxm").recovery
    assert catalogue.with_recovery(helped) is helped
    assert nodes_per_rack(catalogue.load_cluster("gb200-nvl72")) == 18
    assert nodes_per_rack(helped) == 2


def test_bytes_of_the_state() -> None:
    llama = read_run(LLAMA)
    assert saved_bytes(llama.model, llama.recipe) == 12 * llama.model.params
    low = llama.recipe.changed(optimizer=Optimizer(moments="bf16"))
    assert saved_bytes(llama.model, low) == 8 * llama.model.params
    muon = llama.recipe.changed(optimizer=Optimizer(name="muon"))
    around = llama.model.embedding_params + llama.model.head_params
    assert saved_bytes(llama.model, muon) == 8 * llama.model.params + 4 * around
    deepseek: ModelSpec = catalogue.load_model("deepseek-v3")
    assert saved_bytes(deepseek, llama.recipe) == 12 * (deepseek.params + deepseek.mtp_params)


def test_seconds_of_the_ways_to_save_by_hand() -> None:
    """4.87 TB from 2,048 nodes of 0.65 GB/s take 3.66 s; 297 MB at 20 GB/s take 14.9 ms; over a NIC of 50 GB/s at
    0.8027 of it 7.4 ms."""
    cluster = catalogue.load_cluster("h100-sxm")
    waits, beside, memory = savings(cluster, 4.87e12, 16384, 2)
    assert beside.blocked_s == pytest.approx(4.87e12 / 16384 / 20e9)
    assert beside.durable_s == pytest.approx(4.87e12 / 2048 / 0.65e9)
    assert waits.blocked_s == pytest.approx(beside.blocked_s + beside.durable_s)
    assert waits.recover_s == beside.recover_s == pytest.approx(780 + beside.durable_s)
    over_network_s = 4.87e12 / 16384 / (50e9 * cluster.rates.network)
    assert memory.memory_durable_s == pytest.approx(over_network_s)
    assert memory.memory_recover_s == pytest.approx(780 + over_network_s)
    assert savings(cluster, 4.87e12, 16384, 3)[2].memory_durable_s == pytest.approx(2 * over_network_s)
    assert 0.999 < memory.memory_share < 1
    assert 1000 * failures_per_node_day(cluster) == pytest.approx(3.79, abs=0.01)


def test_the_published_points_are_those_of_the_file() -> None:
    text = (Path(catalogue.__file__).parents[1] / "data" / "failures.toml").read_text()
    assert json.dumps(tomllib.loads(text)["mttf"][1]["kind"]) == '"measured"'
    points = {each.devices: (each.mttf_s, each.kind) for each in catalogue.published_failures().mttf}
    assert points[16384] == (6480.0, "projected")


def test_more_nodes_in_repair_than_there_are_is_said(asked: Asked) -> None:
    told = asked("goodput", EXAMPLE, "--days", "30", "--runs", "10", "--failure-rate", "1e6")
    assert any("in repair at a time" in note for note in told["notes"])
    assert all(each["first_order"] == 0 for each in told["judged"])
