"""`chaos` on a run of two ranks: faults of a seeded plan are seen as what they are and cost no bit; and it says so
where one did."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from test_supervision import run_on

from trainwright.cli.files import read_run
from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.supervision import Supervision
from trainwright.train.faults.campaign import LEAST_APART, SEEN_AS, drawn, kinds_of, left_out_of, toll

COMMAND = [sys.executable, "-m", "trainwright", "chaos"]
STEPS, KINDS = 28, "later,rot,full,lose"
"""The others are in `test_supervision.py`, seen by the same program."""


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The output of a run under each kind of fault but those of `test_supervision.py`, and what was said of it."""
    directory = tmp_path_factory.mktemp("chaos")
    run_on(directory, "run.toml", {}, dp=2)
    more = ["--steps", str(STEPS), "--faults", "4", "--kinds", KINDS, "--seed", "3", "--json"]
    command = [*COMMAND, str(directory / "run.toml"), "--out", str(directory / "out"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory, json.loads(done.stdout)


def test_no_fault_costs_a_bit(hurt: tuple[Path, dict]) -> None:
    _, said = hurt
    assert said["is_survived"]
    assert said["losses_equal"]
    assert said["state_equal"]
    assert said["false_alarms"] == []
    assert said["left_out"] == {}
    assert sorted(blow["kind"] for blow in said["blows"]) == sorted(KINDS.split(","))
    for blow in said["blows"]:
        assert blow["is_right"], blow
        assert bool(blow["seen_as"]) == (blow["kind"] != "full")
        assert blow["found_after_s"] <= 3.0
        # A commit every fifth step, and the newest one rotten or on its way.
        assert blow["done_again"] <= 15


def test_it_says_where_a_bit_differs(hurt: tuple[Path, dict]) -> None:
    directory, said = hurt
    plain, beaten = directory / "out" / "plain", directory / "out" / "hurt"
    run = read_run(beaten / "run.toml")
    lines = (beaten / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[20])
    record["loss"] += 1e-12
    (beaten / "metrics.jsonl").write_text("\n".join([*lines[:20], json.dumps(record), *lines[21:]]) + "\n")
    changed = toll(run, 3, [], plain, beaten, (1.0, 1.0))
    assert not changed.losses_equal
    assert changed.first_difference == 21
    assert not changed.is_survived
    assert len(changed.false_alarms) == len([blow for blow in said["blows"] if blow["seen_as"]])


def test_a_plan_follows_from_its_seed_and_keeps_faults_apart(hurt: tuple[Path, dict]) -> None:
    directory, _ = hurt
    tables = {
        "checkpoint": Checkpointing(every_steps=5, memory_every_steps=1),
        "supervision": Supervision(digest_every_steps=5),
    }
    run = read_run(directory / "run.toml").changed(**tables)
    kinds = kinds_of(run, [])
    assert kinds == list(SEEN_AS)
    one, same, other = (drawn(run, 100, 10, kinds, seed) for seed in (1, 1, 2))
    assert one == same != other
    for seed in range(200):
        plan = drawn(run, 100, 10, kinds, seed)
        assert sorted(each.kind for each in plan) == sorted(kinds)
        steps = [each.step for each in plan]
        assert all(later - earlier >= max(LEAST_APART, 5) for earlier, later in pairwise(steps))
        assert steps[0] > 5
        assert steps[-1] <= 100
    without = run.changed(checkpoint=Checkpointing(every_steps=5), supervision=Supervision())
    assert {"flip", "lose"}.isdisjoint(kinds_of(without, []))
    # A bit that flips in a shard is nobody else's to compare.
    sharded = run.with_value("recipe.zero", 1)
    assert "flip" not in kinds_of(sharded, [])
    assert "unseen by nature" in left_out_of(sharded)["flip"]
    assert left_out_of(run) == {}
    assert "flip" not in kinds_of(run.with_values([("layout.dp", 1), ("layout.tp", 2)]), [])
    with pytest.raises(InvalidSpec, match=r"--kinds='lose': needs checkpoint\.memory_every_steps above 0"):
        kinds_of(without, ["lose"])


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--kinds", "pest"], "--kinds='pest': is no fault"),
        (["--faults", "50"], "--faults=50: is more than "),
        (["--set", "guard.action=skip"], "guard.action='skip': lets faults change the losses"),
    ],
)
def test_nonsense_is_refused_in_one_line(
    hurt: tuple[Path, dict], tmp_path: Path, more: list[str], complaint: str
) -> None:
    command = [*COMMAND, str(hurt[0] / "run.toml"), "--out", str(tmp_path / "out"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
