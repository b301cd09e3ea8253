"""The runs that come with the project are whole, legal and fit their clusters; their page names each of them."""

from pathlib import Path

import pytest

from trainwright.cli.files import read_run
from trainwright.plan.predict import predict

RUNS = Path(__file__).parents[2] / "runs"
FILES = sorted(RUNS.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_run_is_legal_and_fits(path: Path) -> None:
    run = read_run(path)
    predicted = predict(run)
    assert predicted.fits
    assert (predicted.gpu_hours is not None) == (run.budget is not None)


def test_the_page_names_each_run() -> None:
    page = (RUNS / "README.md").read_text()
    assert FILES
    assert all(f"`{path.name}`" in page for path in FILES)
