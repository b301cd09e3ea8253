"""Products of quantized matrices against float64: within what the formats' own spacing allows, for each
recipe's three products; sums in fp32 of exact products; groups; and the operands as a device's kernels want
them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.train.precision.formats import E2M1, E4M3
from trainwright.train.precision.hadamard import transformed
from trainwright.train.precision.noise import Noise
from trainwright.train.precision.product import (
    _engine,
    _Laid,
    _laid_out,
    _scaled_mm,
    _swizzled,
    by_emulation,
    by_hardware,
    engine,
    grouped_product,
    product,
)
from trainwright.train.precision.quantized import (
    BLOCK,
    MX,
    NV,
    NV_BLOCK,
    ROW,
    TENSOR,
    TILE,
    Quantized,
    Scaling,
    quantize,
)
from trainwright.train.precision.recipes import RECIPES, Operand

EPS_FP32, HALF_STEP_BF16 = 2.0**-23, 2.0**-8


def heavy(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, shape)).to(dtype)


Pair = tuple[Operand, torch.Tensor, Operand, torch.Tensor]


def three_products(name: str, seed: int, tokens: int, wide: int, high: int) -> Iterator[Pair]:
    operands = RECIPES[name]
    x, w = heavy(tokens, wide, seed=seed), heavy(high, wide, seed=seed + 1000) * 0.02
    gradient = heavy(tokens, high, seed=seed + 2000) * 1e-4
    yield operands.fprop_input, x, operands.fprop_weight, w
    yield operands.dgrad_gradient, gradient, operands.dgrad_weight, w.mT
    yield operands.wgrad_gradient, gradient.mT, operands.wgrad_input, x.mT


def allowed(x: torch.Tensor, quantized: Quantized, is_stochastic: bool) -> torch.Tensor:
    """How far each value may lie from what it was rounded to: half of the spacing at it, which is a share of it
    or, below the normal values, of the block's scale; all of the spacing where it is rounded stochastically."""
    form, scaling = quantized.format, quantized.scaling
    scale = quantized.scale.double() * (1 if quantized.tensor_scale is None else quantized.tensor_scale.double())
    rows, columns = x.shape
    scale = scale.repeat_interleave(scaling.rows or rows, 0).repeat_interleave(scaling.columns or columns, 1)
    spacing = torch.maximum(2 * form.half_step * x.abs(), form.least * scale[:rows, :columns])
    return spacing * (1 if is_stochastic else 0.5) * (1 + 1e-6)


def check(pair: Pair, seed: int, out_dtype: torch.dtype, has_many: bool) -> None:
    """Of one product: each value of its operands, each of its own, and where there are many, all of them
    together."""
    first, a, second, b = pair
    one, two = first.quantized(a, noise=Noise(seed, 1)), second.quantized(b, noise=Noise(seed, 2))
    found = product(one, two, out_dtype)
    assert found.dtype == out_dtype
    exact = a.double() @ b.double().mT
    rounding = HALF_STEP_BF16 if out_dtype == torch.bfloat16 else EPS_FP32
    if first.is_transformed:  # errors are of the transformed values
        a, b = transformed(a, 0), transformed(b, 0)
    a, b = a.double(), b.double()
    error_a, error_b = allowed(a, one, first.is_stochastic), allowed(b, two, second.is_stochastic)
    assert torch.all((one.dequantize(torch.float64) - a).abs() <= error_a)
    assert torch.all((two.dequantize(torch.float64) - b).abs() <= error_b)
    sizes = a.abs() @ b.abs().mT
    spread = a.abs() @ error_b.mT + error_a @ b.abs().mT + error_a @ error_b.mT
    bound = spread + a.shape[1] * EPS_FP32 * (sizes + spread) + rounding * (exact.abs() + spread)
    if first.is_transformed:
        bound += 3 * HALF_STEP_BF16 * sizes  # both transforms are rounded to bf16
    error = found.double() - exact
    assert error.shape == bound.shape
    assert torch.all(error.abs() <= bound)
    if has_many:
        # Errors of single values are independent, so those of a sum are as large as their squares say.
        squares = a.square() @ error_b.square().mT + error_a.square() @ b.square().mT
        assert float(error.norm()) <= float(squares.sum().sqrt() + rounding * exact.norm())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_within_the_formats_spacing(name: str, out_dtype: torch.dtype) -> None:
    for seed in range(4):
        for pair in three_products(name, seed, tokens=96, wide=320, high=144):
            check(pair, seed, out_dtype, has_many=True)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(RECIPES)),
    st.integers(0, 10**6),
    *(st.integers(1, 200) for _ in range(3)),
)
def test_products_of_any_shape(name: str, seed: int, tokens: int, wide: int, high: int) -> None:
    for pair in three_products(name, seed, tokens, wide, high):
        check(pair, seed, torch.float32, has_many=False)


