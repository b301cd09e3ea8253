"""Sums of few bits against whole numbers, one product after another; and how far they are off, with and without
promotion."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from trainwright.train.precision.accumulator import limited_product
from trainwright.train.precision.formats import E2M1, E4M3, E5M2, NumberFormat
from trainwright.train.precision.product import by_emulation
from trainwright.train.precision.quantized import BLOCK, NV, ROW, TENSOR, TILE, Quantized, quantize


def exponent(x: Fraction) -> int:
    """Of the leading bit."""
    power = abs(x).numerator.bit_length() - x.denominator.bit_length()
    return power if abs(x) >= Fraction(2) ** power else power - 1


def cut(x: Fraction, unit: Fraction) -> Fraction:
    """Toward zero, to a whole number of units."""
    whole = abs(x) // unit * unit
    return whole if x > 0 else -whole


def slow_sum(a: list[float], b: list[float], forms: tuple[NumberFormat, NumberFormat], each: int) -> float:
    """One running sum after another, in whole numbers; those that are taken out are added up in fp32."""
    total, running = np.float32(0), Fraction(0)
    for first in range(0, len(a), 32):
        numbers, exponents = [], []
        for x, y in zip(a[first : first + 32], b[first : first + 32], strict=True):
            if x and y:
                numbers.append(Fraction(x) * Fraction(y))
                exponents.append(
                    sum(
                        max(exponent(Fraction(value)), form.least_exponent)
                        for value, form in zip((x, y), forms, strict=True)
                    )
                )
        if running:
            numbers.append(running)
            exponents.append(exponent(running))
        if numbers:
            unit = Fraction(2) ** (max(exponents) - 13)
            running = sum((cut(number, unit) for number in numbers), Fraction(0))
            if running:
                running = cut(running, Fraction(2) ** (exponent(running) - 13))
        if (first + 32) % each == 0 or first + 32 >= len(a):
            total, running = np.float32(total + np.float32(float(running))), Fraction(0)
    return float(total)


def as_codes(x: torch.Tensor, form: NumberFormat) -> Quantized:
    """With the scale 1."""
    return quantize(x, form, TENSOR, scale=torch.ones(1, 1))


@pytest.mark.parametrize("forms", [(E4M3, E4M3), (E5M2, E4M3)], ids=lambda forms: forms[0].name)
@pytest.mark.parametrize("each", [None, 32, 64])
def test_sums_are_those_of_whole_numbers(forms: tuple[NumberFormat, NumberFormat], each: int | None) -> None:
    generator = np.random.default_rng(0)
    for size, summed in ((100.0, 96), (1.0, 130), (3e-3, 64), (1e-2, 20)):  # the last two: below normal values
        a, b = (torch.from_numpy(generator.standard_t(2, (count, summed)) * size).float() for count in (5, 4))
        a[0, :40] = 0
        one, two = as_codes(a, forms[0]), as_codes(b, forms[1])
        found = limited_product(one, two, each)
        left, right = one.dequantize(), two.dequantize()
        assert (left[left != 0].abs() < 2.0**-6).any() or size > 1e-2
        for row, column in np.ndindex(5, 4):
            meant = slow_sum(left[row].tolist(), right[column].tolist(), forms, each or summed + 32)
            assert found[row, column] == meant


def test_fourteen_bits() -> None:
    """The leading one and thirteen more: what two products, or a product and the running sum, keep of each
    other."""
    ones = as_codes(torch.ones(1, 64), E4M3)
    for place in (1, 40):
        for power, is_kept in ((-13, True), (-14, False)):
            x = torch.zeros(1, 64)
            x[0, 0], x[0, place] = 16, 2.0 ** (power + 4)
            found = limited_product(as_codes(x, E5M2), ones)
            assert found.item() == 16 + (2.0 ** (power + 4) if is_kept else 0)


def test_scales_are_those_of_the_operands() -> None:
    a, b = torch.randn(40, 300), torch.randn(30, 300)
    for first, second, each in ((TENSOR, TENSOR, None), (ROW, ROW, 64), (TILE, TILE, 128), (TILE, BLOCK, 128)):
        one, two = quantize(a, E4M3, first), quantize(b, E4M3, second)
        found, plain = limited_product(one, two, each), by_emulation(one, two, torch.float32)
        assert float((found - plain).norm() / plain.norm()) < 1e-3
        assert not torch.equal(found, plain)
    with pytest.raises(ValueError, match="promoted_every=64 must be the columns of a block"):
        limited_product(quantize(a, E4M3, TILE), quantize(b, E4M3, TILE), 64)
    with pytest.raises(ValueError, match="promoted_every=48 must be a multiple of 32"):
        limited_product(one, two, 48)
    with pytest.raises(ValueError, match="no E2M1"):
        limited_product(quantize(a, E2M1, NV), quantize(b, E2M1, NV))


def test_what_promotion_is_worth() -> None:
    """DeepSeek-V3's example, random matrices summed over 4096 (arXiv:2412.19437 s3.3.2: "nearly 2%" at worst):
    normal numbers, errors over the root mean square of the results, as single results may be near zero."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 4096, generator=generator) for _ in range(2))
    one, two = quantize(a, E4M3, TENSOR), quantize(b, E4M3, TENSOR)
    exact = one.dequantize(torch.float64) @ two.dequantize(torch.float64).mT
    size = exact.square().mean().sqrt()
    worst, typical = {}, {}
    for each in (None, 512, 128, 32):
        error = (limited_product(one, two, each).double() - exact) / size
        worst[each], typical[each] = float(error.abs().max()), float(error.square().mean().sqrt())
    assert 0.01 < worst[None] < 0.03
    assert worst[128] < 1.5e-3
    for before, after in pairwise((None, 512, 128, 32)):
        assert worst[after] < worst[before] / 2
    # Rounding the operands costs 40 times as much as their sums then do, and sums in fp32 next to nothing.
    assert float((exact - a.double() @ b.double().mT).square().mean().sqrt() / size) > 40 * typical[128]
    plain = by_emulation(one, two, torch.float32).double()
    assert float((plain - exact).abs().max() / size) < 1e-5


def test_numbers_of_one_sign_lose_more() -> None:
    """Cutting off toward zero is a bias there: each product that the sum has outgrown loses half a unit."""
    generator = torch.Generator().manual_seed(1)
    one, two = (quantize(torch.rand(64, 4096, generator=generator), E4M3, TENSOR) for _ in range(2))
    exact = one.dequantize(torch.float64) @ two.dequantize(torch.float64).mT
    never, often = (limited_product(one, two, each).double() / exact - 1 for each in (None, 128))
    assert -0.09 < float(never.mean()) < -0.05
    assert -1e-3 < float(often.mean()) < -1e-4
