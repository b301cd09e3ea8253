"""Every parallel form gives the plain model's loss, gradients, norm and weights, in float64 to 1e-10.

`parity_cases.py` has the cases and runs them, all of one world size in one launch: a part of them, or with
`--all-cases` all. The bound is far above what is seen (1e-13) and far below any error of substance; the planted
errors show that the comparison sees them.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from launching import run_ranks
from parity_cases import ALIKE, CASES, CONTROLS, part_of_cases

BOUND = 1e-10
CUT_LOSS, CUT_NORM = 1e-3, 1e-2
"""Of low-precision matmuls whose blocks a layout cuts; docs/numerics.md says which layouts do."""


@functools.cache
def results(world: int, all_cases: bool) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        part = [] if all_cases else ["part"]
        timeout_s = 5400.0 if all_cases else 1200.0
        run_ranks("parity_cases.py", world, str(world), str(output), *part, timeout_s=timeout_s)
        return json.loads(output.read_text())


@pytest.fixture(scope="session")
def all_cases(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--all-cases")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and "wrong" not in metafunc.fixturenames:
        chosen = {
            world: [*CASES[world]] if metafunc.config.getoption("--all-cases") else part_of_cases(world)
            for world in CASES
        }
        pairs = [(world, case) for world, names in chosen.items() for case in names if case in CASES[world]]
        metafunc.parametrize(("world", "case"), pairs)


def test_equals_the_plain_model(world: int, case: str, all_cases: bool) -> None:
    errors = results(world, all_cases)[case]
    if case.startswith("cut:"):
        # Blocks of scales that a layout cuts: rounding is another one, and of the same size.
        assert errors["loss"] < CUT_LOSS, errors
        assert errors["norm"] < CUT_NORM, errors
    else:
        assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in ALIKE for name in ALIKE[world]])
def test_is_the_same_to_the_bit(world: int, name: str, all_cases: bool) -> None:
    errors = results(world, all_cases)[name]
    assert errors.pop("same step") == 0.0, "a step that moved nothing shows nothing"
    assert max(errors.values()) == 0.0, errors


@pytest.mark.parametrize(
    ("world", "case", "wrong"),
    [
        (2, "dp without its reduction", "gradients"),
        (2, "pp without the tied reduction", "gradients"),
        (2, "norm of one stage alone", "norm"),
        (2, "zb_v without some weight gradients of a chunk", "gradients"),
        (2, "dualpipe without the sum over twins", "gradients"),
        (2, "dualpipe whose twins both count in the norm", "norm"),
        (2, "cp without its reduction", "gradients"),
        (2, "cp without offset positions", "gradients"),
        (2, "cp without documents", "gradients"),
        (2, "cp loss for balance of a rank's positions", "gradients"),
        (2, "cp capacity in the order of ranks", "gradients"),
        (2, "cp later tokens of a rank's positions", "gradients"),
        (2, "moe experts without their reduction", "gradients"),
        (2, "moe norm by the replicas of dense parameters", "norm"),
        (2, "moe biases moved by local loads", "weights"),
    ],
)
def test_a_planted_error_is_seen(world: int, case: str, wrong: str, all_cases: bool) -> None:
    assert case in CONTROLS[world]
    assert results(world, all_cases)[case][wrong] > 1e-3
