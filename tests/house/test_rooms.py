"""The rooms keep their doors: who may import whom, and who may load torch. Each rule has a negative control."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "trainwright"
MAY_IMPORT: dict[str, set[str]] = {
    "spec": {"spec"},
    "plan": {"spec", "plan"},
    "train": {"spec", "train"},
    "measure": {"spec", "measure"},
    "present": {"spec", "present"},
    "cli": {"spec", "plan", "train", "measure", "present", "cli", "data"},
}
MAY_NOT_LOAD: dict[str, set[str]] = {
    "spec": {"torch", "numpy", "time", "random", "os"},
    "plan": {"torch", "time", "random", "os", "rich"},
    "train": {"rich", "typer", "argparse", "plotly"},
    "measure": {"torch", "time", "random", "os"},
    "present": {"torch", "time", "random", "os"},
    "cli": {"torch"},
}
"""Effects and libraries that a room does without."""


def imports(source: str) -> list[str]:
    """Every module that a source file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def forbidden(room: str, source: str) -> list[str]:
    """What a file of `room` imports and may not."""
    bad = []
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == "trainwright" and len(parts) > 1 and parts[1] not in MAY_IMPORT[room] | {"__version__"}:
            bad.append(name)
        if parts[0] in MAY_NOT_LOAD[room]:
            bad.append(name)
    return bad


def files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert files(room), f"no files in {room}"
    bad = {str(path.relative_to(PACKAGE)): forbidden(room, path.read_text()) for path in files(room)}
    assert not {path: names for path, names in bad.items() if names}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("plan", "from trainwright.train import loop"),
        ("plan", "def f():\n    import torch"),
        ("spec", "import numpy as np"),
        ("present", "from trainwright import plan"),
        ("measure", "import torch.distributed"),
    ],
)
def test_the_rule_can_fail(room: str, source: str) -> None:
    assert forbidden(room, source)


def test_only_mesh_reads_the_rank() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for name in names
        if f'"{name}"' in path.read_text()
    }
    assert readers == {"train/mesh.py"}


def loads_torch(statement: str) -> bool:
    """Whether a fresh Python that runs `statement` ends with torch loaded."""
    script = f"import sys\n{statement}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip().endswith("True")


def test_nothing_but_training_loads_torch() -> None:
    modules = [
        f"trainwright.{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}"
        for room in ("spec", "plan", "measure", "present", "cli")
        for path in files(room)
        if path.name != "__init__.py"
    ]
    assert not loads_torch("\n".join(f"import {module}" for module in modules))


def test_the_torch_rule_can_fail() -> None:
    assert loads_torch("import torch")


def test_help_runs_without_torch() -> None:
    script = (
        "import sys\nsys.argv = ['trainwright', '--help']\nfrom trainwright.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\nassert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
