"""The commands that README shows are run, in the order in which it shows them, and say what it says they say."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.+)$", README, re.M)


def test_readme_shows_the_main_job() -> None:
    verbs = [shlex.split(command)[1] for command in COMMANDS]
    made = ["plan", "calibrate", "plan", "train", "compare"]
    assert verbs == [*made, "plan", "layout", "predict", "timeline", "memory", "diff", "sweep", "sweep"]


def test_readme_commands_run(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    said = {}
    for command in COMMANDS:
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        # A machine with other work on it may be out of the comparison's tolerance, which is an answer too.
        allowed = {0, 1} if " compare " in command else {0}
        assert done.returncode in allowed, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        said[command] = done.stdout
    for name in (
        "cluster.toml",
        "run.toml",
        "first-run/run.toml",
        "first-run/metrics.jsonl",
        "first-run/ledger.jsonl",
        "layout.svg",
        "trace.json",
        "memory.svg",
        "sweep.svg",
    ):
        assert (tmp_path / name).stat().st_size > 0
    first_plan = said[COMMANDS[0]]
    shown = re.search(r"^  layout  (.+)$", README, re.M)
    assert shown
    assert f"layout  {shown[1]}" in first_plan, "README shows a plan that the planner no longer makes"
