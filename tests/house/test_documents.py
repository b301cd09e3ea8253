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
    parts = name.split(".")
    # A folder's files are modules too: room, folder, file; else room, file.
    folder = (ROOT / "src" / "trainwright" / parts[0] / parts[1]).is_dir()
    length = 3 if folder else 2
    found = importlib.import_module(".".join(["trainwright", *parts[:length]]))
    for part in parts[length:]:
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


def test_readme_has_the_figures_of_the_written_tables() -> None:
    readme = (ROOT / "README.md").read_text()
    studies = (ROOT / "benchmarks" / "case_studies.md").read_text()
    shown = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+%) \|$", readme, re.M)
    written = re.findall(r"^\| `[^|]+` \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+%) \|", studies, re.M)
    assert len(shown) == 6
    assert shown == written
    validation = (ROOT / "benchmarks" / "planner_validation.md").read_text()
    row = r"^\| (fitted to all rows|without the row's \w+) \| (\w+) \| \d+ \| ([\d.]+%) \| [\d.]+% \| ([\d.]+%) \|"
    errors = {(fold, kind): f"{median}, {p90}" for fold, kind, median, p90 in re.findall(row, validation, re.M)}
    for fold in ("fitted to all rows", "without the row's source", "without the row's publisher"):
        figures = " | ".join(errors[fold, kind] for kind in ("all", "dense", "moe"))
        assert f"| {fold.removeprefix('fitted ')} | {figures} |" in readme
