"""`sweep --train` trains a run with each value and tabulates what was predicted and seen."""

import json
from pathlib import Path

import numpy as np
import pytest
from example import example_run

from trainwright.cli.main import run as command
from trainwright.spec import toml
from trainwright.train.shards import write_shards


def written(directory: Path) -> str:
    shards = directory / "shards"
    shards.mkdir()
    write_shards(shards, [np.tile(np.arange(97, dtype=np.uint32), 60)], 258, "test")
    run = example_run(dp=2, recipe={"precision": "fp32"})
    run = run.changed(data=run.data.changed(source="shards", path=str(shards))).check()
    (directory / "run.toml").write_text(toml.write(run))
    return str(directory / "run.toml")


def test_fields_are_toggled_one_at_a_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    over = ["--over", "recipe.zero=0,3", "--over", "recipe.cuda_graphs=full", "--over", "layout.dp=3"]
    status = command(["sweep", written(tmp_path), "--train", "--steps", "3", *over, "--json"])
    captured = capfd.readouterr()
    assert status == 0, captured.err
    document = json.loads(captured.out)
    assert document["steps"] == 3
    assert [each["values"] for each in document["trials"]] == [{"recipe.zero": 0}, {"recipe.zero": 3}]
    for each in document["trials"]:
        for quantity in ("tokens_per_s", "peak_bytes"):
            assert each[quantity]["predicted"] > 0
            assert each[quantity]["seen"] > 0
    # Shards are smaller than copies, predicted and seen.
    copies, shards = (each["peak_bytes"] for each in document["trials"])
    assert shards["seen"] < copies["seen"]
    assert shards["predicted"] < copies["predicted"]
    graphs, third = document["untrained"]
    assert "recipe.cuda_graphs='full': is planned but not trained yet" in graphs["reason"]
    assert "must be a multiple of micro_batch*dp" in third["reason"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--over", "recipe.zero=0", "--steps", "3"], "--steps=3: is for --train"),
        (["--train", "--over", "recipe.zero=0", "--svg", "a.svg"], "--svg='a.svg': plots predictions"),
        (["--train", "--over", "recipe.cuda_graphs=full,partial"], "none of the 2 can be trained; the first"),
        (["--train"], "--over"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert command(["sweep", written(tmp_path), *arguments]) == 2
    said = capfd.readouterr().err
    assert complaint in said.splitlines()[-1]
