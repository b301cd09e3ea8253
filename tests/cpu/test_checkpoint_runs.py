"""Whole runs that are killed, resumed, moved to other layouts and given bad checkpoints, by the command itself:
what is said, the status that comes back, and that every logged loss is that of a run which never stopped."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example import example_run
from safetensors.torch import load_file

from trainwright.spec import toml
from trainwright.spec.run import Run
from trainwright.train.checkpoint.directory import locked, saves_in
from trainwright.train.checkpoint.manifest import MANIFEST
from trainwright.train.shards import write_shards

STEPS, COMMITS = 12, 6
COMMAND = [sys.executable, "-m", "trainwright"]


def run_on(directory: Path, name: str = "run.toml", **fields: object) -> Path:
    """A run file of `STEPS` steps over shards in `directory` that commits after every second one."""
    shards = directory / "shards"
    if not shards.is_dir():
        shards.mkdir()
        generator = np.random.default_rng(0)
        write_shards(shards, [generator.integers(97, size=6000, dtype=np.uint32)], 258, "test")
    run = example_run(**fields)  # type: ignore[arg-type]
    values = run.plain() | {
        "data": {"source": "shards", "path": str(shards), "vocab_size": 258},
        "checkpoint": {"every_steps": 2, "keep": COMMITS},
        "budget": {"tokens": STEPS * run.recipe.tokens_per_step},
    }
    path = directory / name
    path.write_text(toml.write(Run.parse(values).check()))
    return path


def train(run_file: Path, out: Path, *more: str) -> tuple[int, str]:
    """Status, and what was said on standard error."""
    command = [*COMMAND, "train", str(run_file), "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, " ".join(done.stderr.split())


def losses(out: Path) -> list[tuple[int, float]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines)]


def killed_when(run_file: Path, out: Path, steps: int) -> None:
    """Start the run and kill all its processes by SIGKILL when it has logged so many steps."""
    command = [*COMMAND, "train", str(run_file), "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s and child.poll() is None:
            with contextlib.suppress(FileNotFoundError, ValueError):
                if len(losses(out)) >= steps:
                    break
            time.sleep(0.005)
        assert child.poll() is None, "it ended before it was killed"
    finally:
        for process in descendants(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        child.wait()


def descendants(process: int) -> list[int]:
    """The process and all that it started, the first first."""
    found = [process]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that never stopped, in `plain`."""
    directory = tmp_path_factory.mktemp("runs")
    status, said = train(run_on(directory, dp=2, recipe={"zero": 1}), directory / "plain")
    assert status == 0, said
    return directory


def test_a_run_that_is_killed_again_and_again_is_one_that_never_stopped(home: Path) -> None:
    out = home / "killed"
    for steps in (3, 7, 9):
        killed_when(home / "run.toml", out, steps)
    status, said = train(home / "run.toml", out)
    assert status == 0, said
    assert "resumed at step" in said
    assert losses(out) == losses(home / "plain")
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 2  # of two ranks
    status, said = train(home / "run.toml", out)
    assert status == 0
    assert f"all {STEPS} steps are done" in said
    assert losses(out) == losses(home / "plain")


def copied(home: Path, name: str, *, without: int = 0) -> Path:
    """The run that never stopped, without its newest commits, as if it had been stopped there."""
    out = home / name
    shutil.copytree(home / "plain", out)
    for save in saves_in(out / "checkpoints")[:without]:
        shutil.rmtree(save.path)
    return out


def test_another_layout_goes_on(home: Path) -> None:
    out = copied(home, "elsewhere", without=1)
    other = run_on(home, "other.toml", tp=2)
    status, said = train(other, out)
    assert status == 0, said
    assert f"resumed at step {STEPS - 2}" in said
    assert losses(out)[:-2] == losses(home / "plain")[:-2]
    for (step, seen), (_, expected) in zip(losses(out), losses(home / "plain"), strict=True):
        assert seen == pytest.approx(expected, rel=1e-12), step


def test_another_batch_takes_each_sample_once(home: Path) -> None:
    """After 10 steps of 8 samples, one of 16 takes 80 to 95; `test_data.py` says which they are."""
    out = copied(home, "larger", without=1)
    other = run_on(home, "larger.toml", recipe={"global_batch": 16})
    status, said = train(other, out, "--steps", str(STEPS - 1))
    assert status == 0, said
    newest = saves_in(out / "checkpoints")[0].manifest()
    assert (newest.step, newest.samples) == (STEPS - 1, (STEPS - 2) * 8 + 16)


