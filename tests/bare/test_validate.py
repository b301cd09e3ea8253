"""`trainwright validate`: JSON with stable keys, summaries that are right, one line for a bad table, folds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bare.test_published import ROW, table_of
from trainwright.cli import fitting
from trainwright.cli.main import run
from trainwright.cli.published import Predictor, judge, read_runs
from trainwright.measure.fit import Fitted
from trainwright.measure.validation import summary_of_errors

TWO = {**ROW, "id": "two", "source": "another/source", "gpu": "A100-80GB", "n_gpus": "32", "dp": "8"}
TABLE = table_of(
    ROW, TWO, {**ROW, "id": "bad", "dp": "3"}, {**ROW, "id": "heads", "tp": "64", "pp": "1", "dp": "1"}
)
ROW_KEYS = {
    "id",
    "predicted_step_s",
    "published_step_s",
    "error",
    "fits",
    "predicted_gib",
    "published_gib",
    "refused",
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(TABLE)
    return path


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["validate", *arguments, "--json"]) == 0
    said = capsys.readouterr()
    assert not said.err
    return json.loads(said.out)


def test_json(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, str(table))
    assert set(report) >= {"rows", "summary", "groups", "memory"}
    assert all(set(row) == ROW_KEYS for row in report["rows"])
    by_id = {row["id"]: row for row in report["rows"]}
    assert set(by_id) == {"one", "two", "bad", "heads"}
    one = by_id["one"]
    assert one["published_step_s"] == 3.0
    assert one["error"] == pytest.approx(one["predicted_step_s"] / 3.0 - 1)
    assert 0.3 < one["predicted_step_s"] < 30
    assert one["refused"] is None
    assert one["fits"] is True
    assert one["published_gib"] is None
    assert "is not n_gpus=64" in by_id["bad"]["refused"]
    assert by_id["bad"]["predicted_step_s"] is None
    assert "layout.tp=64" in by_id["heads"]["refused"]
    errors = [row["error"] for row in report["rows"] if row["error"] is not None]
    assert report["summary"] == {
        "n": 2,
        "refused": 2,
        "median_abs": pytest.approx(np.median(np.abs(errors))),
        "mean_abs": pytest.approx(np.mean(np.abs(errors))),
        "p90_abs": pytest.approx(np.quantile(np.abs(errors), 0.9)),
        "bias": pytest.approx(np.median(errors)),
        "band_coverage": report["summary"]["band_coverage"],
    }
    assert 0 <= report["summary"]["band_coverage"] <= 1
    assert {name: group["n"] for name, group in report["groups"]["gpu"].items()} == {
        "h100-sxm": 1,
        "a100-80gb-sxm": 1,
    }
    assert report["memory"] is None


def test_memory_is_judged_where_it_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table_of({**ROW, "mem_gib_per_gpu": "30"}))
    report = document(capsys, str(path))
    row = report["rows"][0]
    assert row["published_gib"] == pytest.approx(30, abs=1e-6)
    assert report["memory"]["bias"] == pytest.approx(row["predicted_gib"] / 30 - 1)


def test_summaries() -> None:
    each = summary_of_errors("all", [-0.3, 0.1, 0.2])
    assert (each.n, each.median_abs, each.bias) == (3, 0.2, 0.1)
    assert each.mean_abs == pytest.approx(0.2)
    assert each.p90_abs == pytest.approx(0.28)


def test_a_view_for_people_names_the_refused_rows(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", str(table)]) == 0
    text = capsys.readouterr().out
    assert "2 published runs predicted, 2 refused" in text
    for expected in ("median error", "By cluster", "a100-80gb-sxm", "Refused", "bad: tp*cp*pp*dp=2*1*2*3=12"):
        assert expected in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no table of published runs: its header lacks id"),
        ("a,b\n1,2\n", "is no table of published runs"),
        (table_of(ROW) + '"', "not CSV"),
    ],
)
def test_a_bad_table_is_one_line_and_status_2(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert run(["validate", str(path)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert complaint in said.err


def test_a_table_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "nowhere.csv"]) == 2
    assert "nowhere.csv: no such file" in capsys.readouterr().err


def test_all_rows_refused_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table_of({**ROW, "gpu": "TPU"}))
    assert run(["validate", str(path), "--json"]) == 1  # an answer of "no"
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["n"] == 0
    assert report["summary"]["median_abs"] is None


def test_cross_validation_refits_without_each_source(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def fake(problem: object, fitted: Fitted, folds: list[str]) -> np.ndarray:
        asked.append(list(folds))
        return np.array([3.3, 4.0, *(1.0 for _ in folds[2:])])

    monkeypatch.setattr(fitting, "fit", lambda problem: None)
    monkeypatch.setattr(fitting, "leave_out", fake)
    report = document(capsys, str(table), "--cv", "source")
    assert report["cv"] == "source"
    assert report["rows"][0]["error"] == pytest.approx(0.1)
    assert asked[0][:2] == ["someone/something README", "another/source"]
    # The rows that come with the program are fitted to as well.
    assert len(asked[0]) > 500
    assert len(report["rows"]) < 10
    document(capsys, str(table), "--cv", "publisher")
    assert asked[1][:2] == ["someone/something", "another/source"]


def test_the_planner_is_asked_with_the_constants_that_it_is_given(table: Path) -> None:
    runs, _ = read_runs(table)
    judged, refused = judge(runs)
    assert [row.id for row in refused] == ["heads"]
    predictor = Predictor([each.published for each in judged])
    slow = predictor.seconds({"matmul_h100_bf16": 0.76}, [0, 1])
    fast = predictor.seconds({"matmul_h100_bf16": 1.04}, [0, 1])
    assert fast[0] < 0.95 * slow[0]
    assert fast[1] == slow[1]  # no H100
    touched = predictor.touched()
    assert touched["matmul_h100_bf16"] == [0]
    assert touched["matmul_a100"] == [1]
    assert touched["launch"] == [0, 1]
