"""What the documents name exists: functions of the equations, files of the tour, targets of the Makefile."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EQUATIONS = (ROOT / "docs" / "equations.md").read_text()
FUNCTIONS = sorted(set(re.findall(r"`((?:spec|plan|train|measure)\.[\w.]+)`", EQUATIONS)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_the_equations_name_exists(name: str) -> None:
    room, module, *path = name.split(".")
    found = importlib.import_module(f"trainwright.{room}.{module}")
    for part in path:
        found = getattr(found, part)


def test_the_equations_name_functions() -> None:
    assert len(FUNCTIONS) > 15


@pytest.mark.parametrize("document", ["README.md", "docs/tour.md", "CONTRIBUTING.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    named = re.findall(r"`((?:spec|plan|train|measure|present|cli|data)/[\w/]+\.\w+)`", text)
    base = (ROOT / document).parent
    missing = [link for link in links if not (base / link).exists()]
    missing += [path for path in named if not (ROOT / "src" / "trainwright" / path).exists()]
    assert links or named
    assert not missing


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"make ([a-z]+)\b", (ROOT / document).read_text()))
        assert named & targets
        assert named <= targets | {"sure"}
