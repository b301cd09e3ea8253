"""What a run leaves of where its time went: every rank's line a step, a trace of a window, and explain of both."""

import gzip
import json
from pathlib import Path

import pytest
from test_launch import run_on

from trainwright.cli.files import read_run
from trainwright.cli.main import run as command
from trainwright.measure.records import parse_step_seconds
from trainwright.spec import toml
from trainwright.spec.ledger import STEP_SECONDS, seen_seconds
from trainwright.spec.record import StepRecord, StepSeconds
from trainwright.spec.window import parse_window
from trainwright.train.clock import Clock
from trainwright.train.device_clock import DeviceClock
from trainwright.train.launch import launch
from trainwright.train.telemetry import Telemetry

STEPS = 9


def document_of(arguments: list[str | Path], capsys: pytest.CaptureFixture[str], status: int = 0) -> dict:
    capsys.readouterr()
    assert command([*map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two stages and two data-parallel ranks, sharded, that saved, with a window of steps profiled."""
    directory = tmp_path_factory.mktemp("telemetry")
    run_on(
        directory,
        pp=2,
        dp=2,
        recipe={"precision": "fp32", "zero": 2, "recompute": "full"},
    )
    run = read_run(directory / "run.toml", ["checkpoint.every_steps=4"])
    (directory / "run.toml").write_text(toml.write(run))
    lines: list[str] = []
    arguments = ["train", str(directory / "run.toml"), "--steps", str(STEPS), "--out", str(directory / "out")]
    status = launch([*arguments, "--profile", "7:8"], 4, on_line=lines.append)
    assert status == 0, lines
    (directory / "said").write_text("\n".join(lines))
    return directory / "out"


def test_every_rank_writes_every_step(trained: Path) -> None:
    metrics = [StepRecord.parse(json.loads(line)) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for rank in range(4):
        path = trained / "causes" / f"rank-{rank}.jsonl"
        records = parse_step_seconds(path.read_text(), str(path))
        assert [(each.step, each.rank) for each in records] == [(step, rank) for step in range(1, STEPS + 1)]
        for each in records:
            assert set(each.seconds) == set(STEP_SECONDS)
            assert each.seconds["compute"] > 0
            assert each.seconds["optimizer"] > 0
            assert each.seconds["data"] > 0
            assert each.seconds["dp"] > 0, "FSDP2's waits are charged in every step"
            assert each.seconds["bubble"] > 0
            assert each.seconds["tp"] == each.seconds["cp"] == each.seconds["ep"] == 0
        assert records[3].checkpoint_s > 1e-4
        if rank == 0:
            sums = [sum(each.seconds.values()) for each in records]
            assert sums == pytest.approx([each.step_s for each in metrics])


def test_the_log_has_the_causes_and_what_mfu_counts(trained: Path) -> None:
    said = (trained.parent / "said").read_text()
    line = next(line for line in said.splitlines() if line.startswith("step 5 of 9"))
    assert "MFU" in line
    assert "compute" in line
    assert "dense fp32 peak" in said
    assert "full attention" in said
    record = StepRecord.parse(json.loads((trained / "metrics.jsonl").read_text().splitlines()[4]))
    # By hand: everything but the head is computed again, which is a third of 6 N and of attention, so that HFU is
    # between 1 and 4/3 of MFU.
    assert 1.05 < record.hfu / record.mfu < 4 / 3
    assert record.mfu == pytest.approx(record.flops_per_s / 1e11)
    assert command(["compare", str(trained), "--tolerance", "1e9"]) == 0


def test_a_trace_of_one_rank_a_stage(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = sorted((trained / "profile").iterdir())
    assert [path.name for path in traces] == ["steps-7-8_rank-0.json.gz", "steps-7-8_rank-1.json.gz"]
    document = json.loads(gzip.decompress(traces[0].read_bytes()))
    names = [event.get("name") for event in document["traceEvents"]]
    assert names.count("ProfilerStep#7") == names.count("ProfilerStep#8") == 1
    found = document_of(["explain", traces[0]], capsys)
    causes = {each["cause"]: each["seen_s"] for each in found["causes"]}
    assert sum(causes.values()) == pytest.approx(found["step_s"]["seen"])
    assert causes["dp"] > 0
    assert causes["pp"] > 0
    assert causes["optimizer"] > 0
    assert causes["matmul, attention, elementwise and recompute"] > 0
    assert "unnamed" not in causes
    # The clock's own seconds of the same two steps: annotations stand where it charges.
    records = parse_step_seconds((trained / "causes" / "rank-0.jsonl").read_text(), "rank-0")[6:8]
    charged = seen_seconds({cause: sum(each.seconds[cause] for each in records) / 2 for cause in STEP_SECONDS})
    for cause in ("pp", "optimizer"):
        assert causes[cause] == pytest.approx(charged[cause], rel=0.3, abs=5e-3)
    # What starts a collective inside compute is compute to the clock, and communication in a trace.
    assert 0.9 * charged["dp"] < causes["dp"] < charged["dp"] + charged["compute"]


def test_explain_a_run_directory(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document_of(["explain", trained], capsys)
    assert found["source"] == "telemetry of 4 ranks"
    assert found["steps"] == STEPS - 2
    causes = {each["cause"]: each["seen_s"] for each in found["causes"]}
    assert sum(causes.values()) == pytest.approx(found["step_s"]["seen"])
    assert causes["compute"] > 0
    assert causes["bubble"] > 0
    gaps = [each["gap_s"] for each in found["causes"]]
    assert gaps == sorted(gaps, reverse=True)
    notes = " ".join(found["notes"])
    assert "make the batch" in notes
    assert "saving held the program up" in notes
    assert "steps-7-8_rank-0.json.gz" in notes
    advised = [each["fields"] for cause in found["causes"] for each in cause["try"]]
    assert not any("recipe.cuda_graphs" in fields for fields in advised), "our trainer can't carry it out"


def test_a_directory_that_is_not_whole_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "causes").mkdir(parents=True)
    (out / "run.toml").write_text((trained / "run.toml").read_text())
    texts = [(trained / "causes" / f"rank-{rank}.jsonl").read_text() for rank in range(4)]
    for rank in range(3):
        (out / "causes" / f"rank-{rank}.jsonl").write_text(texts[rank])

    def refused() -> str:
        capsys.readouterr()
        assert command(["explain", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        return captured.err

    assert "seconds of 3 ranks; the run has 4" in refused()
    last = out / "causes" / "rank-3.jsonl"
    last.write_text("".join(texts[3].splitlines(keepends=True)[:4]))
    assert "no steady steps: 4 were trained, of which the first 2 warm up; train at least 5" in refused()
    last.write_text(texts[3][:-20])
    assert "rank-3.jsonl, line 9: not JSON" in refused()
    last.write_text(texts[3])
    ledger = (trained / "ledger.jsonl").read_text()
    (out / "ledger.jsonl").write_text(
        ledger.replace(json.loads(ledger.splitlines()[0])["run_hash"], "0123456789ab")
    )
    assert "run_hash='0123456789ab'" in refused()


@pytest.mark.parametrize(
    ("option", "window", "said"),
    [
        ("--profile", "2:3", "must begin at step 3 or later"),
        ("--profile", "7:10", "must end by the run's last step, 9"),
        ("--profile", "8:7", "must be first:last"),
        ("--profile", "x", "must be first:last"),
        ("--memory-snapshot", "3:4", "PyTorch records allocations of GPUs alone"),
    ],
)
def test_windows_that_cannot_be_recorded(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, window: str, said: str
) -> None:
    out = tmp_path / "out"
    arguments = ["train", str(trained / "run.toml"), "--steps", str(STEPS), "--out", str(out), option, window]
    assert command(arguments) == 2
    assert f"{option}='{window}': {said}" in capsys.readouterr().err
    assert not out.exists()


def test_windows() -> None:
    window = parse_window("10:13", "--profile")
    assert [step for step in range(20) if step in window] == [10, 11, 12, 13]
    assert str(window) == "10:13"


class Event:
    """A CUDA event of a device whose time the test sets; it has come when the test says so."""

    now_ms = 0.0
    reached_ms = 0.0
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def synchronize(self) -> None:
        Event.reached_ms = max(Event.reached_ms, self.at_ms)

    def elapsed_time(self, later: "Event") -> float:
        assert later.query(), "reading an event that hasn't come waits for the device"
        return later.at_ms - self.at_ms


def test_a_device_is_charged_by_its_events_and_not_waited_for(tmp_path: Path) -> None:
    device = DeviceClock(Event)
    clock = Clock(marks=device)

    def step(compute_ms: float, dp_ms: float) -> dict[str, float]:
        clock.restart()
        with clock.of("compute"):
            Event.now_ms += compute_ms
            with clock.of("dp"):
                Event.now_ms += dp_ms
        Event.now_ms += 1
        return clock.read()

    with Telemetry(tmp_path, 3, device) as telemetry:
        telemetry.ended(1, step(10, 5))
        telemetry.saved(1, 0.25)
        assert telemetry.latest is None
        Event.reached_ms = Event.now_ms
        made = Event.made
        telemetry.ended(2, step(20, 0))
        telemetry.saved(2, 0.0)
        assert telemetry.latest is not None
        assert telemetry.latest.step == 1
    lines = (tmp_path / "causes" / "rank-3.jsonl").read_text().splitlines()
    first, second = (StepSeconds.parse(json.loads(line)) for line in lines)
    assert (first.step, first.rank, first.checkpoint_s) == (1, 3, 0.25)
    spent = [
        {cause: round(value, 9) for cause, value in each.seconds.items() if value} for each in (first, second)
    ]
    assert spent == [{"compute": 0.01, "dp": 0.005, "host": 0.001}, {"compute": 0.02, "host": 0.001}]
    assert second.checkpoint_s == 0
    step(1, 1)
    assert Event.made <= made + 6, "events are used again"


def test_lines_of_steps_that_are_trained_again_are_replaced(tmp_path: Path) -> None:
    def seconds(value: float) -> dict[str, float]:
        return {**dict.fromkeys(STEP_SECONDS, 0.0), "compute": value}

    with Telemetry(tmp_path, 0, None) as telemetry:
        for step in range(1, 5):
            telemetry.ended(step, seconds(1.0))
            telemetry.saved(step, 0.0)
    with Telemetry(tmp_path, 0, None, steps_done=2) as telemetry:
        telemetry.ended(3, seconds(2.0))
        telemetry.saved(3, 0.0)
    records = parse_step_seconds((tmp_path / "causes" / "rank-0.jsonl").read_text(), "rank-0")
    assert [(each.step, each.seconds["compute"]) for each in records] == [(1, 1.0), (2, 1.0), (3, 2.0)]
