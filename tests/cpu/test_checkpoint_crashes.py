"""A crash at any moment of a save loses no commit, and what is torn or corrupt is always noticed.

Moments are all calls of the system by which a save changes the disk, on each of 1 and 2 ranks, in order
(`checkpoint_crashes.py`)."""

import json
import os
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoint_crashes import good, plans, save_of, save_rank
from launching import run_ranks

from trainwright.spec.errors import InvalidSpec
from trainwright.train.checkpoint.directory import locked, retain, saves_in
from trainwright.train.checkpoint.manifest import FORMAT, MANIFEST, Damaged, text_of
from trainwright.train.checkpoint.reading import Reader

FLIPS = 500


@pytest.fixture(scope="module", params=[1, 2])
def kills(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    # Which calls were made is what counts, not what they wait for: in memory where there is a file system of it.
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        directory = Path(scratch)
        output = directory / "found.json"
        script_arguments = str(directory / "checkpoints"), str(request.param), str(output)
        run_ranks("checkpoint_crashes.py", 1, *script_arguments, timeout_s=600.0)
        return json.loads(output.read_text())


def test_a_kill_at_any_call_leaves_the_last_commit(kills: list[dict[str, Any]]) -> None:
    died = [each for each in kills if each["died"]]
    assert len(died) > 50
    for each in died:
        newest = each["after"][0]
        assert newest in (each["before"][0], each["step"]), each
        # The one before is removed only when the new one is there.
        assert newest == each["step"] or each["after"] == each["before"], each
    assert any(each["after"][0] == each["step"] for each in died), "no kill came after the commit"
    assert any(each["after"][0] != each["step"] for each in died), "no kill came before it"


def test_the_next_save_is_whole_and_removes_what_was_left(kills: list[dict[str, Any]]) -> None:
    for each in kills:
        assert each["next"][0] > each["step"]
        assert each["left"] == each["next"], each
        assert len(each["next"]) == 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two commits of one rank."""
    (made,) = plans(1)
    for step in (1, 2):
        assert save_rank(save_of(tmp_path, step, 1), made, 0, 1) is None
    assert good(tmp_path) == [2, 1]
    return tmp_path


def complaint(root: Path) -> str:
    """What is wrong with the newest commit."""
    save = saves_in(root)[0]
    try:
        manifest = save.look_over()
        with Reader(save, manifest.parts) as reader:
            for part in manifest.parts:
                reader.verify(part)
    except Damaged as error:
        return str(error)
    return "nothing"


def test_a_flipped_bit_is_noticed_wherever_it_is(root: Path) -> None:
    files = sorted(saves_in(root)[0].path.iterdir())
    assert len(files) == 3
    chosen = random.Random(0)
    for _ in range(FLIPS):
        path = chosen.choice(files)
        plain = path.read_bytes()
        flipped = bytearray(plain)
        flipped[chosen.randrange(len(plain))] ^= 1 << chosen.randrange(8)
        path.write_bytes(flipped)
        assert path.name in complaint(root)
        assert good(root) == [1]
        path.write_bytes(plain)
    assert good(root) == [2, 1]


@pytest.mark.parametrize("name", ["weights-00000.safetensors", "optimizer-00000.safetensors", MANIFEST])
def test_a_file_that_is_short_or_gone_is_noticed(root: Path, name: str) -> None:
    path = saves_in(root)[0].path / name
    plain = path.read_bytes()
    for length in (0, 1, len(plain) // 2, len(plain) - 1):
        path.write_bytes(plain[:length])
        assert name in complaint(root)
    path.write_bytes(plain + b"\0")
    assert name in complaint(root)
    path.write_bytes(bytes(len(plain)))
    assert name in complaint(root)
    path.unlink()
    assert f"{name}: is missing" in complaint(root)
    assert good(root) == [1]


def test_files_of_another_commit_are_noticed(root: Path) -> None:
    newest, earlier = saves_in(root)
    for name in ("weights-00000.safetensors", "optimizer-00000.safetensors", MANIFEST):
        plain = (newest.path / name).read_bytes()
        shutil.copy(earlier.path / name, newest.path / name)
        assert name in complaint(root)
        (newest.path / name).write_bytes(plain)
    assert good(root) == [2, 1]


def test_a_commit_of_format_1_is_read(root: Path) -> None:
    """It knows of no guard."""
    save = saves_in(root)[0]
    kept = save.manifest()
    content = json.loads((save.path / MANIFEST).read_bytes())["content"]
    del content["guard"]
    content["format"] = 1
    plain = partial(json.dumps, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_64_hexdigest(plain(content).encode())
    (save.path / MANIFEST).write_text(plain({"content": content, "digest": digest}))
    assert save.look_over() == kept.changed(format=1)


def test_a_newer_format_is_refused_and_not_passed_over(root: Path) -> None:
    save = saves_in(root)[0]
    newer = save.manifest().changed(format=FORMAT + 1)
    (save.path / MANIFEST).write_bytes(text_of(newer))
    with pytest.raises(InvalidSpec, match=f"is a newer format than this program's {FORMAT}"):
        save.manifest()


def test_retention_counts_whole_commits_alone(root: Path) -> None:
    (made,) = plans(1)
    (saves_in(root)[0].path / "weights-00000.safetensors").unlink()
    assert save_rank(save_of(root, 3, 1), made, 0, 1) is None
    assert [save.step for save in saves_in(root)] == [3, 2, 1]
    assert good(root) == [3, 1]
    # One that a resume found damaged, though its lengths are right, doesn't count either.
    retain(saves_in(root)[0], 1, frozenset({save_of(root, 3, 1).name}))
    assert good(root) == [3, 1]
    retain(saves_in(root)[0], 1)
    assert [save.step for save in saves_in(root)] == [3]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(InvalidSpec, match="is being written by another run"),
        locked(tmp_path, 0.2),
    ):
        pass
    with locked(tmp_path, 0.2):
        pass


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpec, match="can't be written"), locked(tmp_path / "file"):
        pass
