"""Whole runs on this node: what is written, the status that comes back, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from example import example_run
from parity_moe import DEEPSEEK, case
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainwright.cli.files import read_run
from trainwright.cli.main import run as run_program
from trainwright.cli.train import require_machine, trained
from trainwright.plan.predict import predict
from trainwright.plan.recompute_budget import resolved
from trainwright.spec import toml
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.record import RankRecord, StepRecord
from trainwright.spec.run import Run
from trainwright.train.door import require_trainable
from trainwright.train.launch import launch
from trainwright.train.model.transformer import Transformer
from trainwright.train.shards import INDEX, write_shards

STEPS = 8


def run_on(directory: Path, *, tokens: np.ndarray | None = None, **fields: object) -> Run:
    """A run file over shards of a repeating pattern, both in `directory`."""
    shards = directory / "shards"
    shards.mkdir()
    stream = np.tile(np.arange(97, dtype=np.uint32), 60) if tokens is None else tokens
    write_shards(shards, [stream], 258, "test")
    run = example_run(**fields)  # type: ignore[arg-type]
    run = run.changed(data=run.data.changed(source="shards", path=str(shards))).check()
    (directory / "run.toml").write_text(toml.write(run))
    return run


def train(directory: Path, world: int, steps: int = STEPS) -> tuple[int, list[str]]:
    lines: list[str] = []
    arguments = ["train", str(directory / "run.toml"), "--steps", str(steps), "--out", str(directory / "out")]
    return launch(arguments, world, on_line=lines.append), lines


def test_a_run_writes_what_was_seen(tmp_path: Path) -> None:
    recipe = {"precision": "bf16", "zero": 1, "optimizer": {"lr": 0.01, "warmup_steps": 2}}
    run = run_on(tmp_path, tp=2, dp=2, recipe=recipe, model={"vocab_size": 260})
    status, lines = train(tmp_path, 4)
    assert status == 0, lines

    out = tmp_path / "out"
    records = [StepRecord.parse(json.loads(line)) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert records[-1].loss < records[0].loss - 0.3
    assert records[0].lr == pytest.approx(0.005)
    assert all(record.peak_bytes >= records[0].peak_bytes > 0 for record in records)
    for record in records:
        assert record.tokens_per_s == pytest.approx(run.recipe.tokens_per_step / record.step_s)
        flops = run.model.flops_per_token(16, "full") * record.tokens_per_s
        assert record.mfu == pytest.approx(flops / (4 * 5e11))

    ranks = [RankRecord.parse(json.loads(line)) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    # By hand: matrices are halved by tp, norms are whole; 4 layers, untied, vocabulary 260.
    layer = (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48) // 2 + 2 * 32
    values = (2 * 260 * 32) // 2 + 4 * layer + 32
    for rank in ranks:
        assert rank.run_hash == run.hash
        assert rank.steps_timed == STEPS - 5
        # zero 1 over dp=2: bf16 copies whole, fp32 masters halved, gradients whole, moments halved.
        assert rank.bytes == {
            "parameters": 2 * values + 4 * values / 2,
            "gradients": 4 * values,
            "optimizer": 8 * values / 2,
        }
        assert sum(rank.seconds.values()) == pytest.approx(rank.step_s)
        assert rank.seconds["compute"] > 0
        assert rank.seconds["tp"] > 0
        assert rank.seconds["dp"] > 0
        assert rank.seconds["pp"] < 0.01 * rank.step_s
        assert rank.peak_bytes > rank.bytes["optimizer"] + rank.bytes["parameters"]

    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([record.loss for record in records])


def test_recompute_by_a_budget_is_carried_out_as_the_planner_chose(tmp_path: Path) -> None:
    """The directory has the run that was trained, which says what is recomputed."""
    run = run_on(tmp_path, recipe={"precision": "fp32", "recompute": "full"})
    whole_bytes = predict(run.with_value("recipe.recompute", "none")).peak_bytes
    budget_bytes = int(predict(run).peak_bytes + whole_bytes) // 2
    choices = [("recipe.recompute", "budget"), ("recipe.recompute_budget_bytes", budget_bytes)]
    asked = run.with_values(choices).check()
    (tmp_path / "run.toml").write_text(toml.write(asked))
    status, lines = train(tmp_path, 1, steps=1)
    assert status == 0, lines
    trained = read_run(tmp_path / "out" / "run.toml")
    assert trained == resolved(asked).run
    assert trained.recipe.recompute not in ("none", "budget")
    assert predict(trained).peak_bytes <= budget_bytes < whole_bytes


def test_compiled_layers_want_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    run = example_run(recipe={"compile": True})
    require_machine(run)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InvalidSpec, match=r"recipe\.compile=True: needs the C\+\+ compiler no-such-compiler"):
        require_machine(run)


def test_a_refused_run_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert (tmp_path / "a" / "b" / "run.toml").is_file()
        reject("data.path", "here", "is bad")

    run = run_on(tmp_path, recipe={"precision": "fp32"})
    monkeypatch.setattr("trainwright.cli.train.run_workers", refuse)
    with pytest.raises(InvalidSpec):
        trained(run, 1, tmp_path / "a" / "b", lambda what, done: None)
    assert not (tmp_path / "a").exists()


def test_layouts_train_alike(tmp_path: Path) -> None:
    losses = []
    for name, layout in {"one": {}, "pipeline": {"pp": 2}, "shards": {"dp": 2}, "context": {"cp": 2}}.items():
        directory = tmp_path / name
        directory.mkdir()
        run = run_on(directory, recipe={"zero": 3, "grad_clip": 0.5}, **layout)
        status, lines = train(directory, run.layout.world)
        assert status == 0, lines
        metrics = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
        losses.append([each["loss"] for each in metrics])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] == pytest.approx(losses[0], rel=1e-10)
    assert losses[3] == pytest.approx(losses[0], rel=1e-10)
    for line in (tmp_path / "context" / "out" / "ledger.jsonl").read_text().splitlines():
        assert RankRecord.parse(json.loads(line)).seconds["cp"] > 0


def test_documents_are_masked_where_the_data_names_their_end(tmp_path: Path) -> None:
    losses = []
    for name, layout in {"one": {}, "context": {"cp": 2}}.items():
        directory = tmp_path / name
        directory.mkdir()
        run = run_on(directory, data={"document_mask": True}, **layout)
        if not losses:
            status, lines = train(directory, 1)
            assert status == 2, lines
            assert "data.document_mask=True: " in "\n".join(lines)
            assert "names no token that ends a document" in "\n".join(lines)
        index = json.loads((directory / "shards" / INDEX).read_text())
        (directory / "shards" / INDEX).write_text(json.dumps({**index, "end_of_document": 7}))
        status, lines = train(directory, run.layout.world)
        assert status == 0, lines
        metrics = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
        losses.append([each["loss"] for each in metrics])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_experts_train_alike_on_one_rank_and_on_four(tmp_path: Path) -> None:
    losses = []
    for name, layout in {"one": {}, "four": {"tp": 2, "dp": 2, "ep": 4}}.items():
        directory = tmp_path / name
        directory.mkdir()
        recipe = {"balance_loss": 0.01, "balance_rate": 0.01, "capacity_factor": 1.5, "zero": 2}
        run = run_on(directory, **case(DEEPSEEK, recipe, **layout))
        status, lines = train(directory, run.layout.world)
        assert status == 0, lines
        metrics = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
        losses.append([each["loss"] for each in metrics])
    assert losses[0][-1] < losses[0][0] - 0.3
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    ranks = [json.loads(line) for line in (tmp_path / "four" / "out" / "ledger.jsonl").read_text().splitlines()]
    assert all(rank["seconds"]["ep"] > 0 for rank in ranks)


def test_the_local_run_with_experts_trains(tmp_path: Path) -> None:
    run = read_run(Path(__file__).parents[2] / "runs" / "moe-local-6m_cpu4.toml")
    require_trainable(run.check())
    counted = sum(each.numel() for each in Transformer(run.model).parameters())
    assert counted + 3 * 8 == run.model.params  # the balance biases are buffers
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", [np.tile(np.arange(97, dtype=np.uint32), 60)], 4096, "test")
    run = run.changed(data=run.data.changed(source="shards", path=str(tmp_path / "shards")))
    run = run.with_values([("recipe.seq_len", 128), ("recipe.global_batch", 8)])
    (tmp_path / "run.toml").write_text(toml.write(run))
    status, lines = train(tmp_path, 4, steps=4)
    assert status == 0, lines
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for rank in map(json.loads, (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()):
        predicted = predict(run).stages[0].ledger.bytes
        assert {name: rank["bytes"][name] / predicted[name] for name in rank["bytes"]} == pytest.approx(
            dict.fromkeys(rank["bytes"], 1.0), rel=1e-3
        )


def test_a_full_disk_is_one_line_and_status_2(tmp_path: Path) -> None:
    run_on(tmp_path, pp=2)
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").symlink_to("/dev/full")
    status, lines = train(tmp_path, 2)
    assert status == 2, lines
    said = [line for line in lines if line.strip()]
    assert len(said) == 1, said
    assert "No space left on device" in said[0]
    assert "free space or choose another --out" in said[0]
    assert not (out / "ledger.jsonl").exists()
    assert workers_of(tmp_path) == []


def test_a_bad_token_is_one_message_and_status_2(tmp_path: Path) -> None:
    tokens = np.tile(np.arange(97, dtype=np.uint32), 60)
    tokens[::50] = 300
    run_on(tmp_path, tokens=tokens, dp=2)
    status, lines = train(tmp_path, 2)
    assert status == 2, lines
    said = {line for line in lines if line.strip()}
    assert all("is not below the index's vocab_size=258" in line for line in said), said
    assert workers_of(tmp_path) == []


@pytest.mark.parametrize("existing", [False, True])
def test_a_run_that_workers_refuse_leaves_nothing(
    tmp_path: Path, existing: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    run_on(tmp_path, tokens=np.full(6000, 300, dtype=np.uint32), dp=2, recipe={"precision": "fp32"})
    out = tmp_path / "out"
    if existing:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    assert run_program(["train", str(tmp_path / "run.toml"), "--steps", "2", "--out", str(out)]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trainwright: ")]
    assert len(said) == 1, said
    assert [each.name for each in out.glob("*")] == (["notes.txt"] if existing else [])
    assert out.exists() == existing


def test_a_crash_gives_the_workers_status(tmp_path: Path) -> None:
    lines: list[str] = []
    assert launch(["no-such-verb"], 2, on_line=lines.append) == 2
    assert any("no-such-verb" in line for line in lines)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_process(tmp_path: Path, number: signal.Signals, status: int) -> None:
    run_on(tmp_path, dp=2)
    arguments = ["train", str(tmp_path / "run.toml"), "--steps", "100000", "--out", str(tmp_path / "out")]
    program = f"from trainwright.train.launch import launch; raise SystemExit(launch({arguments!r}, 2))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline_s = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    child.send_signal(number)
    _, complaint = child.communicate(timeout=40)
    assert child.returncode == status
    assert complaint == ""
    assert workers_of(tmp_path) == []
    # What is written is whole lines.
    assert all(StepRecord.parse(json.loads(line)) for line in metrics.read_text().splitlines())


def test_an_end_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM while the corpus is made: neither the run's directory nor the half of a corpus stays."""
    (tmp_path / "run.toml").write_text(toml.write(example_run(recipe={"precision": "fp32"})))
    arguments = ["train", str(tmp_path / "run.toml"), "--steps", "1", "--out", str(tmp_path / "out")]
    child = subprocess.Popen(
        [sys.executable, "-m", "trainwright", *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline_s = time.monotonic() + 60
    while not list(tmp_path.glob("cache/trainwright/.building-*")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=40)
    assert child.returncode == 128 + signal.SIGTERM
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["cache", "run.toml", "trainwright"]


def workers_of(directory: Path) -> list[str]:
    """Command lines of processes that still work on a run in `directory`, after a moment to go."""
    for _ in range(20):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in command and "trainwright" in command:
                found.append(command)
        if not found:
            return []
        time.sleep(0.1)
    return found