def test_damaged_commits_are_named_and_the_one_before_is_taken(home: Path) -> None:
    """Of six the newest four are damaged, each in another way."""
    out = copied(home, "damaged")
    paths = []
    for save, what in zip(saves_in(out / "checkpoints"), ("flipped", "short", "gone", MANIFEST), strict=False):
        path = save.path / (MANIFEST if what == MANIFEST else "optimizer-00001.safetensors")
        paths.append(path)
        data = bytearray(path.read_bytes())
        data[-100] ^= 4
        if what == "flipped":
            path.write_bytes(data)
        elif what == "short":
            path.write_bytes(data[:-100])
        else:
            path.unlink()
    status, said = train(home / "run.toml", out)
    assert status == 0, said
    for path in paths:
        assert f"{path.parent.name}/{path.name}" in said
    assert said.count("that save is passed over") == len(paths) == 4
    assert f"resumed at step {STEPS - 8}" in said
    assert losses(out) == losses(home / "plain")
    listed = subprocess.run(
        [*COMMAND, "checkpoint", "verify", str(out), "--json"], capture_output=True, text=True, check=False
    )
    states = [(each["step"], each["state"]) for each in json.loads(listed.stdout)["saves"]]
    assert (STEPS, "whole") in states
    assert listed.returncode == any(state == "damaged" for _, state in states)


def test_nothing_whole_is_refused(home: Path) -> None:
    out = copied(home, "nothing")
    for save in saves_in(out / "checkpoints"):
        (save.path / "weights-00000.safetensors").unlink()
    status, said = train(home / "run.toml", out)
    assert status == 2
    assert f"none of its {COMMITS} saves is whole" in said
    assert "weights-00000.safetensors: is missing" in said
    assert losses(out) == losses(home / "plain")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"recipe": {"seed": 1}}, "recipe.seed=1: but"),
        ({"recipe": {"seq_len": 32}}, "recipe.seq_len=32: but"),
        ({"mlp": {"d_ff": 64}}, "model.layer_groups.0.pattern.0.mlp.d_ff=64: but"),
        ({"recipe": {"precision": "bf16"}}, "recipe.precision='bf16': but"),
        ({"recipe": {"optimizer": {"name": "muon"}}}, "recipe.optimizer.name='muon': but"),
    ],
)
def test_another_run_is_refused_by_field(home: Path, fields: dict, complaint: str) -> None:
    before = (home / "plain" / "run.toml").read_text()
    status, said = train(run_on(home, "wrong.toml", **fields), home / "plain")
    assert status == 2
    assert complaint in said
    assert "set it back, or choose a new --out" in said
    assert (home / "plain" / "run.toml").read_text() == before


def test_the_commits_of_another_model_are_refused_by_tensor(home: Path) -> None:
    """Where they are named by `checkpoint.directory`, and no run file beside them says it."""
    wrong = run_on(home, "other-model.toml", mlp={"d_ff": 64})
    there = home / "plain" / "checkpoints"
    status, said = train(wrong, home / "elsewhere-model", "--set", f"checkpoint.directory={there}")
    assert status == 2
    assert "mlp.d_ff=64: but" in said
    assert "(layers.0.mlp.gate.weight is [48, 32] there and [64, 32] here)" in said


def test_other_data_are_refused(home: Path) -> None:
    out = copied(home, "data", without=1)
    other = home / "other-shards"
    other.mkdir()
    write_shards(other, [np.arange(6000, dtype=np.uint32) % 97], 258, "test")
    before = (out / "run.toml").read_text()
    status, said = train(home / "run.toml", out, "--set", f"data.path={other}")
    assert status == 2
    assert "is not the data of" in said
    assert (out / "run.toml").read_text() == before


def test_a_newer_format_is_refused(home: Path) -> None:
    from trainwright.train.checkpoint.manifest import text_of

    out = copied(home, "newer")
    save = saves_in(out / "checkpoints")[0]
    (save.path / MANIFEST).write_bytes(text_of(save.manifest().changed(format=9)))
    status, said = train(home / "run.toml", out)
    assert status == 2
    assert "is a newer format than this program's 2" in said


