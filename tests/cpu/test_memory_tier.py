"""State in the memory of two hosts: what comes back when copies are damaged or gone, to the bit, on both ranks."""

import json
from typing import Any

import pytest
from launching import run_ranks
from memory_cases import DAMAGE, STEPS

COMES_BACK = {
    "none": (STEPS, 0),
    "own state": (STEPS, 1),
    "own header": (STEPS, 1),
    "a host": (STEPS, 1),
    "a file cut short": (STEPS, 1),
    "both copies of a step": (STEPS - 1, 0),
}
"""The step, and how many ranks have it from a peer."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("memory")
    output = directory / "seen.json"
    run_ranks("memory_cases.py", 2, str(directory), str(output))
    return json.loads(output.read_text())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", COMES_BACK)
def test_the_newest_state_that_hosts_hold_of_all_ranks_comes_back(
    seen: list[dict[str, Any]], name: str, rank: int
) -> None:
    step, from_peers = COMES_BACK[name]
    expected = {"step": step, "samples": 8 * step, "from_peers": from_peers}
    found = {"guard": True, "same": True, "optimizer_step": True, "same_next_loss": True}
    assert seen[rank][name] == expected | found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["both copies of both", "older than storage", "another layout"])
def test_where_there_is_none_storage_is_read(seen: list[dict[str, Any]], name: str, rank: int) -> None:
    assert seen[rank][name] is None


def test_all_damage_is_looked_at() -> None:
    assert set(DAMAGE) == {*COMES_BACK, "both copies of both"}


def test_the_probability_is_told(seen: list[dict[str, Any]]) -> None:
    held = (
        "each rank's state is in the memory of 2 of 2 hosts; none is lost with probability 1 if 1 are lost at once"
    )
    assert seen[0]["text"] == held
