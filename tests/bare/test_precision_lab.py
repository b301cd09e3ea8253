"""What the lab of low precision says follows from its figures: other figures, other sentences."""

import xml.etree.ElementTree as ET
from itertools import product
from typing import get_args

import pytest
from rich.console import Console

from trainwright.present.precision_lab import lab_page, lab_svgs, lab_view
from trainwright.present.precision_verdict import verdict
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.precision_lab import (
    MODELS,
    PLAIN,
    PRODUCTS,
    Curve,
    Kept,
    PrecisionLab,
    Rounding,
    SumError,
    distance,
    worse,
)

FACTORS = (1.0, 256.0, 65536.0)
PER_TENSOR = ("fp8-delayed", "fp8-current")
STEPS = 12


def lab(
    *, block: float = 0.001, naive: float = 0.2, promoted: float = 1e-3, plain_moves: bool = False
) -> PrecisionLab:
    """Losses of 4 in bf16, and above it by these shares: fp8-block's everywhere, scales of tensors' with the
    largest outliers."""

    def share(precision: str, factor: float) -> float:
        if precision == PLAIN:
            return 0.01 if plain_moves and factor > 1 else 0.0
        return naive if precision in PER_TENSOR and factor == FACTORS[-1] else block

    cells = [*product(MODELS, (PLAIN, *LOW_PRECISION), FACTORS)]
    kinds = ("never", "512", "128", "32", "fp32", "operands")
    worst: dict[Kept, float] = dict(zip(kinds, (0.02, 4e-3, promoted, 5e-4, 1e-6, 0.1), strict=True))
    return PrecisionLab(
        steps=STEPS,
        curves=tuple(
            Curve(
                model=model,
                precision=name,
                factor=factor,
                losses=(4.0 * (1 + share(name, factor)),) * STEPS,
                step_s=0.1,
            )
            for model, name, factor in cells
        ),
        roundings=tuple(
            Rounding(
                model=model,
                precision=name,
                factor=factor,
                layer="layers.0.mlp.up",
                role=role,
                error=0.03,
                flushed=0.75 if naive and factor == FACTORS[-1] and name in PER_TENSOR else 0.0,
                saturated=0.0,
            )
            for model, name, factor in cells
            if name != PLAIN
            for role in ("input", "weight", "gradient")
        ),
        sums=tuple(
            SumError(product=name, summed=summed, kept=kept, worst=worst[kept], typical=worst[kept] / 4)
            for name in PRODUCTS
            for summed in (1024, 4096)
            for kept in get_args(Kept)
        ),
    )


def said(found: PrecisionLab) -> str:
    return "\n".join(verdict(found))


def test_losses_are_compared_over_the_last_sixth() -> None:
    plain = [4.0] * 300
    low = [9.0] * 250 + [4.04, 3.96] * 25
    assert distance(low, plain) == pytest.approx(0.01)
    assert worse(low, plain) == pytest.approx(0.0)
    assert worse([float("nan")] * 300, plain) == float("inf")


def test_the_verdict_says_what_the_figures_say() -> None:
    assert "fp8-block's loss is within 0.25% of bf16's" in said(lab())
    assert "fp8-block's loss is NOT within 0.25% of bf16's" in said(lab(block=0.004))
    assert said(lab()).count("visibly worse with outliers of 65,536") == 2
    assert "fp8-current +20.00% against bf16, fp8-block +0.10%" in said(lab())
    assert "75% at most" in said(lab())
    assert said(lab(naive=0.002)).count("could NOT show that scales of whole tensors are worse") == 2
    assert "could NOT show" in said(lab(naive=0.02, block=0.03))
    assert "the same to the bit" in said(lab())
    assert "change bf16's own losses" in said(lab(plain_moves=True))
    assert "by 0.100%, which is hidden by what rounding the operands costs (10.0%)" in said(lab())
    assert "by 1.500%, which is NOT hidden by what rounding" in said(lab(promoted=0.015))
    assert "With outliers of 256 no recipe is worse by more than 1%" in said(lab())
    assert "diverged" in said(lab(naive=float("nan")))


def test_view_and_page_hold_all_of_it() -> None:
    found = lab()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(lab_view(found))
    text = console.export_text()
    for name in LOW_PRECISION:
        assert name in text
    assert "+20.00%" in text
    assert "(75%)" in text
    pictures = lab_svgs(found)
    assert pictures == lab_svgs(found)
    for picture in pictures.values():
        ET.fromstring(picture)
    page = lab_page(found, pictures)
    assert page.count("<svg") == len(pictures) == 5
    for each in verdict(found):
        assert each.replace("'", "&#x27;") in page
