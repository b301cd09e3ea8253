"""Logs of other trainers: lines as they were published, what is steady in them, and the constants that fit.

Lines are of public issues: Megatron-LM #756, DeepSpeed #1825 and #3742, torchtitan pull 3393, bionemo-recipes pull
740; DeepSpeed's second form of a line is of its utils/timer.py from 0.7 on.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.bare.conftest import Asked
from trainwright.cli.files import read_run
from trainwright.cli.main import run as command
from trainwright.measure.log_fit import COMMUNICATION, COMPUTE, fitted, identified, scaled
from trainwright.measure.logs import Log, parse_log
from trainwright.plan.predict import predict
from trainwright.spec import toml
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.explanation import LogSteps
from trainwright.spec.run import Run

ROOT = Path(__file__).parents[2]
RUN_FILE = ROOT / "runs" / "example-16_a100x16.toml"


@pytest.fixture
def run() -> Run:
    return read_run(RUN_FILE)


def megatron(iteration: int, ms: float, batch: int) -> str:
    return (
        f" [2024-04-06 02:59:36] iteration {iteration:8d}/     100 | consumed samples: 5504 | elapsed time "
        f"per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 239.8 | learning rate: 8.6E-06 | "
        f"global batch size: {batch} | lm loss: 1.825991E+00 | load_balancing_loss: 1.019746E+00 "
        "| loss scale: 1.0 | grad norm: 1.426 | num zeros: 0.0 | number of skipped iterations:   0 | number of "
        "nan iterations:   0 |"
    )


def old_megatron(iteration: int, ms: float, batch: int) -> str:
    return (
        f" iteration {iteration:8d}/  250000 | consumed samples:       124928 | elapsed time per iteration (ms): "
        f"{ms:.1f} | learning rate: 9.150E-06 | global batch size: {batch:5d} | lm loss: 2.504220E+00 |"
    )


def torchtitan(step: int, tokens_per_s: int) -> str:
    return (
        "[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - \x1b[31mstep: "
        f"{step:2d}  \x1b[32mloss:  3.24405  \x1b[38;2;180;60;0mgrad_norm:  0.8319  \x1b[38;2;54;234;195mmemory:  "
        f"9.46GiB(64.99%)  \x1b[34mtps: {tokens_per_s:,}  \x1b[36mtflops: 0.52  \x1b[35mmfu: 0.17%\x1b[39m"
    )


def nemo(iteration: int, seconds: float, batch: int) -> str:
    return (
        f"Training epoch 0, iteration {iteration}/149 | lr: 3e-05 | consumed_samples: 121 | global_batch_size: "
        f"{batch} | global_step: {iteration} | reduced_train_loss: 1.233 | train_step_timing in s: {seconds} | "
        "val_loss: 4.106"
    )


def old_nemo(iteration: int, seconds: float, batch: int) -> str:
    return (
        f"Epoch 0: :   1%|          | {iteration}/77225 [9:07:58<878:01:48, v_num=3-02, reduced_train_loss=3.090, "
        f"global_step={iteration}.0, consumed_samples=1.63e+6, train_step_timing in s={seconds}]"
    )


def deepspeed(step: int, at_s: float) -> str:
    when = f"[2022-03-11 02:{int(at_s) // 60:02d}:{int(at_s) % 60:02d},{round(at_s % 1 * 1000):03d}] [INFO]"
    return (
        f"{when} [logging.py:69:log_dist] [Rank 0] step={step}, skipped=2, lr=[5e-05], mom=[[0.9, 0.999]]\n"
        f"{when} [timer.py:189:stop] 0/{step}, SamplesPerSec=83.48609168106144, MemAllocated=0.26GB"
    )


def test_megatron(run: Run) -> None:
    batch = run.recipe.global_batch
    for line in (megatron, old_megatron):
        seconds = [90, 20, 5.4449, 5.5338, 30, 5.7186]
        text = "\n".join(line(number, 1000 * each, batch) for number, each in enumerate(seconds, start=42))
        log = parse_log(f"noise\n{text}\nmore | noise", "log", run)
        assert log.framework == "Megatron-LM"
        assert log.steps == (LogSteps(global_batch=batch, step_s=5.5338, steps=3),)


def test_megatron_batches_that_are_ramped_up(run: Run) -> None:
    batch = run.recipe.global_batch
    sizes = [batch // 4] * 6 + [batch // 2] * 2 + [batch] * 3
    text = "\n".join(megatron(number, 1000 + size, size) for number, size in enumerate(sizes))
    log = parse_log(text, "log", run)
    assert [(each.global_batch, each.steps) for each in log.steps] == [(batch // 4, 4), (batch, 3)]
    assert log.notes == (f"global batch {batch // 2}: too few steady lines, left out",)


def test_torchtitan(run: Run) -> None:
    """tps are of one device: a step of all tokens takes them over 16 times that. Ranks may all write the same."""
    text = "\n".join(torchtitan(step, 7_282 if step > 2 else 50) for step in (1, 2, 3, 3, 3, 4, 4, 5))
    log = parse_log(text, "log", run)
    assert log.framework == "TorchTitan"
    expected = run.recipe.global_batch * run.recipe.seq_len / (7_282 * 16)
    assert [(each.global_batch, each.steps) for each in log.steps] == [(run.recipe.global_batch, 3)]
    assert log.steps[0].step_s == pytest.approx(expected)


@pytest.mark.parametrize("line", [nemo, old_nemo])
def test_nemo(run: Run, line: Callable[[int, float, int], str]) -> None:
    text = "\n".join(line(number, 0.5 + 0.001 * number, run.recipe.global_batch) for number in range(120, 125))
    log = parse_log(text, "log", run)
    assert log.framework == "NeMo"
    assert log.steps == (LogSteps(global_batch=run.recipe.global_batch, step_s=0.623, steps=3),)


def test_deepspeed(run: Run) -> None:
    """Dates of lines: ten steps between them took 15.145 s, the first ten 40 s; across the hour's minutes too."""
    at_s = [5.0, 45.0, 60.145, 75.29, 90.435]
    text = "\n".join(deepspeed(10 * number, each) for number, each in enumerate(at_s, start=1))
    log = parse_log(text, "log", run)
    assert log.framework == "DeepSpeed"
    assert [(each.global_batch, each.steps) for each in log.steps] == [(run.recipe.global_batch, 3)]
    assert log.steps[0].step_s == pytest.approx(1.5145)


