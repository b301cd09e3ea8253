"""Whole runs under supervision: killed, stopped, hung, crashed, corrupted, given numbers that are none, and left
with fewer places. What is said, what is done, and that the losses are those of a run which nothing happened to."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example import example_run

from trainwright.spec import toml
from trainwright.spec.run import Run
from trainwright.train.checkpoint.directory import saves_in
from trainwright.train.shards import write_shards

STEPS = 24
COMMAND = [sys.executable, "-m", "trainwright"]

Plant = tuple[str, int, int]
"""Kind, rank, step."""


def run_on(directory: Path, name: str, tables: dict[str, Any], **fields: Any) -> Path:
    """A run file of `STEPS` steps over shards in `directory`, with these tables beside."""
    shards = directory / "shards"
    if not shards.is_dir():
        shards.mkdir()
        generator = np.random.default_rng(0)
        write_shards(shards, [generator.integers(97, size=6000, dtype=np.uint32)], 258, "test")
    run = example_run(**fields)
    values = run.plain() | {
        "data": {"source": "shards", "path": str(shards), "vocab_size": 258},
        "budget": {"tokens": STEPS * run.recipe.tokens_per_step},
    }
    path = directory / name
    path.write_text(toml.write(Run.parse(values | tables).check()))
    return path


def train(run_file: Path, out: Path, *plants: Plant, place: int = 5) -> tuple[int, str]:
    """Status, and what was said on standard error."""
    command = [*COMMAND, "train", str(run_file), "--out", str(out)]
    if plants:
        file = run_file.with_name(f"{out.name}.plants")
        named = [{"kind": kind, "rank": rank, "step": step, "place": place} for kind, rank, step in plants]
        file.write_text(json.dumps(named))
        command += ["--plants", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr


def losses(out: Path) -> list[tuple[int, float]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines)]


def faults(out: Path) -> list[dict[str, Any]]:
    """What went wrong and what was done; that the run goes on again is left out."""
    lines = (out / "faults.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] != "resumed"]


def what(out: Path) -> list[tuple[str, int | None, int]]:
    return [(each["kind"], each.get("rank"), each["step"]) for each in faults(out)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two ranks to which nothing happened: one in `plain`."""
    directory = tmp_path_factory.mktemp("supervised")
    supervision = {"digest_every_steps": 4, "lemon_after": 100}
    run_file = run_on(directory, "run.toml", {"checkpoint": {"every_steps": 3}, "supervision": supervision}, dp=2)
    status, said = train(run_file, directory / "plain")
    assert status == 0, said
    assert not (directory / "plain" / "faults.jsonl").exists(), "an alarm, and nothing was wrong"
    return directory


def test_whatever_ends_a_rank_the_losses_are_those_of_a_run_that_never_stopped(home: Path) -> None:
    out = home / "all"
    plants = (
        ("kill", 1, 5),
        ("stop", 0, 8),
        ("busy", 1, 13),
        ("store", 0, 14),  # in the second step after a start
        ("crash", 1, 17),
        ("flip", 1, 20),
    )
    status, said = train(home / "run.toml", out, *plants)
    assert status == 0, said
    assert losses(out) == losses(home / "plain")
    # Of two replicas it can't be told which is wrong; the digests are compared before the save of step 21.
    ended = [
        ("died", 1, 5),
        ("hung", 0, 8),
        ("hung", 1, 13),
        ("hung", 0, 14),
        ("died", 1, 17),
        ("corrupt", None, 20),
    ]
    seen = what(out)
    assert seen[:-1] == ended[:-1]
    assert seen[-1][:2] == ended[-1][:2]
    texts = [each["text"] for each in faults(out)]
    assert texts[0].startswith("rank 1 ended by SIGKILL")
    assert texts[1] == "rank 0 hangs in host of step 8: its process is stopped"
    assert texts[2].startswith("rank 1 hangs in compute of step 13 (plant.py:")
    assert ": 0 wait in all_reduce number " in texts[2]
    assert texts[3].startswith("rank 0 hangs in compute of step 14 (plant.py:")
    assert "RuntimeError: planted: this rank crashes" in "\n".join(faults(out)[4]["said"])
    assert "is not the same on ranks 0, 1, and which is right can't be told" in texts[5]
    told = map(json.loads, (out / "faults.jsonl").read_text().splitlines())
    resumed = [each for each in told if each["kind"] == "resumed"]
    assert len(resumed) == len(plants)
    assert all(each["done_again"] <= 6 for each in resumed)
    for each in faults(out):
        assert each["found_after_s"] <= 3.0
        assert each["text"] in said


