"""House rules that a program can check: files of one idea, told first; no leftovers; no machine's paths."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "trainwright").rglob("*.py"))
MOST_LINES = 500


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_begins_by_telling_what_it_is_and_ends_in_time(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no first paragraph"
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_leftovers(path: Path) -> None:
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())


def tracked_text() -> list[Path]:
    folders = ("src", "tests", "docs", "benchmarks", "runs")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = [
        ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
    ]
    return [
        path for path in inside + named if path.suffix in {".py", ".md", ".toml", ".csv", ""} and path.exists()
    ]


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"/(work|farm|root|home)/[a-z.]")
    assert not [
        str(path) for path in tracked_text() if path != Path(__file__) and pattern.search(path.read_text())
    ]


def test_prefixes_live_in_units_alone() -> None:
    """Powers of 1024 are written in spec/units.py; elsewhere they are imported from it."""
    pattern = re.compile(r"2\s*\*\*\s*(20|30|40)\b|\b1024\s*\*\*|\b1073741824\b")
    bad = [path.name for path in SOURCES if path.name != "units.py" and pattern.search(path.read_text())]
    assert not bad


PUBLIC_NUMBER = re.compile(r"(_s|_bytes|_flops|_bytes_per_s|_flops_per_s|_tokens|_w|_usd)$")


def test_the_unit_rule_reads_names() -> None:
    assert PUBLIC_NUMBER.search("step_s")
    assert not PUBLIC_NUMBER.search("bandwidth")


def test_no_field_of_a_noun_is_called_by_a_quantity_without_its_unit() -> None:
    """A float field of a noun says its unit, or is a fraction, a factor or a curve, which have none."""
    vague = re.compile(r"\b(bandwidth|latency|time|memory_size|duration|speed|throughput)\s*:\s*(float|Positive)")
    spec = sorted((ROOT / "src" / "trainwright" / "spec").glob("*.py"))
    assert not [path.name for path in spec if vague.search(path.read_text())]
