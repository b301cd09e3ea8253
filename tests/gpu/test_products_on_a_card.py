"""Products in few bits by a GPU's own instructions are emulation's, within what the format rounds; without a GPU
the same program runs on the CPU, so that the script is never stale."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent / "products.py"
RECIPES = {"fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"}
MOST_S = 300.0


def answer(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *arguments], capture_output=True, text=True, timeout=2 * MOST_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def require_alike(found: dict[str, Any]) -> None:
    """Sums of few bits are off by less than rounding one of the operands may be."""
    for precision in RECIPES:
        for row in (row for row in found[precision].values() if isinstance(row, dict)):
            assert set(row["errors"]) == {"Fprop", "Dgrad", "Wgrad"}
            assert max(row["errors"].values()) < found[precision]["half_step"], precision


def test_the_script_runs_on_the_cpu() -> None:
    found = answer("--tiny")
    assert set(found) == {"bf16", *RECIPES}
    assert not any(found[precision]["hardware"] for precision in RECIPES)
    require_alike(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_card() -> None:
    found = answer()
    require_alike(found)
    by_hardware = [precision for precision in RECIPES if found[precision]["hardware"]]
    assert by_hardware or torch.cuda.get_device_capability() < (8, 9)
    for precision in by_hardware:
        assert found[precision]["16384"]["product_speedup"] > 1.2, precision
