"""Numbers of 8 and 4 bits against ml_dtypes, code by code: rounding at every midpoint and beside it, saturation,
what is below the normal values, NaN and infinity; scales against exact fractions; what rounds stochastically."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from trainwright.train.precision import scales
from trainwright.train.precision.formats import (
    E2M1,
    E4M3,
    E5M2,
    NumberFormat,
    cast,
    decoded,
    packed,
    unpacked,
    value_of_codes,
)
from trainwright.train.precision.noise import Noise

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
EACH = pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
EIGHT = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)


def oracle(x: np.ndarray, form: NumberFormat) -> np.ndarray:
    """Codes of fp32 values; what is beyond the largest value becomes it."""
    clipped = np.clip(x, np.float32(-form.largest), np.float32(form.largest))
    return clipped.astype(ORACLE[form.name]).view(np.uint8)


def codes(x: np.ndarray, form: NumberFormat) -> np.ndarray:
    values = cast(torch.from_numpy(x), form)
    return (unpacked(values)[: len(x)] if form is E2M1 else values.view(torch.uint8)).numpy().astype(np.uint8)


def finite_values(form: NumberFormat) -> np.ndarray:
    every = np.arange(16 if form is E2M1 else 256, dtype=np.uint8).view(ORACLE[form.name]).astype(np.float32)
    return np.unique(every[np.isfinite(every)])


@EACH
def test_every_value_every_midpoint_and_their_neighbours(form: NumberFormat) -> None:
    values = finite_values(form)
    assert values.max() == form.largest
    assert values[values > 0].min() == form.least
    midpoints = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    assert np.all(2 * midpoints.astype(np.float64) == values[:-1].astype(np.float64) + values[1:])
    points = np.concatenate((values, midpoints, -values[values == 0]))
    x = np.concatenate([points, *(np.nextafter(points, np.float32(to)) for to in (np.inf, -np.inf))])
    found = codes(x, form)
    assert np.array_equal(found, oracle(x, form))
    # And once more by distance alone, in double precision: the nearest, of two the even code.
    table = value_of_codes(form).astype(np.float64)
    distance = np.abs(table[None, :] - x.astype(np.float64)[:, None])
    distance[~np.isfinite(distance)] = np.inf
    nearest = distance.min(1)
    assert np.all(np.abs(table[found] - x) == nearest)
    is_tie = np.sum((distance == nearest[:, None]) & (table[None, :] != 0), 1) == 2
    assert is_tie.sum() >= len(midpoints) - 2
    assert np.all(found[is_tie] % 2 == 0)


@EIGHT
def test_what_is_beyond_saturates_and_nan_stays(form: NumberFormat) -> None:
    beyond = np.float32([form.largest * 1.01, form.largest * 2, 1e30, np.inf])
    both = np.concatenate((beyond, -beyond))
    found = decoded(cast(torch.from_numpy(both), form), form).float().numpy()
    assert np.array_equal(found, np.sign(both) * form.largest)
    assert cast(torch.tensor([np.nan, -np.nan]), form).isnan().all()
    assert torch.tensor(1e6).to(torch.float8_e5m2).isinf()  # torch's own cast doesn't saturate


def test_fp4_saturates_too() -> None:
    assert codes(np.float32([6.1, 7, 1e30, np.inf, -6.1, -np.inf]), E2M1).tolist() == [7, 7, 7, 7, 15, 15]


@EACH
def test_values_of_all_exponents(form: NumberFormat) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 400_001, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    near = np.random.default_rng(1).standard_t(2, 400_001).astype(np.float32) * np.float32(form.largest / 8)
    for each in (x, near):
        assert np.array_equal(codes(each, form), oracle(each, form))


@EACH
def test_every_bf16_value(form: NumberFormat) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    values = cast(x, form)
    found = unpacked(values)[: len(x)] if form is E2M1 else values.view(torch.uint8)
    assert np.array_equal(found.numpy().astype(np.uint8), oracle(x.float().numpy(), form))


@EACH
def test_all_codes_are_read_back_exactly(form: NumberFormat) -> None:
    every = np.arange(16 if form is E2M1 else 256, dtype=np.uint8)
    meant = every.view(ORACLE[form.name]).astype(np.float32)
    assert np.array_equal(value_of_codes(form), meant, equal_nan=True)
    kept = packed(torch.from_numpy(every)) if form is E2M1 else torch.from_numpy(every).view(form.dtype)
    found = decoded(kept, form)
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.float().numpy(), meant, equal_nan=True)
    if form is not E2M1:
        assert np.array_equal(decoded(kept[:255], form).float().numpy(), meant[:255], equal_nan=True)
        square = kept.view(16, 16)
        assert torch.equal(decoded(square.mT, form).nan_to_num(), found.view(16, 16).mT.nan_to_num())


def test_fp4_codes_are_packed_with_the_even_one_low() -> None:
    values = cast(torch.tensor([[0.5, -6.0, 1.0]]), E2M1)
    assert values.tolist() == [[0x1 | 0xF << 4, 0x2]]
    assert decoded(values, E2M1).tolist() == [[0.5, -6.0, 1.0, 0.0]]
    assert ml_dtypes.float4_e2m1fn(-6.0).view(np.uint8) == 0xF


def least_power(amax: float, largest: float) -> int:
    """The least k with amax <= largest * 2^k, by exact fractions."""
    ratio = Fraction(amax) / Fraction(largest)
    k = ratio.numerator.bit_length() - ratio.denominator.bit_length() - 1
    while ratio > Fraction(2) ** k:
        k += 1
    return k


@EACH
def test_exponents_of_scales_are_exact(form: NumberFormat) -> None:
    significands = [1.0, 1.25, 1.5, 1.75, 2 - 2**-23, form.largest / 2.0 ** np.floor(np.log2(form.largest))]
    points = np.float32([each * 2.0**power for each in significands for power in range(-110, 120, 7)])
    points = np.concatenate([points, *(np.nextafter(points, np.float32(to)) for to in (np.inf, 0))])
    up = scales.exponent(torch.from_numpy(points), form.largest)
    down = scales.exponent(torch.from_numpy(points), form.largest, round_up=False)
    assert up.tolist() == [least_power(float(each), form.largest) for each in points]
    floor = np.frexp(points)[1] - np.frexp(np.float32(form.largest))[1]
    assert down.tolist() == floor.tolist()


def test_scales_in_e8m0() -> None:
    every = np.arange(256, dtype=np.uint8)
    meant = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    found = torch.from_numpy(every).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(found, meant, equal_nan=True)
    amax = torch.tensor([[448.0, 449.0, 448 * 2.0**-127, 1e-45, 0.0, 3e38, np.inf, np.nan]])
    kept, encoding, _ = scales.RULES["e8m0"](amax, E4M3, None)
    assert kept.view(torch.uint8).tolist() == [[127, 128, 0, 0, 0, 127 + 120, 255, 255]]
    assert torch.equal(encoding[0, :6] * kept.float()[0, :6], torch.ones(6))
    assert encoding[0, 6:].isnan().all()
    assert scales.RULES["e8m0_floor"](amax[:, :2], E4M3, None).kept.float().tolist() == [[1.0, 1.0]]
    assert scales.RULES["e8m0_floor"](amax[:, :1] + 64, E4M3, None).kept.float().tolist() == [[2.0]]


def stochastic(x: torch.Tensor, noise: Noise) -> torch.Tensor:
    return decoded(cast(x, E2M1, noise), E2M1).float()


def test_stochastic_rounding_has_the_expected_value() -> None:
    draws = 200_000
    for value in (0.1, 0.25, 0.7, 1.9, 2.1, 3.5, 4.2, 5.9, -0.3, -2.75):
        found = stochastic(torch.full((1, draws), value), Noise(7))
        below, above = np.unique(found.numpy())
        assert below < value < above
        step = above - below
        share = (value - below) / step
        deviation = step * (share * (1 - share) / draws) ** 0.5
        assert abs(float(found.double().mean()) - value) < 5 * deviation
    nearest = decoded(cast(torch.full((1, draws), 0.7), E2M1), E2M1).float()
    assert abs(float(nearest.mean()) - 0.7) > 0.1  # rounding to nearest hasn't


def test_stochastic_rounding_leaves_values_and_neighbours() -> None:
    values = torch.tensor(finite_values(E2M1)).repeat(100, 1)
    assert torch.equal(stochastic(values[:, :14], Noise(3)), values[:, :14])
    x = torch.randn(300, 300) * 2
    table = np.unique(value_of_codes(E2M1))
    above = table[np.minimum(np.searchsorted(table, x.clamp(-6, 6).numpy()), len(table) - 1)]
    below = table[np.maximum(np.searchsorted(table, x.clamp(-6, 6).numpy(), side="right") - 1, 0)]
    found = stochastic(x, Noise(4)).numpy()
    assert np.all((found == above) | (found == below))


def test_noise_is_of_the_place_and_the_seed_alone() -> None:
    state = torch.get_rng_state()
    whole = Noise(5).uniform(torch.empty(40, 30))
    torch.manual_seed(99)
    assert torch.equal(Noise(5).uniform(torch.empty(40, 30)), whole)
    part = Noise(5, row=8, column=10).uniform(torch.empty(16, 20))
    assert torch.equal(part, whole[8:24, 10:30])
    assert torch.equal(Noise(5).uniform(torch.empty(30, 40).mT), whole)
    for other in (Noise(6), Noise(5 + 2**32), Noise(5, row=2**32), Noise(5, column=2**32), Noise(5, row=1)):
        assert float((other.uniform(torch.empty(40, 30)) == whole).float().mean()) < 0.01
    stack = Noise(5).uniform(torch.empty(3, 40, 30))
    assert float((stack[0] == stack[1]).float().mean()) < 0.01
    torch.set_rng_state(state)


def test_noise_is_uniform_and_its_rows_and_columns_don_t_resemble_each_other() -> None:
    noise = Noise(1).uniform(torch.empty(512, 512)).double()
    count = noise.numel()
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    assert abs(float(noise.mean()) - 0.5) < 5 * (1 / 12 / count) ** 0.5
    cells = torch.histc(noise, 64, 0, 1)
    assert float(((cells - count / 64) ** 2 / (count / 64)).sum()) < 63 + 5 * (2 * 63) ** 0.5
    centred = noise - 0.5
    for shift in ((1, 0), (0, 1), (1, 1), (2, 0), (0, 16), (16, 0)):
        product = centred * centred.roll(shift, (0, 1))
        assert abs(float(product.mean())) < 5 / 12 / count**0.5
