"""docs/composition.md says what the parity cases say, and no pair of features is left to luck."""

from composition import FEATURES, PAGE, page, verdicts
from parity_pairs import FEATURES as SAID


def test_every_pair_is_tested_or_refused() -> None:
    assert set(SAID) == set(FEATURES)
    left = [sorted(pair) for pair, verdict in verdicts().items() if not verdict]
    assert not left, f"in no parity case, and not refused: {left}"


def test_the_page_is_that_of_the_cases() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python tests/cpu/composition.py"
