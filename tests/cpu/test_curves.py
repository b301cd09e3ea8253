"""The same run whatever the layout: over steps of real text, the loss curves of six layouts that use every axis
are that of one rank, in float64. Twenty steps, or with `--all-cases` a hundred.

The bound is for what those steps make of rounding errors that differ from the first one on; seen are 8e-16."""

import json

import pytest
from curves import LAYOUTS
from launching import run_ranks

from trainwright.train.corpus import build_corpus

BOUND = 1e-12


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest) -> int:
    return 100 if request.config.getoption("--all-cases") else 20


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory, steps: int) -> dict[str, list[float]]:
    directory = tmp_path_factory.mktemp("curves")
    shards = build_corpus(directory, 258, lambda what, done: None)
    found: dict[str, list[float]] = {}
    for world in LAYOUTS:
        output = directory / f"{world}.json"
        run_ranks("curves.py", world, str(world), str(output), str(shards), str(steps), timeout_s=1800.0)
        found |= json.loads(output.read_text())
    return found


def test_the_plain_run_learns(curves: dict[str, list[float]], steps: int) -> None:
    losses = curves["one rank"]
    assert len(losses) == steps
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("layout", LAYOUTS[4])
def test_a_layout_has_the_curve_of_one_rank(curves: dict[str, list[float]], layout: str, steps: int) -> None:
    assert len(curves[layout]) == steps
    assert curves[layout] == pytest.approx(curves["one rank"], rel=BOUND)