SCALINGS = {
    "tensor": (E4M3, TENSOR),
    "row": (E4M3, ROW),
    "fp32 row": (E4M3, replace(ROW, rule="fp32")),
    "tile": (E4M3, TILE),
    "block": (E4M3, BLOCK),
    "mx": (E4M3, MX),
    "nv": (E2M1, NV),
    "nv block": (E2M1, NV_BLOCK),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("other", SCALINGS)
def test_emulation_is_the_product_of_what_was_kept(kind: str, other: str) -> None:
    """Products are exact, sums fp32, and the result is rounded once."""
    a, b = heavy(60, 500, seed=1), heavy(70, 500, seed=2)
    one, two = quantize(a, *SCALINGS[kind]), quantize(b, *SCALINGS[other])
    left, right = one.dequantize(torch.float64), two.dequantize(torch.float64)
    exact, sizes = left @ right.mT, left.abs() @ right.abs().mT
    wide = by_emulation(one, two, torch.float32)
    sums = 500 * EPS_FP32 * sizes
    assert torch.all((wide - exact).abs() <= sums)
    narrow = by_emulation(one, two, torch.bfloat16)
    assert torch.all((narrow.double() - exact).abs() <= sums + HALF_STEP_BF16 * (exact.abs() + sums))
    if one.factor is not None or two.factor is not None:
        assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("kind", ["tensor", "row", "tile", "mx", "nv"])
def test_groups_are_products_of_their_own(kind: str) -> None:
    form, scaling = SCALINGS[kind]
    x, stack = heavy(45, 96, seed=3), heavy(4, 33, 96, seed=4)
    counts = [20, 0, 24, 1]
    one = quantize(x, form, scaling)
    for square in {"tile": BLOCK, "nv": NV_BLOCK}.get(kind, scaling), scaling:
        two = quantize(stack, form, square)
        found = grouped_product(one, two, counts)
        assert found.shape == (45, 33)
        left, right = one.dequantize(torch.float64), two.dequantize(torch.float64)
        first = 0
        for group, count in enumerate(counts):
            exact = left[first : first + count] @ right[group].mT
            assert torch.allclose(found[first : first + count].double(), exact, rtol=2**-8, atol=1e-3)
            first += count
        assert torch.equal(product(two, two)[1], product(two[1], two[1]))  # and a stack is its matrices
    with pytest.raises(ValueError, match=r"counts=\[20, 25\] must be one for each of 4 matrices"):
        grouped_product(one, two, [20, 25])
    with pytest.raises(ValueError, match="summed over 96 and 33 columns"):
        product(one, quantize(stack[0].mT, form, scaling))


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("shape", [(64, 128, 96), (37, 150, 45), (0, 16, 16), (3, 16, 0)], ids=str)
def test_hardware_and_emulation_agree_where_a_cpu_has_both(kind: str, shape: tuple[int, int, int]) -> None:
    rows, summed, columns = shape
    form, scaling = SCALINGS[kind]
    one = quantize(heavy(rows, summed, seed=5), form, scaling)
    for two in (
        quantize(heavy(columns, summed, seed=6), form, scaling),
        quantize(heavy(summed, columns, seed=6).mT, form, scaling),
    ):
        found, emulated = by_hardware(one, two, torch.float32), by_emulation(one, two, torch.float32)
        sizes = one.dequantize().abs() @ two.dequantize().abs().mT
        assert found.shape == emulated.shape
        assert torch.all((found - emulated).abs() <= 2 * summed * EPS_FP32 * sizes)
        assert by_hardware(one, two, torch.bfloat16).dtype == torch.bfloat16


PAIRS = {
    "tensor": (E4M3, TENSOR, TENSOR),
    "row": (E4M3, ROW, ROW),
    "tile, block": (E4M3, TILE, BLOCK),
    "tile, tile": (E4M3, TILE, TILE),
    "mx": (E4M3, MX, MX),
    "nv": (E2M1, NV, NV),
    "nv, block": (E2M1, NV, NV_BLOCK),
}


def on_cuda(laid: _Laid) -> _Laid:
    """The same in shape, strides and format, and not there."""
    tensors = [
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
        for each in (laid.values, *laid.scales)
    ]
    return laid._replace(values=tensors[0], scales=tensors[1:])


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("shape", [(256, 512, 384), (37, 150, 45), (129, 1, 16), (40, 1152, 200)], ids=str)
def test_operands_are_laid_out_as_torch_wants_them_on_cuda(kind: str, shape: tuple[int, int, int]) -> None:
    """Torch's own checks of shapes, strides, formats and swizzles."""
    rows, summed, columns = shape
    form, first, second = PAIRS[kind]
    a = _laid_out(quantize(heavy(rows, summed, seed=7), form, first))
    for b in (heavy(columns, summed, seed=8), heavy(summed, columns, seed=8).mT):
        other = _laid_out(quantize(b, form, second))
        with FakeTensorMode():
            result = _scaled_mm(on_cuda(a), on_cuda(other), torch.bfloat16)
            assert result.shape[0] >= rows
            assert result.shape[1] >= columns
            wrong = on_cuda(other)._replace(scales=[torch.empty(3, 5, device="cuda")] * len(other.scales))
            with pytest.raises((RuntimeError, ValueError)):
                _scaled_mm(on_cuda(a), wrong, torch.bfloat16)


def test_swizzled_scales_lie_as_cublas_reads_them() -> None:
    """cuBLAS' formula: of a scale at row r and block c, within a tile of 128 x 4, (r % 32) * 16 + (r / 32) * 4
    + c."""
    scale = torch.arange(130 * 6, dtype=torch.int64).remainder(251).to(torch.uint8).view(130, 6)
    found = _swizzled(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert found.numel() == 256 * 8
    for row in range(130):
        for block in range(6):
            tile = row // 128 * 2 + block // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert found[place] == scale[row, block]


def test_the_engine_says_why() -> None:
    assert engine(TENSOR, TENSOR, torch.device("cpu")) == (
        False,
        "emulated: torch multiplies fp8 on CUDA devices, and this is cpu",
    )
    ampere, ada, hopper, blackwell = (8, 0), (8, 9), (9, 0), (10, 0)
    runs: dict[tuple[Scaling, Scaling], list[tuple[int, int]]] = {
        (TENSOR, TENSOR): [ada, hopper, blackwell],
        (ROW, ROW): [hopper, blackwell],
        (TILE, BLOCK): [hopper],
        (TILE, TILE): [hopper],
        (BLOCK, BLOCK): [],
        (MX, MX): [blackwell],
        (NV, NV_BLOCK): [blackwell],
        (NV, MX): [],
        (TENSOR, ROW): [],
    }
    for pair, capable in runs.items():
        for capability in (ampere, ada, hopper, blackwell):
            found = _engine(*pair, capability)
            assert found.is_hardware == (capability in capable)
            assert found.why.startswith("hardware" if found.is_hardware else "emulated")
