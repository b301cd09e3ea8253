"""Parts of `make chaos` that take seconds, in a small share: what they say is looked at here as the report looks
at it, and their own controls must fail."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "survival"))

import damage
import power
import report
import retention

SEQUENCES = 200


def test_there_is_a_good_commit_at_every_instant() -> None:
    """Of sequences of saves, full disks, crashes, rot and resumes."""
    seen = list(retention.trials(SEQUENCES / retention.SEQUENCES, 1))
    assert sum(each["sequences"] for each in seen) == SEQUENCES
    assert sum(each["unsafe"] for each in seen) == 0
    assert sum(each["looks"] for each in seen) > 10 * SEQUENCES
    acts = sum((Counter(each["acts"]) for each in seen), Counter())
    assert acts.keys() == {"save", "fail", "crash", "rot"}


def test_a_sequence_notices_a_moment_without_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that removes the older commits before the new one is there."""
    plain = retention.commit

    def hasty(save, *rest):  # type: ignore[no-untyped-def]
        for each in retention.saves_in(save.path.parent):
            if each.step != save.step:
                retention.shutil.rmtree(each.path)
        plain(save, *rest)

    monkeypatch.setattr(retention, "commit", hasty)
    assert sum(each["unsafe"] for each in retention.trials(20 / retention.SEQUENCES, 1)) > 0


def test_every_state_of_a_disk_that_loses_power_loads_a_commit() -> None:
    seen = list(power.trials(0.1, 0))
    saves, controls = ([each for each in seen if each["kind"] == kind] for kind in ("save", "control"))
    assert sum(each["states"] for each in saves) > 100
    assert all(each["unsafe"] == each["lost"] == 0 for each in saves)
    # Without fsync the same calls lose it.
    assert all(each["lost"] > 0 for each in controls)


def test_whatever_is_damaged_is_rejected_by_name() -> None:
    seen = list(damage.trials(0.005, 1))
    ours = [each for each in seen if each["whose"] == "ours"]
    assert {each["outcome"] for each in ours} == {damage.REJECTED}
    assert {each["kind"] for each in ours} >= {"flip", "zero", "cut", "missing", "swapped", "mixed generations"}
    assert any(each["outcome"] == damage.SILENT for each in seen if each["whose"] == "DCP")
    (row,) = report.ROWS["damage"](seen)
    assert row[3].startswith("0 silent")
    assert not row[4], "50 flips are fewer than the mark asks for"
