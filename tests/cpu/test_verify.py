"""`verify` finds whole runs equal to the plain model, and each fault that it can plant; what it says; its status.

`verify_cases.py` runs all cases of one world size in one launch; two runs go through the command line.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from example import example_run
from launching import run_ranks
from verify_cases import CLEAN, FAULTY

from trainwright.cli.main import run as command
from trainwright.spec import toml
from trainwright.spec.verdict import BOUND, Verdict
from trainwright.train.verify.faults import FAULTS


@functools.cache
def results(world: int) -> dict[str, Verdict]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        run_ranks("verify_cases.py", world, str(world), str(output))
        return {name: Verdict.parse(each) for name, each in json.loads(output.read_text()).items()}


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in CLEAN for case in CLEAN[world]])
def test_a_clean_run_is_equal(world: int, case: str) -> None:
    verdict = results(world)[f"clean: {case}"]
    assert verdict.equal
    assert 0 < verdict.worst < 1e-12
    assert [each.step for each in verdict.steps] == [1, 2]


QUANTITY = {
    **dict.fromkeys(("norm-tp", "norm-pp", "norm-dp"), "norm"),
    **dict.fromkeys(("last-microbatch", "data-order", "initial-weights", "rotary"), "loss"),
}
"""What each fault spoils first; gradients, where it isn't said."""


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in FAULTY for case in FAULTY[world]])
def test_a_fault_is_found_where_it_is(world: int, case: str) -> None:
    first = results(world)[case].first
    assert first is not None
    assert first.step == 1
    assert first.quantities[0] == QUANTITY.get(case.partition(",")[0], "gradients")
    assert first.ranks


def test_a_fault_of_some_parameters_is_found_in_those_alone() -> None:
    tied, norms = results(4)["tied"].first, results(4)["sequence-norms"].first
    assert tied is not None
    assert norms is not None
    assert (tied.parameter, tied.num_parameters) == ("embedding.weight", 1)
    # By hand: two norms in each of two layers, and the last one.
    assert (norms.parameter, norms.num_parameters) == ("layers.0.attention_norm.weight", 5)
    assert norms.ranks == (0, 1)  # the first stage's, which hold it


def test_every_fault_has_a_case() -> None:
    assert {case.partition(",")[0] for world in FAULTY for case in FAULTY[world]} == set(FAULTS)


def written(directory: Path, **fields: Any) -> str:
    path = directory / "run.toml"
    path.write_text(toml.write(example_run(**fields).check()))
    return str(path)


def test_the_command_says_equal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_file = written(tmp_path, dp=4, recipe={"zero": 3, "precision": "bf16"})
    status = command(["verify", run_file, "--processes", "2", "--steps", "2", "--json"])
    captured = capfd.readouterr()
    assert status == 0, captured.err
    document = json.loads(captured.out)
    assert document["equal"] is True
    assert document["worst"] < 1e-12 < document["bound"] == BOUND
    assert document["first"] is document["fault"] is None
    assert [set(each) for each in document["steps"]] == [{"step", "loss", "gradients", "norm", "weights"}] * 2
    assert document["run"]["layout"]["dp"] == 2
    assert {"field": "layout.dp", "before": 4, "after": 2} in document["scaled"]
    assert {"field": "recipe.precision", "before": "bf16", "after": "fp64"} in document["scaled"]


def test_the_command_names_the_axis(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without dp the fault isn't there; without tp it still is."""
    run_file = written(tmp_path, tp=2, dp=2, recipe={"zero": 1})
    status = command(["verify", run_file, "--steps", "1", "--inject", "zero-mean"])
    captured = capfd.readouterr()
    assert status == 1, captured.err
    said = " ".join(captured.out.split())
    assert "tp 2 x dp 2, 4 ranks" in said
    assert "NOT EQUAL to the plain model" in said
    assert "step 1: gradients, gradient norm, weights after" in said
    assert "embedding.weight, off by 5.0e-01, and 20 of the other 20" in said
    assert "axis dp: the fault needs dp; it is there with tp=1 too" in said


@pytest.mark.parametrize(
    ("fields", "arguments", "complaint"),
    [
        ({}, ["--inject", "norm-tp"], "--inject='norm-tp': needs layout.tp above 1; change the run with --set"),
        ({"pp": 2}, ["--inject", "tied"], "--inject='tied': needs model.tied_embeddings=true"),
        ({"dp": 2}, ["--inject", "zero-mean"], "needs recipe.zero of 1 to 3"),
        ({"tp": 2}, ["--processes", "1", "--inject", "norm-tp"], "or give --processes more"),
        ({}, ["--inject", "norm-tq"], "no such fault; did you mean norm-tp"),
        ({}, ["--processes", "0"], "--processes='0'"),
        ({}, ["--steps", "0"], "--steps='0'"),
        ({}, ["--set", "recipe.cuda_graphs=full"], "recipe.cuda_graphs='full': is planned but not trained"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    arguments: list[str],
    complaint: str,
) -> None:
    assert command(["verify", written(tmp_path, **fields), *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_without_a_run_file_only_the_list_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["verify", "--inject", "list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["faults"]) == set(FAULTS)
    assert command(["verify"]) == 2
    assert "RUN.TOML='': is missing" in capsys.readouterr().err


def test_torchrun_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert command(["verify", written(tmp_path)]) == 2
    assert "call it without torchrun" in capsys.readouterr().err
