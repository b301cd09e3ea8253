"""The fit of free constants: planted ones are found again, outliers, priors and ranges do what they are for, and a
fold never sees the rows that it judges."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.bare.test_published import one
from trainwright.cli import catalogue
from trainwright.measure.bands import bands_of
from trainwright.measure.fit import Fitted, Problem, fit, leave_out, source_weights, without
from trainwright.spec.constants import Constant, Constants
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.validation import Judged

ROWS = 60
RANDOM = np.random.default_rng(7)
COMPUTE_S = RANDOM.uniform(1, 10, ROWS)
LINK_S = RANDOM.uniform(0.1, 5, ROWS)
SOURCE = [f"s{row // 10}" for row in range(ROWS)]
SLOW = np.array([row >= 30 for row in range(ROWS)])
"""Rows of the software that has the time factor."""
PLANTED = {"matmul": 0.7, "link": 0.55, "time": 1.2}


def constant(name: str, prior: float, **fields: object) -> Constant:
    values = {"low": 0.2, "high": 2.0, "log_sd": 0.5, "value": prior, "why": "a test", **fields}
    return Constant.parse({"name": name, "parts": ["software:gpu"], "fields": [name], "prior": prior, **values})


CONSTANTS = (constant("matmul", 0.9), constant("link", 0.8), constant("time", 1.0))


def predicted_s(values: Mapping[str, float], rows: Sequence[int]) -> np.ndarray:
    at = list(rows)
    whole = COMPUTE_S[at] / values["matmul"] + LINK_S[at] / values["link"]
    return whole * np.where(SLOW[at], values["time"], 1.0)


class Asked:
    """A planner that remembers which rows it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, values: Mapping[str, float], rows: Sequence[int]) -> np.ndarray:
        self.rows += rows
        return predicted_s(values, rows)


def problem(noise: float = 0.0, **changes: object) -> Problem:
    seen_s = predicted_s(PLANTED, range(ROWS)) * np.exp(np.random.default_rng(1).normal(0, noise, ROWS))
    everywhere = list(range(ROWS))
    fields = {
        "constants": CONSTANTS,
        "seen_s": seen_s,
        "weights": source_weights(SOURCE),
        "touched": {"matmul": everywhere, "link": everywhere, "time": np.flatnonzero(SLOW).tolist()},
        "predict": predicted_s,
        **changes,
    }
    return Problem(**fields)  # pyright: ignore[reportArgumentType]


def values_of(posed: Problem, fitted: Fitted) -> dict[str, float]:
    return posed.values(fitted.unknowns)


def test_planted_constants_are_found_again() -> None:
    posed = problem()
    assert values_of(posed, fit(posed)) == pytest.approx(PLANTED, rel=0.02)


def test_outliers_pull_little() -> None:
    posed = problem(noise=0.03)
    posed.seen_s[::12] *= 3
    assert values_of(posed, fit(posed)) == pytest.approx(PLANTED, rel=0.1)


def test_a_tight_prior_and_the_range_hold() -> None:
    tight = (constant("matmul", 0.9, log_sd=1e-4), *CONSTANTS[1:])
    posed = problem(constants=tight)
    assert values_of(posed, fit(posed))["matmul"] == pytest.approx(0.9, rel=1e-3)
    narrow = (constant("matmul", 0.9, low=0.85, high=1.0), *CONSTANTS[1:])
    posed = problem(constants=narrow)
    found = values_of(posed, fit(posed))["matmul"]
    assert found == pytest.approx(0.85, rel=1e-3)
    assert narrow[0].changed(value=max(found, 0.85)).is_at_its_border
    assert not narrow[0].is_at_its_border


def test_a_constant_that_no_row_has_stays_at_its_prior() -> None:
    posed = problem(touched={"matmul": [], "link": list(range(ROWS)), "time": []})
    found = values_of(posed, fit(posed))
    assert found["matmul"] == pytest.approx(0.9)
    assert found["time"] == pytest.approx(1.0)


def test_only_touched_rows_are_asked_for() -> None:
    asked = Asked()
    posed = problem(predict=asked)
    prior = posed.prior
    errors = posed.errors(prior)
    asked.rows.clear()
    posed.jacobian(prior, errors)
    assert len(asked.rows) == 2 * ROWS + SLOW.sum()


def test_derivatives_are_those_of_the_errors() -> None:
    posed = problem()
    at = posed.prior
    slopes = posed.jacobian(at, posed.errors(at))
    for column, name in enumerate(("matmul", "link", "time")):
        moved = at.copy()
        moved[column] += 1e-6
        assert slopes[:, column] == pytest.approx((posed.errors(moved) - posed.errors(at)) / 1e-6, abs=2e-3), name


def test_a_source_of_many_rows_weighs_as_the_root_of_them() -> None:
    weights = source_weights(["a"] * 9 + ["b"])
    assert weights[:9].sum() == pytest.approx(3)
    assert weights[9] == 1


# Folds


def test_a_fold_never_sees_the_rows_that_it_judges() -> None:
    """Whatever the judged rows measured, their predictions are the same."""
    posed = problem(noise=0.05)
    judged = [row for row in range(ROWS) if SOURCE[row] == "s2"]
    before = leave_out(posed, fit(posed), SOURCE)[judged]
    posed.seen_s[judged] *= 5
    after = leave_out(posed, fit(posed), SOURCE)[judged]
    assert after == pytest.approx(before, rel=5e-3)


