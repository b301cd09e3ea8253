"""What scripts rely on: JSON keys, exit statuses, `--set`, files, the speed of `--help`."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.bare.conftest import Asked
from trainwright import __version__
from trainwright.cli.files import read_noun, read_run
from trainwright.cli.main import run
from trainwright.cli.progress import Progress
from trainwright.measure.records import parse_rank_records
from trainwright.plan.predict import predict
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.ledger import BYTES_CAUSES, SECONDS_CAUSES, SEEN_BYTES, SEEN_SECONDS
from trainwright.spec.record import RankRecord

PLAN = [
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
]
PLAN_KEYS = {
    "layout",
    "recipe",
    "step_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "mfu_convention",
    "mfu_peak",
    "peak_bytes",
    "capacity_bytes",
    "bytes_by_cause",
    "seconds_by_cause",
    "fits",
    "step_s_p10",
    "step_s_p90",
    "band_notes",
    "with_failures",
}


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@pytest.fixture
def run_file(tmp_path: Path, asked: Asked) -> Path:
    path = tmp_path / "run.toml"
    asked(*PLAN, "--out", path)
    return path


def test_plan_with_stages_of_ones_own(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    document = asked(*PLAN, "--set", "layout.stage_layers=[15,17]", "--top", "4")
    for plan in document["plans"]:
        assert plan["layout"]["stage_layers"] == [15, 17]
        assert plan["layout"]["pp"] * plan["layout"]["vpp"] == 2 or plan["recipe"]["schedule"] == "dualpipe"
    assert run([*PLAN, "--set", "layout.stage_layers=[15,16]"]) == 2
    assert "sums to 31 layers" in capsys.readouterr().err
    assert run([*PLAN, "--set", "layout.stage_layers=[15,17]", "--set", "layout.pp=1"]) == 2
    assert "layout.stage_layers of 2 stages" in capsys.readouterr().err


def test_plan(asked: Asked) -> None:
    document = asked(*PLAN, "--top", "3")
    assert set(document) == {
        "considered",
        "judged",
        "feasible",
        "search_s",
        "plans",
        "why",
        "pareto",
        "balanced",
        "changes",
    }
    assert document["considered"] == document["judged"] >= document["feasible"] > 3
    assert document["why"]
    assert len(document["plans"]) == 3
    for plan in document["plans"]:
        assert set(plan) == PLAN_KEYS
        assert set(plan["layout"]) == {"tp", "cp", "pp", "vpp", "ep", "etp", "dp", "order", "stage_layers"}
        assert set(plan["seconds_by_cause"]) <= set(SECONDS_CAUSES)
        assert set(plan["bytes_by_cause"]) <= set(BYTES_CAUSES)
        assert sum(plan["seconds_by_cause"].values()) == pytest.approx(plan["step_s"])
        assert sum(plan["bytes_by_cause"].values()) == pytest.approx(plan["peak_bytes"])
    steps = [plan["step_s"] for plan in document["plans"]]
    assert steps == sorted(steps)


def test_a_token_budget_adds_time_and_cost(asked: Asked) -> None:
    plan = asked(*PLAN, "--tokens", "15.6T")["plans"][0]
    assert set(plan) == PLAN_KEYS | {"gpu_hours", "days", "cost_usd"}
    assert plan["gpu_hours"] == pytest.approx(plan["days"] * 24 * 8)
    same = asked(*PLAN, "--tokens", "15.6e12")["plans"][0]
    assert same["gpu_hours"] == plan["gpu_hours"]


def test_nothing_feasible_is_status_1_and_says_why(asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    document = asked(*PLAN, "--set", "cluster.device.memory_bytes=8_000_000_000", "--out", out, status=1)
    assert document["plans"] == []
    assert document["feasible"] == 0
    assert "GiB" in " ".join(document["why"])
    assert not out.exists()


def test_set_fixes_what_is_searched_and_overrides_the_rest(asked: Asked, tmp_path: Path) -> None:
    fixed = ["--set", "layout.tp=4", "--set", "recipe.micro_batch=2", "--set", "recipe.recompute=full"]
    other = ["--set", "recipe.seq_len=2048", "--set", "cluster.usd_per_device_hour=1.5", "--set", "name=mine"]
    out = tmp_path / "run.toml"
    document = asked(*PLAN, *fixed, *other, "--top", "9", "--out", out)
    for plan in document["plans"]:
        assert plan["layout"]["tp"] == 4
        assert (plan["recipe"]["micro_batch"], plan["recipe"]["recompute"]) == (2, "full")
        assert plan["recipe"]["seq_len"] == 2048
    written = read_run(out)
    assert (written.name, written.cluster.usd_per_device_hour, written.layout.tp) == ("mine", 1.5, 4)


def test_predict(asked: Asked, run_file: Path) -> None:
    plan = asked("predict", run_file)
    assert plan.pop("waterfall")
    assert set(plan) == PLAN_KEYS
    assert plan["fits"] is True
    assert plan == asked(*PLAN)["plans"][0]
    shorter = asked("predict", run_file, "--set", "recipe.seq_len=2048")
    assert shorter["recipe"]["seq_len"] == 2048
    assert shorter["step_s"] < plan["step_s"]


def test_set_makes_a_table_that_is_absent(asked: Asked, run_file: Path) -> None:
    assert "days" not in asked("predict", run_file)
    assert asked("predict", run_file, "--set", "budget.tokens=1_000_000_000")["days"] > 0
    assert asked(*PLAN, "--set", "budget.tokens=1_000_000_000")["plans"][0]["days"] > 0


def test_assignments_are_checked_together(asked: Asked) -> None:
    together = ["--set", "recipe.micro_batch=24", "--set", "recipe.global_batch=48", "--set", "layout.dp=2"]
    recipe = asked(*PLAN, *together, "--set", "recipe.seq_len=128")["plans"][0]["recipe"]
    assert (recipe["micro_batch"], recipe["global_batch"]) == (24, 48)


def test_predict_of_what_does_not_fit(asked: Asked, run_file: Path) -> None:
    plan = asked("predict", run_file, "--set", "cluster.device.memory_bytes=8_000_000_000", status=1)
    assert set(plan) == PLAN_KEYS | {"short_by_bytes", "cause", "waterfall"}
    assert plan["fits"] is False
    assert plan["short_by_bytes"] == pytest.approx(plan["peak_bytes"] - 8e9)
    assert plan["cause"] in BYTES_CAUSES


def test_compare(asked: Asked, run_file: Path, tmp_path: Path) -> None:
    planned = read_run(run_file)
    prediction = predict(planned)
    seen_s = 1.2 * prediction.step_s
    records = [
        RankRecord(
            run_hash=planned.hash,
            rank=rank,
            pp_rank=planned.layout.coordinate(rank).pp,
            steps_timed=5,
            step_s=seen_s,
            tokens_per_s=planned.recipe.tokens_per_step / seen_s,
            seconds={"compute": seen_s},
            bytes={"parameters": 1e9},
            peak_bytes=2e9,
        )
        for rank in range(planned.layout.world)
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(f"{record.model_dump_json()}\n" for record in records))
    assert parse_rank_records((tmp_path / "ledger.jsonl").read_text(), "ledger.jsonl") == tuple(records)

    document = asked("compare", tmp_path)
    assert set(document) == {
        *("run", "run_hash", "steps_timed", "quantities", "ranks", "seconds_by_cause", "bytes_by_cause"),
        *("tolerance", "within_tolerance"),
    }
    assert document["within_tolerance"] is True
    assert document["run_hash"] == planned.hash
    assert {"step_s", "tokens_per_s", "mfu"} <= set(document["quantities"])
    states = {"parameter_bytes", "gradient_bytes", "optimizer_bytes", "peak_bytes"}
    assert all(states == set(rank) for rank in document["ranks"].values())
    assert document["quantities"]["step_s"]["relative_residual"] == pytest.approx(0.2)
    assert set(document["seconds_by_cause"]) == set(SEEN_SECONDS)
    assert set(document["bytes_by_cause"]) == set(SEEN_BYTES)
    for row in document["seconds_by_cause"].values():
        assert set(row) == {"predicted", "seen", "residual", "relative_residual"}

    strict = asked("compare", tmp_path, "--tolerance", "0.1", status=1)
    assert strict["within_tolerance"] is False


def test_models(asked: Asked) -> None:
    models = asked("models", "list")["models"]
    assert models["llama-3.1-8b"]["params"] == 8_030_261_248
    shown = asked("models", "show", "llama-3.1-8b", "--seq-len", "4096")
    assert shown["params"] == sum(shown["params_by_part"].values())
    assert set(shown["flops_per_token"]) == {"full", "causal", "6n"}


def test_clusters(asked: Asked) -> None:
    listed = asked("clusters", "list")["clusters"]
    assert listed["h100-sxm"] == asked("clusters", "show", "h100-sxm")["cluster"]


def test_an_own_cluster_goes_by_its_name(asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["clusters", "new", "mine", "--from", "h100-sxm", "--set", "fabric.nic_bytes_per_s=25e9"]
    document = asked(*made)
    assert document["path"] == str(tmp_path / "config" / "trainwright" / "clusters" / "mine.toml")
    cluster = read_noun(Path(document["path"]), ClusterSpec)
    assert (cluster.name, cluster.fabric.nic_bytes_per_s) == ("mine", 25e9)
    assert "mine" in asked("clusters", "list")["clusters"]
    assert asked("plan", "llama-3.1-8b", "--cluster", "mine", *PLAN[4:])["plans"]
    assert run(made) == 2
    assert "NAME='mine': is taken" in capsys.readouterr().err
    assert run(["clusters", "new", "../evil", "--from", "h100-sxm"]) == 2
    assert "NAME='../evil': must be of letters" in capsys.readouterr().err
    elsewhere = tmp_path / "cluster.toml"
    assert asked(*made, "--out", elsewhere)["path"] == str(elsewhere)


def test_the_same_question_has_the_same_answer(asked: Asked) -> None:
    first, second = asked(*PLAN, "--top", "5"), asked(*PLAN, "--top", "5")
    assert first["plans"] == second["plans"]
    assert first["why"] == second["why"]


VERBS = [
    *(["plan"], ["predict"], ["train"], ["compare"], ["calibrate"], ["demo"]),
    ["fp8", "lab"],
    *(["models", "list"], ["models", "show"], ["clusters", "list"], ["clusters", "show"], ["clusters", "new"]),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_of_each_verb_has_an_example_and_json(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: trainwright {' '.join(verb)}" in text
    assert "--json" in text


def test_version_and_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"trainwright {__version__}\n"
    assert run(["paln"]) == 2
    assert "Did you mean 'plan'" in capsys.readouterr().err
    assert run(["predict", "--jsno", "run.toml"]) == 2
    assert "--json" in capsys.readouterr().err


def in_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False, timeout=60
    )


def test_help_is_light() -> None:
    assert in_process("--help").returncode == 0
    program = "import sys, trainwright.cli.main; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "pydantic", "rich"} & set(loaded)


def test_plan_does_not_load_torch() -> None:
    program = (
        "import sys\nfrom trainwright.cli.main import run\n"
        f"assert run({[*PLAN, '--json']!r}) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_completion_is_offered() -> None:
    done = in_process(_TRAINWRIGHT_COMPLETE="complete_bash", COMP_WORDS="trainwright pl", COMP_CWORD="1")
    assert done.stdout.split() == ["plan"]


def test_a_closed_or_full_output_is_no_traceback() -> None:
    command = f"{sys.executable} -m trainwright models list"
    closed = subprocess.run(
        ["bash", "-c", f"{command} --json | head -c 1"], capture_output=True, text=True, check=False
    )
    assert closed.stderr == ""
    full = subprocess.run(
        ["bash", "-c", f"{command} --json > /dev/full"], capture_output=True, text=True, check=False
    )
    assert full.returncode == 2
    assert full.stderr.startswith("trainwright: standard output: no space left on device")
    assert full.stderr.count("\n") == 1


def test_views_survive_a_terminal_without_utf_8() -> None:
    done = in_process(*PLAN, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Memory of the fullest rank" in done.stdout


def test_progress_elsewhere_than_on_a_terminal_is_lines() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Progress(console) as progress:
        for done in (0.0, 0.1, 0.2, 1.0):
            progress.show("measuring", done)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert len(lines) == 2  # the first and the last; those between came too soon
    assert lines[0].endswith("measuring   0%")
    assert lines[1].endswith("measuring 100%")
    assert lines[0].startswith("[")