def test_what_is_no_directory_of_checkpoints_is_said(home: Path, tmp_path: Path) -> None:
    for directory, complaint in (
        (tmp_path / "nowhere", "is not there"),
        (home / "run.toml", "is a file"),
        (tmp_path, "holds no checkpoints"),
    ):
        done = subprocess.run(
            [*COMMAND, "checkpoint", "ls", str(directory)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert complaint in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_commit_that_is_damaged_inside_is_refused_in_one_line(home: Path, tmp_path: Path) -> None:
    out = copied(home, "damaged inside")
    newest = saves_in(out / "checkpoints")[0]
    path = newest.path / "weights-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for what in (["export"], ["reshard", "--ranks", "2"]):
        said = checkpoint(*what, out, "--out", tmp_path / "result", status=2)["said"]
        assert f"{newest.name}/{path.name}: bytes" in said
        assert "choose another commit with --step" in said
        assert len(said.splitlines()) == 1
    assert [each.name for each in tmp_path.rglob("*")] == ["result", "lock"]
    assert checkpoint("ls", newest.path)["saves"][0]["state"] == "whole"
    checkpoint("verify", newest.path, status=1)


def test_a_commit_is_not_cut_into_a_directory_that_a_run_writes(home: Path, tmp_path: Path) -> None:
    with locked(tmp_path):
        said = checkpoint("reshard", home / "plain", "--ranks", "2", "--out", tmp_path, status=2)["said"]
    assert "is being written by another run" in said


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    """On a file system of 64 KiB that only the command sees."""
    command = " ".join([*COMMAND, "checkpoint", "export", str(home / "plain"), "--out", str(tmp_path / "x")])
    script = f"mount -t tmpfs -o size=64k none {tmp_path} || exit 99; {command}; echo $?; ls {tmp_path}"
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    done = subprocess.run(isolated, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode in (1, 99) and not done.stdout:
        pytest.skip("no mount here")
    assert done.stdout == "2\n"
    assert "no space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def checkpoint(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    command = [*COMMAND, "checkpoint", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if not status else {"said": done.stderr}


def blocks_in(save: Path) -> dict[str, torch.Tensor]:
    """Whole weights of a commit's files, by safetensors' own reader and the places in their names."""
    whole: dict[str, torch.Tensor] = {}
    shapes = {name: shape for name, (_, *shape) in checkpoint("show", save)["tensors"].items() if ":" not in name}
    for path in sorted(save.glob("weights-*.safetensors")):
        for title, values in load_file(path).items():
            name, _, place = title.partition("@")
            into = whole.setdefault(name, torch.full(shapes[name], torch.nan, dtype=values.dtype))
            cuts = [slice(*map(int, cut.split(":"))) for cut in place.split(",")] if place else [...]
            into[tuple(cuts)] = values
    return whole


def test_a_commit_is_shown_and_exported(home: Path, tmp_path: Path) -> None:
    out = copied(home, "exported")
    newest = saves_in(out / "checkpoints")[0]
    shown = checkpoint("show", out)
    assert (shown["step"], shown["samples"]) == (STEPS, STEPS * 8)
    assert shown["tensors"]["embedding.weight"] == ["F64", 259, 32]
    assert shown["files"].keys() == {each.name for each in newest.path.glob("*.safetensors")}
    written = checkpoint("export", out, "--out", tmp_path / "weights")
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    exported = {
        name: values
        for file in set(index["weight_map"].values())
        for name, values in load_file(tmp_path / "weights" / file).items()
    }
    expected = blocks_in(newest.path)
    assert exported.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert written["num_bytes"] == sum(values.nbytes for values in expected.values())
    again = checkpoint("export", out, "--out", tmp_path / "weights", status=2)
    assert "is there already; name another, or remove it" in again["said"]


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_a_commit_that_was_cut_anew_goes_on_alike(home: Path, tmp_path: Path, ranks: int) -> None:
    """40 ranks are more than many tensors have rows. The run goes on from one of them."""
    out = copied(home, f"cut for {ranks}", without=1)
    old = saves_in(out / "checkpoints")[0]
    checkpoint("reshard", out, "--ranks", str(ranks), "--out", tmp_path)
    (new,) = saves_in(tmp_path)
    assert len(new.manifest().parts) == ranks
    before, after = blocks_in(old.path), blocks_in(new.path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    if ranks != 3:
        return
    shutil.rmtree(old.path)
    shutil.move(new.path, old.path)
    status, said = train(home / "run.toml", out)
    assert status == 0, said
    assert f"resumed at step {STEPS - 2}" in said
    assert losses(out) == losses(home / "plain")


def test_a_commit_that_is_not_there_is_said(home: Path, tmp_path: Path) -> None:
    said = checkpoint("show", home / "plain", "--step", "5", status=2)["said"]
    assert "--step=5: has no commit; there are 12, 10, 8, 6, 4, 2" in said
    assert "holds no checkpoints" in checkpoint("export", tmp_path, "--out", tmp_path / "x", status=2)["said"]