def test_a_fold_is_what_a_fit_without_its_rows_gives() -> None:
    posed = problem(noise=0.05)
    rows = np.array([row for row in range(ROWS) if SOURCE[row] != "s4"])
    fold = without(posed, fit(posed), rows)
    kept = [int(np.flatnonzero(rows == row)[0]) for row in posed.touched["time"] if row in rows]
    alone = problem(
        seen_s=posed.seen_s[rows],
        weights=posed.weights[rows],
        touched={"matmul": range(len(rows)), "link": range(len(rows)), "time": kept},
        predict=lambda values, asked: predicted_s(values, [int(rows[row]) for row in asked]),
    )
    assert fold == pytest.approx(fit(alone).unknowns, abs=5e-3)


def test_software_that_only_the_judged_rows_have_goes_back_to_its_prior() -> None:
    posed = problem()
    folds = ["slow" if slow else "fast" for slow in SLOW]
    predicted = leave_out(posed, fit(posed), folds)
    slow = np.flatnonzero(SLOW)
    assert predicted[slow] / posed.seen_s[slow] == pytest.approx(1 / PLANTED["time"], rel=0.03)


# Constants of the catalogue


def test_the_catalogue_has_few_constants_and_one_factor_for_each_software() -> None:
    constants = catalogue.constants()
    assert len(constants) <= 45
    factors = [part for each in constants if each.fields == ("rates.time_factor",) for part in each.parts]
    assert len(factors) == len(set(factors))
    for each in constants:
        assert len(each.why) > 20, each.name
        for part in each.parts:
            assert catalogue.has_part(part), part


def test_a_value_of_a_constant_stands_in_its_fields_with_its_source() -> None:
    cluster = catalogue.compose_cluster("h200", "llm-foundry-2023", {"matmul_h100_bf16": 0.8, "launch": 5e-6})
    assert cluster.rates.sustained["bf16"] == cluster.rates.sustained["fp16"] == 0.8
    assert cluster.rates.launch_s == 5e-6
    source = cluster.provenance_of("rates.sustained.bf16")
    assert source is not None
    assert source.kind == "measured"
    assert "benchmarks/fit_published.py" in source.source
    assert catalogue.compose_cluster("h200").rates.sustained["bf16"] != 0.8  # nothing is kept


def test_a_part_of_ones_own_goes_before_what_it_is_like() -> None:
    own = catalogue.compose_cluster("h100-96gb-hbm2e", values={"matmul_h100_bf16": 0.99, "matmul_h100_500w": 0.7})
    assert own.rates.sustained["bf16"] == 0.7


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"value": 3.0}, "value=3.0: must be from low=0.2 to high=2.0"),
        ({"parts": ["h100"]}, "parts='h100': must be kind:name"),
        ({"parts": ["gpu:h100"]}, "parts='gpu:h100': must be kind:name"),
    ],
)
def test_a_constant_that_can_not_be(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint.split(":")[0].split("=")[0]) as refusal:
        constant("matmul", 0.9, **fields)
    assert complaint in str(refusal.value)


def test_names_of_constants_are_their_own() -> None:
    with pytest.raises(InvalidSpec, match="two constants"):
        Constants.parse({"constant": [each.plain() for each in (CONSTANTS[0], CONSTANTS[0])]})


# Bands


def judged(error: float, source: str = "a", **cells: str) -> Judged:
    run = one(source=source, framework="Composer", year="2023", **cells)
    return Judged(
        published=run,
        device="H100",
        predicted_step_s=run.step_s * (1 + error),
        predicted_bytes=1.0,
        fits=True,
    )


def test_bands_hold_their_share_of_rows_that_were_not_fitted() -> None:
    errors = np.exp(np.random.default_rng(3).normal(0, 0.1, 200)) - 1
    moe = {"moe_experts": "8", "moe_topk": "2", "moe_ffn_hidden": "11008", "moe_routing": "forced balance"}
    rows = [judged(float(error), f"s{at % 40}") for at, error in enumerate(errors)]
    rows += [judged(0.0, f"s{at}", sp="1", **moe) for at in range(5)]
    bands = bands_of(rows, rows)
    inside = [row.is_inside(bands) for row in rows[:200]]
    assert 0.78 <= np.mean(inside) <= 0.86
    assert bands.dense_seen.low < 1 < bands.dense_seen.high
    assert bands.moe_seen.rows == 5


def test_doubtful_rows_widen_their_bands() -> None:
    moe = {"moe_experts": "8", "moe_topk": "2", "moe_ffn_hidden": "11008", "sp": "1"}
    errors = np.random.default_rng(3).normal(0, 0.1, 80)
    rows = [judged(float(error), f"s{at}") for at, error in enumerate(errors)]
    rows += [judged(float(error), f"s{at}", **moe, moe_routing="forced") for at, error in enumerate(errors)]
    assert bands_of(rows, rows).widening == 1
    rows += [judged(3 * float(error), f"d{at}", recompute="unknown") for at, error in enumerate(errors)]
    assert bands_of(rows, rows).widening > 1.2
