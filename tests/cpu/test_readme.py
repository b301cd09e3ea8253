"""The commands that README shows are run, in the order in which it shows them, and say what it says they say."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
SHOWN = [
    (command, sample.splitlines())
    for command, sample in re.findall(r"^\$ (.+)\n((?:(?!\$ |```).*\n)*)", README, re.M)
]
"""Commands, and the lines of output below each."""

ENDINGS = {"compare": {0, 1}, "--explain-infeasible": {1}}
"""Exit statuses that are no failure: a machine with other work on it may be out of the comparison's tolerance,
which is an answer too; and nothing fits where remedies are asked for."""


def test_readme_shows_the_main_job() -> None:
    verbs = [shlex.split(command)[1] for command, _ in SHOWN]
    looked_at = ["predict", "layout", "timeline", "memory", "diff", "sweep", "sweep", "goodput", "validate"]
    trained = ["calibrate", "plan", "train", "compare", "train", "explain", "explain"]
    saved = ["train", "checkpoint", "checkpoint", "checkpoint", "train", "chaos"]
    in_few_bits = ["plan", "train", "fp8"]
    assert verbs == ["plan"] * 6 + looked_at + trained + saved + in_few_bits


def test_readme_commands_run(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    is_measured = False
    for command, sample in SHOWN:
        # A machine with other work on it is refused, which is right; what follows needs a cluster all the same.
        more = ["--max-noise", "100"] if "calibrate" in command else []
        done = subprocess.run(
            [*shlex.split(command), *more],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        allowed = next((statuses for word, statuses in ENDINGS.items() if word in command.split()), {0})
        assert done.returncode in allowed, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        # What follows calibrate is another machine's.
        is_measured = is_measured or "calibrate" in command
        said = {line.rstrip() for line in done.stdout.splitlines()}
        wrong = [line for line in sample if line not in said and line.strip() != "..." and not is_measured]
        assert not wrong, f"README shows lines that {command} no longer says: {wrong}"
    for name in (
        "run.toml",
        "layout.svg",
        "trace.json",
        "memory.svg",
        "sweep.svg",
        "goodput.svg",
        "cluster.toml",
        "local.toml",
        "lab/lab.html",
        "first-run/run.toml",
        "first-run/metrics.jsonl",
        "first-run/ledger.jsonl",
    ):
        assert (tmp_path / name).stat().st_size > 0
