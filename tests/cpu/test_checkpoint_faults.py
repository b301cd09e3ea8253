"""Storage that is full or hangs holds up no step and loses no commit, and is told with its rank."""

import json
from typing import Any

import pytest
from checkpoint_faults import BAD_STEP, STEPS
from launching import run_ranks

from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.errors import InvalidSpec
from trainwright.train.checkpoint.frequency import FIRST_STEPS, WARM_UP, Frequency


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("faults")
    output = directory / "seen.json"
    run_ranks("checkpoint_faults.py", 2, str(directory), str(output))
    return json.loads(output.read_text())


def test_every_step_is_saved_where_nothing_fails(seen: dict[str, dict[str, Any]]) -> None:
    plain = seen["undisturbed"]
    assert plain["notes"] == []
    assert plain["commits"] == [[step, step - 1][: min(step, 2)] for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("what", ["full disk", "input/output error", "full disk at the end", "hung"])
def test_steps_go_on_and_the_last_commit_stays(seen: dict[str, dict[str, Any]], what: str) -> None:
    assert seen[what]["losses"] == seen["undisturbed"]["losses"]
    assert all(seen[what]["commits"])
    newest = [commits[0] for commits in seen[what]["commits"]]
    assert newest == sorted(newest)


@pytest.mark.parametrize(
    ("what", "said"),
    [("full disk", "No space left on device"), ("input/output error", "Input/output error")],
)
def test_a_bad_disk_is_told_with_its_rank(seen: dict[str, dict[str, Any]], what: str, said: str) -> None:
    (note,) = seen[what]["notes"]
    assert note.startswith(f"step {BAD_STEP} could not be saved, and earlier commits are as they were: rank 1: ")
    assert said in note
    assert seen[what]["commits"][BAD_STEP - 1] == [BAD_STEP - 1, BAD_STEP - 2]
    assert seen[what]["commits"][BAD_STEP] == [BAD_STEP + 1, BAD_STEP - 1]
    assert seen[what]["commits"][-1] == [STEPS, STEPS - 1]


def test_a_last_step_that_can_not_be_saved_is_an_error(seen: dict[str, dict[str, Any]]) -> None:
    assert f"step {STEPS}, the last, could not be saved" in seen["full disk at the end"]["refused"]
    assert seen["full disk at the end"]["commits"][-1] == [STEPS - 1, STEPS - 2]


def test_a_disk_that_hangs_is_told_with_its_rank(seen: dict[str, dict[str, Any]]) -> None:
    busy, late = seen["hung"]["notes"][:2]
    assert busy == f"step {BAD_STEP + 1} is not saved: step {BAD_STEP} is still being written"
    assert late.startswith(f"step {BAD_STEP} could not be saved")
    assert "rank 0: rank 1 has not written its part within 0.5 s" in late
    assert len(seen["hung"]["notes"]) == 2
    assert seen["hung"]["commits"][-1][0] == STEPS
    assert max(seen["hung"]["waited_s"][BAD_STEP - 1 : BAD_STEP + 2]) < 3.0


def times(frequency: Frequency, steps: int, step_s: float, *, is_writing: bool = False) -> list[int]:
    """Steps, from 1 on, at which it is due."""
    due = []
    for step in range(1, steps + 1):
        frequency.stepped(step_s, is_writing=is_writing)
        if frequency.is_due(step):
            due.append(step)
            frequency.saved(0.0)
    return due


def test_a_fixed_interval_counts_steps_of_the_run() -> None:
    assert times(Frequency(Checkpointing(every_steps=3)), 10, 1.0) == [3, 6, 9]


@pytest.mark.parametrize(
    ("blocked_s", "whole_s", "interval"),
    # Of steps of 1 s and a bound of 10%: at once; as long as files take; as long as the wait is 10%.
    [(0.05, 0.5, 1), (0.05, 7.5, 8), (0.35, 2.0, 4)],
)
def test_the_interval_is_checkfreqs(blocked_s: float, whole_s: float, interval: int) -> None:
    frequency = Frequency(Checkpointing(overhead_bound=0.1))
    assert times(frequency, FIRST_STEPS, 1.0) == [FIRST_STEPS]
    frequency.saved(blocked_s)
    assert frequency.next_interval(whole_s) == interval


def test_the_interval_grows_while_steps_are_slowed_down() -> None:
    """Steps of 1 s that take 1.3 s beside writing: the bound of 10% is passed until saves are rare enough."""
    frequency = Frequency(Checkpointing(overhead_bound=0.1))
    times(frequency, FIRST_STEPS, 1.0)
    intervals = []
    for _ in range(12):
        for number in range(frequency.interval):
            is_writing = number < 3
            frequency.stepped(1.3 if is_writing else 1.0, is_writing=is_writing)
        frequency.interval = frequency.next_interval(3.0)
        intervals.append(frequency.interval)
        frequency.saved(0.0)
    assert intervals == sorted(intervals)
    assert intervals[-1] == intervals[-4]
    assert 3 * 0.3 / intervals[-1] <= 0.1
    assert 3 * 0.3 / (intervals[-1] - 2) > 0.1 - 0.02
    assert WARM_UP < FIRST_STEPS


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"every_steps": 3, "overhead_bound": 0.1}, "overhead_bound=0.1: chooses the interval"),
        ({"asynchronous": False}, "asynchronous=False: makes a step wait"),
        ({"every_steps": 0}, "every_steps=0"),
        ({"keep": 0}, "keep=0"),
    ],
)
def test_what_would_be_ignored_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        Checkpointing.parse(fields)
