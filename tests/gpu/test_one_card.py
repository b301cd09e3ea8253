"""One GPU trains a billion parameters, and experts, as predicted; without one, the same program trains small
models on the CPU, so that the script is never stale."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "one_card.py"
MOST_S = 360.0


def answer(*arguments: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *arguments], capture_output=True, text=True, timeout=2 * MOST_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_trains_small_models_on_the_cpu() -> None:
    found = answer("--tiny", "--steps", "8")
    assert set(found) == {"dense", "experts"}
    for row in found.values():
        assert row["steps"] == 8
        assert row["last_loss"] < row["first_loss"]
        assert row["peak_bytes"]["seen"] == pytest.approx(row["peak_bytes"]["predicted"], rel=0.25)
    require_explained(found["dense"])


def require_explained(row: dict) -> None:
    """Telemetry and a trace share out their steps, and see where a single device's time goes."""
    telemetry, trace = row["explained"]["telemetry"], row["explained"]["trace"]
    for each in (telemetry, trace):
        assert sum(value for cause, value in each.items() if cause != "step_s") == pytest.approx(each["step_s"])
    assert telemetry["compute"] > 0.5 * telemetry["step_s"]
    assert trace["matmul"] > trace["attention"] > 0
    assert trace["optimizer"] > 0
    assert "unnamed" not in trace


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_card() -> None:
    found = answer()
    assert sum(row["took_s"] for row in found.values()) < MOST_S
    for row in found.values():
        assert row["last_loss"] < row["first_loss"]
        assert row["peak_bytes"]["seen"] == pytest.approx(row["peak_bytes"]["predicted"], rel=0.15)
        assert row["step_s"]["seen"] == pytest.approx(row["step_s"]["predicted"], rel=0.5)
    require_explained(found["dense"])
    assert found["dense"]["snapshots"] == 1
    by_device = found["dense"]["explained"]["telemetry"]["step_s"]
    assert by_device == pytest.approx(found["dense"]["step_s"]["seen"], rel=0.05), "events and the program agree"
