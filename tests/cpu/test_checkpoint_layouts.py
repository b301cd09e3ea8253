"""A commit of any layout and process count is loaded by any other, bit for bit, and the losses go on as if the run
had never stopped: to the bit under the same layout, to 1e-12 in float64 under another.

What was saved is written down by DTensor's own gathering (`checkpoint_cases.py`); `safetensors` reads it too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import BEFORE, EXACT, FAMILIES, folder, layouts_of, sources_of
from launching import run_ranks
from safetensors.torch import load_file

BOUND = 1e-12


def pairs(*, all_cases: bool) -> list[tuple[str, tuple[int, str], tuple[int, str]]]:
    """Family, layout, and whose commit it loads."""
    return [
        (family, layout, source)
        for family in FAMILIES
        for layout in layouts_of(family)
        for source in sources_of(family, *layout, all_cases=all_cases)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "source" in metafunc.fixturenames:
        metafunc.parametrize(
            ("family", "layout", "source"), pairs(all_cases=metafunc.config.getoption("--all-cases"))
        )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layouts")
    for world in (1, 2, 4):
        run_ranks("checkpoint_cases.py", world, "save", str(world), str(directory), timeout_s=900.0)
    return directory


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, directory: Path) -> dict[Any, dict[str, Any]]:
    found = {}
    what = "load-all" if request.config.getoption("--all-cases") else "load"
    for world in (1, 2, 4):
        run_ranks("checkpoint_cases.py", world, what, str(world), str(directory), timeout_s=1800.0)
        for each in json.loads((directory / f"loaded-{world}.json").read_text()):
            found[each["family"], tuple(each["layout"]), tuple(each["source"])] = each
    return found


def test_a_layout_loads_a_commit(
    loaded: dict[Any, dict[str, Any]], family: str, layout: tuple[int, str], source: tuple[int, str]
) -> None:
    seen = loaded[family, layout, source]
    assert (seen["step"], seen["samples"]) == (BEFORE, BEFORE * 8)
    if layout == source:
        assert seen["different"] == []
        assert seen["losses"] == seen["expected"]
    elif family == "moments in int8":
        # Other blocks have other scales: moments are rounded once more, weights are not.
        assert all(":" in name for name in seen["different"])
        assert seen["losses"] == pytest.approx(seen["expected"], rel=1e-2)
    else:
        assert seen["different"] == []
        bound = BOUND if family in EXACT else 2e-2
        assert seen["losses"] == pytest.approx(seen["expected"], rel=bound)


def test_every_commit_is_loaded_by_another_layout() -> None:
    for family in FAMILIES:
        crossed = {
            source for each, layout, source in pairs(all_cases=False) if each == family and layout != source
        }
        assert crossed == set(layouts_of(family))


@pytest.mark.parametrize(("family", "layout"), [(each, one) for each in FAMILIES for one in layouts_of(each)])
def test_weights_are_readable_by_safetensors(directory: Path, family: str, layout: tuple[int, str]) -> None:
    """Blocks of all files, put where their names say, are the whole weights and nothing else."""
    root = folder(directory, family, *layout)
    expected = {name: each for name, each in torch.load(root / "state.pt").items() if ":" not in name}
    found = {name: torch.full_like(each, float("nan")) for name, each in expected.items()}
    (commit,) = root.glob("step-*")
    for path in commit.glob("weights-*.safetensors"):
        for title, values in load_file(path).items():
            name, _, place = title.partition("@")
            slices = [slice(int(first), int(last)) for first, last in re.findall(r"(\d+):(\d+)", place)]
            found[name][tuple(slices)] = values
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def test_nothing_is_pickled(directory: Path) -> None:
    endings = {path.suffix for path in directory.glob("*/*/step-*/*")}
    assert endings == {".json", ".safetensors"}