def test_deepspeed_without_dates(run: Run) -> None:
    line = (
        "epoch=0/micro_step=4/global_step={}, RunningAvgSamplesPerSec=7.86, CurrSamplesPerSec={}, MemAllocated=1GB"
    )
    text = "\n".join(line.format(step, 4.0 if step > 2 else 0.1) for step in range(1, 7))
    log = parse_log(text, "log", run)
    assert log.steps[0].step_s == pytest.approx(run.recipe.global_batch / 4)
    old = "\n".join(f"[INFO 2020-06-08 05:26:19] 0/{step}, SamplesPerSec=8.0" for step in range(50, 350, 50))
    assert parse_log(old, "log", run).steps[0].step_s == pytest.approx(run.recipe.global_batch / 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Epoch 1 took 7.0 s", "in no format that is known; expected are lines of Megatron-LM ('elapsed time per"),
        ("", "in no format that is known"),
        (
            "\n".join(megatron(each, 5000, 128) for each in (1, 2, 3)),
            "no steady iterations: 3 lines of Megatron-LM",
        ),
        ("\n".join(megatron(each, 10.0**each, 128) for each in range(7)), "no steady iterations: 7 lines"),
        (
            "\n".join(megatron(each, 5000, 96) for each in range(7)),
            "has steady steps of 96 only; name that run's file",
        ),
    ],
)
def test_a_log_that_says_nothing_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(text)
    assert command(["explain", str(path), "--run", str(RUN_FILE), "--set", "recipe.global_batch=128"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_hidden_factor_is_found_again(run: Run) -> None:
    """Steps made by the planner with slower matmuls: the fit says how much slower, and predicts their times."""

    def step_s(cluster, batch: int) -> float:
        return predict(run.changed(cluster=cluster).with_value("recipe.global_batch", batch)).step_s

    batch = run.recipe.global_batch
    slower = scaled(run.cluster, {COMPUTE: 0.7})
    steps = (LogSteps(global_batch=batch, step_s=step_s(slower, batch), steps=10),)
    constants, missing, cluster = fitted(run.cluster, steps, step_s)
    assert [each.name for each in constants] == [COMPUTE]
    assert constants[0].value == pytest.approx(0.7, rel=0.02)
    assert step_s(cluster, batch) == pytest.approx(steps[0].step_s, rel=0.01)
    assert len(missing) == 1
    assert missing[0].startswith(COMMUNICATION)


def test_what_a_log_identifies() -> None:
    assert identified(np.array([[-0.7, -0.2]])) == [0]
    assert identified(np.array([[-0.1, -0.6]])) == [1]
    assert identified(np.array([[-0.01, -0.02]])) == []
    assert identified(np.array([[-0.7, -0.2], [-0.7, -0.2]])) == [0], "equal rows are one number"
    assert identified(np.array([[-0.2, -0.7], [-0.8, -0.1]])) == [0, 1]


def test_two_sizes_of_batch_identify_two_factors() -> None:
    """A run whose small batch is all communication and whose large one is all compute."""
    run = read_run(RUN_FILE)

    def step_s(cluster, batch: int) -> float:
        compute = cluster.rates.attention_sustained / run.cluster.rates.attention_sustained
        links = cluster.rates.link / run.cluster.rates.link
        return 0.01 * batch / compute + 1.0 / links

    truth = scaled(run.cluster, {COMPUTE: 0.8, COMMUNICATION: 0.5})
    steps = tuple(LogSteps(global_batch=batch, step_s=step_s(truth, batch), steps=5) for batch in (16, 64, 512))
    constants, missing, _ = fitted(run.cluster, steps, step_s)
    values = {each.name: each.value for each in constants}
    assert values[COMPUTE] == pytest.approx(0.8, rel=0.03)
    assert values[COMMUNICATION] == pytest.approx(0.5, rel=0.03)
    assert not missing


def test_a_fitted_cluster_is_a_whole_one(run: Run) -> None:
    """It can be written, read and planned with, and its numbers have their source."""
    cluster = scaled(run.cluster, {COMPUTE: 0.5, COMMUNICATION: 0.5}, 7)
    again = toml.read(toml.write(cluster), type(cluster), "cluster.toml")
    assert again == cluster
    source = cluster.provenance_of("rates.link")
    assert source is not None
    assert (source.kind, source.samples) == ("measured", 7)
    assert predict(run.changed(cluster=cluster)).step_s > 1.3 * predict(run).step_s


def test_explain_a_log(tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str], run: Run) -> None:
    seen_s = 1.25 * predict(run).step_s
    path = tmp_path / "train.log"
    path.write_text("\n".join(megatron(each, 1000 * seen_s, run.recipe.global_batch) for each in range(8)))
    document = asked("explain", path, "--run", RUN_FILE)
    assert document["framework"] == "Megatron-LM"
    assert document["steps"][0]["step_s"] == pytest.approx(seen_s, abs=1e-4)
    assert document["fitted"]["step_s"] == pytest.approx(seen_s, rel=0.01)
    assert document["fitted"]["layout"] == document["predicted"]["layout"] == run.layout.plain()
    assert document["best"]["step_s"] <= document["fitted"]["step_s"] * (1 + 1e-9)
    assert document["best"]["fits"]
    assert command(["explain", str(path), "--run", str(RUN_FILE)]) == 0
    text = capsys.readouterr().out
    assert "compute efficiency x" in text
    assert "Not to be said from step times" in text
    lines = text.splitlines()
    assert any(line.strip().startswith("best") for line in lines)
    assert any(line.strip().startswith("the run, before the fit") for line in lines)


def test_a_run_directory_names_its_own_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run) -> None:
    assert command(["explain", str(tmp_path)]) == 2
    assert "has no run.toml" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text(toml.write(run))
    assert command(["explain", str(tmp_path), "--run", str(RUN_FILE)]) == 2
    assert "has its own run.toml" in capsys.readouterr().err
    assert command(["explain", str(tmp_path)]) == 2
    assert "no such directory; a run writes it step by step" in capsys.readouterr().err


def test_no_run_fits_a_log_of_other_batches(run: Run) -> None:
    with pytest.raises(InvalidSpec, match=r"recipe\.global_batch="):
        parse_log("\n".join(megatron(each, 500, 7) for each in range(9)), "log", run)
    assert isinstance(
        parse_log("\n".join(megatron(each, 500, run.recipe.global_batch) for each in range(9)), "log", run), Log
    )