def test_the_state_comes_back_from_memory_and_from_storage_where_both_copies_are_gone(home: Path) -> None:
    """Shards of two ranks. A death may hit the step whose copies are still on their way: then one more is lost."""
    checkpoint = {"every_steps": 6, "asynchronous": False, "memory_every_steps": 1}
    tables = {"checkpoint": checkpoint, "supervision": {"lemon_after": 100}}
    run_file = run_on(home, "memory.toml", tables, dp=2, recipe={"zero": 1})
    status, said = train(run_file, home / "unhurt")
    assert status == 0, said
    assert "each rank's state is in the memory of 2 of 2 hosts; none is lost with probability 1 if 1 are" in said
    status, said = train(run_file, home / "memory", ("kill", 1, 5), ("lose", 0, 11), ("lose_all", 1, 17))
    assert status == 0, said
    resumed = re.findall(r"resumed at step (\d+) from (memory|/)(, 1 of its ranks from a peer's)?", said)
    assert [each[1:] for each in resumed] == [
        ("memory", ""),
        ("memory", ", 1 of its ranks from a peer's"),
        ("/", ""),
    ]
    assert int(resumed[0][0]) in (3, 4)
    assert int(resumed[1][0]) in (9, 10)
    assert resumed[2][0] == "12"
    assert losses(home / "memory") == losses(home / "unhurt")
    ends = [saves_in(home / name / "checkpoints")[0].manifest() for name in ("unhurt", "memory")]
    digests = [[piece.digests for part in each.parts for piece in part.pieces] for each in ends]
    assert digests[0] == digests[1]


@pytest.fixture(scope="module")
def guarded(home: Path) -> Callable[..., Path]:
    def run_file(name: str, **guard: Any) -> Path:
        tables = {
            "checkpoint": {"every_steps": 4, "asynchronous": False},  # so that a planted death is after the save
            "supervision": {"lemon_after": 100},
            "guard": guard,
        }
        return run_on(home, name, tables, dp=2)

    return run_file


def test_what_is_no_number_moves_nothing_and_a_resume_does_the_same(home: Path, guarded: Callable) -> None:
    run_file = guarded("skip.toml", action="skip", cool_down_steps=3)
    status, said = train(run_file, home / "skipped", ("nan", 1, 6))
    assert status == 0, said
    assert "step 6: loss nan: its update is left out; 3 steps learn slowly" in said
    lines = [json.loads(line) for line in (home / "skipped" / "metrics.jsonl").read_text().splitlines()]
    assert [each["lr"] for each in lines[4:10]] == pytest.approx([0.01, 0.0, 0.001, 0.001, 0.001, 0.01])
    assert lines[5]["loss"] is None
    assert all(np.isfinite(each["loss"]) for number, each in enumerate(lines) if number != 5)
    # Before the bad step all is as it was without it, after it nothing; and dying in between changes nothing.
    assert losses(home / "skipped")[:5] == losses(home / "plain")[:5]
    assert losses(home / "skipped")[-1] != losses(home / "plain")[-1]
    status, said = train(run_file, home / "again", ("nan", 1, 6), ("kill", 0, 9))
    assert status == 0, said
    assert [each[0] for each in what(home / "again")] == ["died"]
    assert losses(home / "again") == losses(home / "skipped")
    ends = [saves_in(home / name / "checkpoints")[0].manifest() for name in ("skipped", "again")]
    digests = [[piece.digests for part in each.parts for piece in part.pieces] for each in ends]
    assert digests[0] == digests[1]
    assert ends[0].guard.skipped == 1


def test_a_spike_takes_the_run_back_to_a_commit_and_over_the_batch(home: Path, guarded: Callable) -> None:
    run_file = guarded("back.toml", action="roll_back", spike_deviations=7.0, window=8)
    status, said = train(run_file, home / "back", ("spike", 1, 15))
    assert status == 0, said
    assert "rolled back to step 12, and on with sample 120" in " ".join(said.split())
    assert losses(home / "back")[:12] == losses(home / "plain")[:12]
    assert [step for step, _ in losses(home / "back")] == list(range(1, STEPS + 1))
    newest = saves_in(home / "back" / "checkpoints")[0].manifest()
    assert (newest.step, newest.samples) == (STEPS, 15 * 8 + (STEPS - 12) * 8)
    status, said = train(run_file, home / "back again", ("spike", 1, 15), ("kill", 0, 18))
    assert status == 0, said
    assert losses(home / "back again") == losses(home / "back")


