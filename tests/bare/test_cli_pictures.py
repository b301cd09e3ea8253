"""What scripts rely on of `layout`, `diff`, `sweep`: JSON keys, exit statuses, files, one line for bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bare.conftest import Asked
from trainwright.cli.files import read_run
from trainwright.cli.main import run
from trainwright.plan.predict import predict
from trainwright.spec.ledger import BYTES_CAUSES, SECONDS_CAUSES

EXAMPLE = str(Path(__file__).parents[2] / "runs" / "example-16_a100x16.toml")


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a refused command says."""
    capsys.readouterr()
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("trainwright: ").strip()


def test_layout(asked: Asked) -> None:
    document = asked("layout", EXAMPLE)
    assert set(document) == {
        *("world", "order", "layout", "nodes", "devices_per_node", "link", "link_domain", "network"),
        *("stages", "axes", "ranks"),
    }
    assert (document["world"], document["nodes"], document["devices_per_node"]) == (16, 4, 4)
    assert set(document["axes"]) == {"tp", "cp", "pp", "dp"}
    for axis in document["axes"].values():
        assert set(axis) == {"degree", "groups", "rides", "carries"}
        assert sum(axis["rides"].values()) == len(axis["groups"])
    assert document["stages"][1] == [{"stage": 1, "first_layer": 16, "layers": 16}]
    assert document["ranks"][5] == {"rank": 5, "node": 1, "link_domain": 1, "tp": 1, "cp": 0, "pp": 1, "dp": 0}
    other = asked("layout", EXAMPLE, "--set", "layout.order=tp-cp-dp-pp")
    assert other["axes"]["dp"]["groups"][0] == [0, 4]


def test_diff(asked: Asked) -> None:
    document = asked("diff", EXAMPLE, EXAMPLE, "--set", "recipe.recompute=full", "--set", "layout.tp=2")
    assert set(document) == {
        *("a", "b", "mfu_convention", "fields", "quantities", "seconds_by_cause", "bytes_by_cause"),
    }
    assert document["fields"] == {"layout.tp": {"a": 4, "b": 2}, "recipe.recompute": {"a": "none", "b": "full"}}
    assert set(document["quantities"]) == {
        *("step_s", "gpus", "tokens_per_step", "tokens_per_s_per_gpu", "flops_per_s_per_gpu", "mfu"),
        *("peak_flops_per_s", "peak_bytes", "capacity_bytes", "gpu_hours", "days", "cost_usd"),
    }
    for causes, known, total in (
        ("seconds_by_cause", SECONDS_CAUSES, "step_s"),
        ("bytes_by_cause", BYTES_CAUSES, "peak_bytes"),
    ):
        assert set(document[causes]) <= set(known)
        for row in document[causes].values():
            assert set(row) == {"a", "b", "difference", "relative_difference"}
        for column in ("a", "b", "difference"):
            summed = sum(row[column] for row in document[causes].values())
            assert summed == document["quantities"][total][column]
    assert document["quantities"]["mfu"]["a"] == predict(read_run(Path(EXAMPLE))).mfu


SWEPT_KEYS = {
    *("values", "gpus", "fits", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"),
    *("peak_bytes", "seconds_by_cause", "gpu_hours", "days", "cost_usd"),
}


def test_sweep(asked: Asked) -> None:
    document = asked("sweep", EXAMPLE, "--over", "recipe.micro_batch=1,3", "--over", "recipe.recompute=none,full")
    assert set(document) == {"run", "fields", "mfu_convention", "points", "illegal"}
    assert document["fields"] == ["recipe.micro_batch", "recipe.recompute"]
    assert all(set(point) == SWEPT_KEYS for point in document["points"])
    assert [point["values"]["recipe.recompute"] for point in document["points"]] == ["none", "full"]
    assert document["points"][0]["step_s"] == asked("predict", EXAMPLE)["step_s"]
    assert document["illegal"][0] == {
        "values": {"recipe.micro_batch": 3, "recipe.recompute": "none"},
        "reason": "recipe.micro_batch=3: must divide global_batch=128",
    }


def test_sweep_over_devices(asked: Asked) -> None:
    document = asked("sweep", EXAMPLE, "--gpus", "16,32,48", "--set", "recipe.global_batch=64")
    first, second = document["points"]
    assert set(first) == SWEPT_KEYS | {"grows_most"}
    assert first["grows_most"] is None
    assert set(second["grows_most"]) == {"cause", "share_before", "share"}
    assert (second["gpus"], second["values"]) == (32, {"gpus": 32})
    assert second["tokens_per_s"] == pytest.approx(32 * second["tokens_per_s_per_gpu"])
    assert "must be a multiple of micro_batch*dp=1*6=6" in document["illegal"][0]["reason"]


def test_statuses_of_a_sweep(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked("sweep", EXAMPLE, "--over", "cluster.device.memory_bytes=1_000_000,2_000_000", status=1)
    said = complaint(capsys, "sweep", EXAMPLE, "--over", "layout.tp=3,5")
    assert said == "none of the 2 points is legal; the first: layout.tp=3: must divide the 32 attention heads"
    assert "layout.tpp: unknown field; did you mean" in complaint(
        capsys, "sweep", EXAMPLE, "--over", "layout.tpp=1"
    )
    assert "--over: missing" in complaint(capsys, "sweep", EXAMPLE)
    many = [f"{field}={','.join(map(str, range(1, 102)))}" for field in ("recipe.seed", "recipe.global_batch")]
    assert "10201 points; at most 10000" in complaint(
        capsys, "sweep", EXAMPLE, "--over", many[0], "--over", many[1]
    )


def test_drawings_are_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout, sweep = tmp_path / "layout.svg", tmp_path / "sweep.svg"
    assert run(["layout", EXAMPLE, "--svg", str(layout)]) == 0
    assert f"wrote {layout}" in " ".join(capsys.readouterr().out.replace("\n", "").split())
    assert run(["sweep", EXAMPLE, "--over", "recipe.micro_batch=1,2", "--svg", str(sweep), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"run", "fields", "mfu_convention", "points", "illegal"}
    for path in (layout, sweep):
        assert path.read_text().rstrip().endswith("</svg>")
    lost = tmp_path / "nowhere" / "a.svg"
    for verb in (["layout", EXAMPLE], ["sweep", EXAMPLE, "--over", "recipe.micro_batch=1"]):
        assert "there is no directory" in complaint(capsys, *verb, "--svg", lost)


@pytest.mark.parametrize(
    "arguments",
    [
        ["layout", EXAMPLE],
        ["diff", EXAMPLE, EXAMPLE],
        ["sweep", EXAMPLE, "--over", "recipe.micro_batch=1,2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_only_svg_loads_matplotlib(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom trainwright.cli.main import run\n"
        f"assert run({arguments!r}) == 0\nprint('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


@pytest.mark.parametrize("verb", ["layout", "diff", "sweep"])
def test_help_has_an_example_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: trainwright {verb}" in text
    assert "--json" in text
