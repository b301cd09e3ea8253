"""One bit that flips in one replica of the state is found by the next comparison, with the tensor, and with the
rank where there are three or more; and replicas to which nothing happened are the same to the bit."""

import json
from typing import Any

import pytest
from launching import run_ranks
from replica_cases import ODD, RUNS


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    output = tmp_path_factory.mktemp("replicas") / "seen.json"
    run_ranks("replica_cases.py", 4, str(output))
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("dp 4")])
def test_of_four_replicas_the_rank_is_named(seen: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert len(seen[name]) >= 4
    assert any(":" in each["tensor"] for each in seen[name]), "no moment among them"
    for each in seen[name]:
        assert each["found"], each
        assert each["ranks"] == [ODD]
        assert f"{each['tensor']} of rank {ODD} differs from that of its replicas, ranks 0, 1, 3" in each["text"]


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("dp 4") and name != "shards"])
def test_of_two_replicas_both_are_named(seen: dict[str, list[dict[str, Any]]], name: str) -> None:
    found = [each for each in seen[name] if each["found"]]
    assert found
    for each in found:
        assert each["text"].partition(": ")[2].startswith(each["tensor"])
        assert each["ranks"] in ([], [ODD])
        if not each["ranks"]:
            assert "which is right can't be told" in each["text"]
            assert str(ODD) in each["text"]
    # Experts are spread over ranks, and so some blocks are held once.
    assert name == "experts" or len(found) == len(seen[name])


def test_what_is_held_once_can_not_be_compared(seen: dict[str, list[dict[str, Any]]]) -> None:
    assert not any(each["found"] for each in seen["shards"])
