"""Storage that fails: a whole run of two ranks whose commits lie on a file system of 1 MiB, which takes two of
them and no third; and two ranks one of which has a back-end that is full, gives an input/output error, or hangs
(tests/cpu/checkpoint_faults.py)."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoint_faults import BAD_STEP, STEPS
from forks import losses_in
from launching import run_ranks
from whole_runs import COMMAND, run_file, trained

RUN_STEPS = 10
SMALL = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
"""A mount that only this command sees, which needs no rights."""


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        if shutil.which("unshare"):
            yield _small_disk(home / "small")
        output = home / "seen.json"
        run_ranks("checkpoint_faults.py", 2, str(home / "faults"), str(output))
        seen = json.loads(output.read_text())
        plain = seen["undisturbed"]
        for what in ("full disk", "input/output error", "hung"):
            own = seen[what]
            yield {
                "what": what,
                "losses_equal": own["losses"] == plain["losses"],
                "is_always_one": all(own["commits"]),
                "told_after_saves": 1 if own["notes"] else -1,
                "is_rank_named": any("rank 1" in note for note in own["notes"]),
                "waited_s": max(own["waited_s"][BAD_STEP - 1 : BAD_STEP + 2]),
                "goes_on": own["commits"][-1][0] == STEPS,
            }


def _small_disk(home: Path) -> dict[str, Any]:
    home.mkdir()
    tables = {"layout": {"dp": 2}, "recipe": {"zero": 1}, "checkpoint": {"every_steps": 2, "keep": 5}}
    file = run_file(home, 32, RUN_STEPS, tables)
    status, said = trained(file, home / "plain", [])
    assert status == 0, said
    commits = home / "hurt" / "checkpoints"
    commits.mkdir(parents=True)
    one = sum(each.stat().st_size for each in next((home / "plain" / "checkpoints").glob("step-*")).iterdir())
    mount = f"mount -t tmpfs -o size={int(2.6 * one)} none {commits}"
    inside = [f"'{each}'" for each in (*COMMAND, "train", str(file), "--out", str(home / "hurt"))]
    listed = [f"'{each}'" for each in (*COMMAND, "checkpoint", "verify", str(home / "hurt"), "--json")]
    script = f"{mount} || exit 99; {' '.join(inside)}; echo status $?; {' '.join(listed)}"
    done = subprocess.run([*SMALL, script], capture_output=True, text=True, check=False)
    if done.returncode == 99:
        return {"what": "small file system", "skipped": "no mount here"}
    saves = json.loads(done.stdout[done.stdout.index("{") :])["saves"]
    steps = RUN_STEPS // 2
    notes = done.stderr.count("could not be saved, and earlier commits are as they were")
    return {
        "what": "small file system",
        "losses_equal": losses_in(home / "plain") == losses_in(home / "hurt"),
        "is_always_one": sum(each["state"] == "whole" for each in saves) == 2,
        "told_after_saves": 1 if notes == steps - 2 else -1,
        "is_rank_named": "rank " in done.stderr and "No space left on device" in done.stderr,
        "waited_s": 0.0,
        "goes_on": "status 2" in done.stdout,
    }