def test_a_run_that_diverged_is_not_started_again(home: Path, guarded: Callable) -> None:
    status, said = train(guarded("stop.toml", action="stop"), home / "stopped", ("nan", 0, 6))
    assert status == 1
    assert "step 6: loss nan; the run ends here, as guard.action says" in said
    assert [each[0] for each in what(home / "stopped")] == ["diverged"]


def test_a_place_that_fails_again_is_left_out_and_the_run_goes_on_with_fewer_replicas(home: Path) -> None:
    policy = {"lemon_after": 2, "grow_after_steps": 4}
    run_file = run_on(home, "lemon.toml", {"checkpoint": {"every_steps": 3}, "supervision": policy}, dp=2)
    status, said = train(run_file, home / "lemon", ("kill", 1, 5), ("kill", 1, 8))
    assert status == 0, said
    kinds = [each[0] for each in what(home / "lemon")]
    assert kinds == ["died", "died", "excluded", "shrunk", "grown"]
    texts = [each["text"] for each in faults(home / "lemon")]
    assert texts[2] == "place 1 of this node failed 2 times: a lemon, and is left out"
    assert texts[3] == "the run goes on with 1 dp replicas instead of 2, and the same global batch"
    for (step, seen), (other, expected) in zip(losses(home / "lemon"), losses(home / "plain"), strict=True):
        assert step == other
        assert seen == pytest.approx(expected, rel=1e-12), step
    newest = saves_in(home / "lemon" / "checkpoints")[0].manifest()
    assert newest.samples == STEPS * 8
    assert newest.run["layout"]["dp"] == 2


def test_a_run_that_gets_no_further_is_given_up(home: Path) -> None:
    policy = {"max_restarts": 0, "lemon_after": 100}
    run_file = run_on(home, "lost.toml", {"checkpoint": {"every_steps": 3}, "supervision": policy}, dp=2)
    status, said = train(run_file, home / "lost", *[("kill", 1, 5)] * 2)
    assert status == 128 + signal.SIGKILL
    assert what(home / "lost") == [("died", 1, 5)] * 2
    assert "is given up" in said


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--set", "supervision.hang_s=0.1"], "supervision.hang_s=0.1: "),
        (["--set", "supervision.slow_factor=1"], "supervision.slow_factor=1"),
        (
            ["--set", "guard.action=roll_back", "--set", "checkpoint.overhead_bound=0.1"],
            "guard.action='roll_back': needs",
        ),
        (["--set", "guard.cool_down_factor=0.5"], "guard.cool_down_factor=0.5: is the rate of cool_down_steps"),
        (["--set", "guard.window=64"], "guard.window=64: is what spikes are judged by"),
        (["--set", "supervision.grow_after_steps=5"], "supervision.grow_after_steps=5: stops the run at a commit"),
        (["--set", "checkpoint.memory_every_steps=1"], "checkpoint.memory_every_steps=1: is for a run that is"),
        (["--set", "checkpoint.memory_replicas=3"], "checkpoint.memory_replicas=3: is of states kept in memory"),
        (["--plants", "none.json"], "--plants='none.json': is for a run that is supervised"),
    ],
)
def test_nonsense_is_refused_in_one_line(home: Path, more: list[str], complaint: str) -> None:
    run_file = run_on(home, "bare.toml", {}, dp=2)
    command = [*COMMAND, "train", str(run_file), "--out", str(home / "refused"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (home / "refused").exists()


def test_an_interrupted_run_leaves_neither_processes_nor_memory(home: Path) -> None:
    out = home / "interrupted"
    command = [*COMMAND, "train", str(home / "run.toml"), "--steps", "100000", "--out", str(out)]
    before = set(Path("/dev/shm").glob("trainwright-*"))
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    own = set(Path("/dev/shm").glob("trainwright-*")) - before
    child.send_signal(signal.SIGTERM)
    assert child.wait(40) == 128 + signal.SIGTERM
    assert not any(each.exists() for each in own)
    assert not [each for each in os.listdir("/proc") if each.isdigit() and _works_on(each, out)]


def _works_on(process: str, out: Path) -> bool:
    try:
        return str(out).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
