"""Matrices with scales against loops over blocks in numpy and ml_dtypes, bit for bit; their edges, their other
dim, what isn't finite, and what a single large value does to the values around it."""

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from trainwright.spec.precision import LOW_PRECISION
from trainwright.train.precision import blocks, quantized
from trainwright.train.precision.formats import E2M1, E4M3, E5M2, NumberFormat, unpacked
from trainwright.train.precision.hadamard import matrix, transformed
from trainwright.train.precision.noise import Noise
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
    block_amax,
    quantize,
)
from trainwright.train.precision.rates import counts
from trainwright.train.precision.recipes import RECIPES, Operand

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
KINDS: dict[str, tuple[NumberFormat, Scaling]] = {
    "tensor": (E4M3, TENSOR),
    "tensor of gradients": (E5M2, TENSOR),
    "row": (E4M3, ROW),
    "tile": (E4M3, TILE),
    "block": (E4M3, BLOCK),
    "mx": (E4M3, MX),
    "mx, rounded down": (E4M3, replace(MX, rule="e8m0_floor")),
    "nv": (E2M1, NV),
    "nv block": (E2M1, NV_BLOCK),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def heavy(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Student's t with two degrees of freedom: a few values are a hundred times as large as most."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(2, (rows, columns))).to(dtype)


def slow(x: torch.Tensor, form: NumberFormat, scaling: Scaling) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes, one a byte; decoding scales, fp32; and the tensor's scale: block by block, by the rules of
    scales.py."""
    values = x.float().numpy()
    rows, columns = values.shape
    height, width = scaling.rows or rows, scaling.columns or columns
    codes = np.zeros(values.shape, np.uint8)
    kept = np.zeros((math.ceil(rows / height), math.ceil(columns / width)), np.float32)
    largest, one = np.float32(form.largest), np.float32(1)
    whole = np.float32(form.largest * 448) / np.abs(values).max()
    for i, j in np.ndindex(*kept.shape):
        place = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        amax = np.abs(values[place]).max()
        if scaling.rule == "fp32":
            encoding = largest / amax
            kept[i, j] = one / encoding
        elif scaling.rule == "e4m3":
            share = np.minimum(amax * (whole * (one / largest)), np.float32(448))
            kept[i, j] = share.astype(ml_dtypes.float8_e4m3fn)
            encoding = one / (kept[i, j] / whole) if kept[i, j] else np.float32(0)
        else:
            power = math.frexp(float(amax))[1] - math.frexp(form.largest)[1]
            if (
                scaling.rule != "e8m0_floor"
                and Fraction(float(amax)) > Fraction(form.largest) * Fraction(2) ** power
            ):
                power += 1
            kept[i, j], encoding = 2.0**power, np.float32(2.0**-power)
        scaled = np.clip(values[place] * encoding, -largest, largest)
        codes[place] = scaled.astype(ORACLE[form.name]).view(np.uint8)
    return codes, kept, one / whole


def codes_in(quantized: Quantized) -> np.ndarray:
    if quantized.format is E2M1:
        return unpacked(quantized.values)[..., : quantized.columns].numpy().astype(np.uint8)
    return quantized.values.contiguous().view(torch.uint8).numpy()


@EACH
@pytest.mark.parametrize("shape", [(64, 256), (37, 150), (131, 259), (1, 7), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_and_scales_are_those_of_loops_over_blocks(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    form, scaling = KINDS[kind]
    for seed in range(3):
        x = heavy(*shape, seed, dtype)
        x[: shape[0] // 2, : shape[1] // 2] *= (1, 1, 1e-8)[
            seed
        ]  # so far below the rest that E4M3 scales become 0
        quantized = quantize(x, form, scaling)
        codes, kept, whole = slow(x, form, scaling)
        assert np.array_equal(codes_in(quantized), codes)
        assert np.array_equal(quantized.scale.float().numpy(), kept)
        assert quantized.shape == shape
        meant = codes.view(ORACLE[form.name]).astype(np.float64)
        meant *= np.repeat(np.repeat(kept, scaling.rows or shape[0], 0), scaling.columns or shape[1], 1)[
            : shape[0], : shape[1]
        ]
        if scaling.rule == "e4m3":
            assert quantized.tensor_scale is not None
            assert quantized.tensor_scale.item() == whole
        if scaling.rule != "fp32":
            assert quantized.operand().dtype == torch.bfloat16
            assert np.array_equal(quantized.operand().double().numpy(), meant)  # exact in bf16
        if quantized.tensor_scale is not None:
            meant *= np.float64(whole)
        assert np.array_equal(quantized.dequantize().numpy(), meant.astype(np.float32))


@EACH
def test_the_other_dim_is_the_transposed_view(kind: str) -> None:
    form, scaling = KINDS[kind]
    for shape in ((96, 256), (45, 131)):
        x = heavy(*shape, 1)
        for noise in (None, Noise(1, 2, 3)) if form is E2M1 else (None,):
            view, copy = (quantize(each, form, scaling, noise=noise) for each in (x.mT, x.mT.contiguous()))
            assert view.shape == copy.shape == (shape[1], shape[0])
            assert torch.equal(view.values.view(torch.uint8), copy.values.view(torch.uint8))
            assert torch.equal(view.scale.float(), copy.scale.float())
            assert torch.equal(view.dequantize(), copy.dequantize())
            assert torch.equal(view.operand(), copy.operand())


@pytest.mark.parametrize("kind", ["tensor", "block", "nv block"])
def test_a_square_block_serves_both_dims(kind: str) -> None:
    form, scaling = KINDS[kind]
    x = heavy(75, 150, 2)
    once, twice = quantize(x, form, scaling).transposed(), quantize(x.mT, form, scaling)
    assert once.shape == twice.shape
    assert np.array_equal(codes_in(once), codes_in(twice))
    assert torch.equal(once.dequantize(), twice.dequantize())
    assert torch.equal(once.transposed().dequantize(), quantize(x, form, scaling).dequantize())
    with pytest.raises(ValueError, match="blocks of 1 x 128 aren't square"):
        quantize(x, E4M3, TILE).transposed()


@EACH
def test_a_stack_is_its_matrices_and_zeros_beyond_an_edge_change_nothing(kind: str) -> None:
    form, scaling = KINDS[kind]
    matrices = [heavy(20, 90, seed) for seed in range(3)]
    for stack in (torch.stack(matrices), torch.stack([each.mT.contiguous() for each in matrices]).mT):
        together = quantize(stack, form, scaling)
        for number, each in enumerate(matrices):
            alone = quantize(each, form, scaling)
            assert torch.equal(together[number].dequantize(), alone.dequantize())
            assert torch.equal(together.dequantize()[number], alone.dequantize())
    padded = torch.nn.functional.pad(matrices[0], (0, 38, 0, 108))
    whole = quantize(padded, form, scaling).dequantize()
    assert torch.equal(whole[:20, :90], quantize(matrices[0], form, scaling).dequantize())
    assert not whole[20:].any()


@EACH
def test_large_matrices_are_as_small_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rounded piece by piece."""
    form, scaling = KINDS[kind]
    x = heavy(300, 270, 9)
    stack = torch.stack((x, -3 * x, x.roll(7, 0)))
    matrices = (x, x.mT, stack, stack.mT.contiguous().mT)
    noises = (None, Noise(1, 2, 3)) if form is E2M1 else (None,)

    def found() -> list[torch.Tensor]:
        each = [quantize(matrix, form, scaling, noise=noise) for matrix in matrices for noise in noises]
        amaxes = [block_amax(matrix, scaling) for matrix in matrices]
        seen = [counts(matrix, quantize(matrix, form, scaling)).overflow for matrix in matrices]
        return [*(q.operand() for q in each), *(q.dequantize() for q in each), *amaxes, *seen]

    whole = found()
    for module in (blocks, quantized):
        monkeypatch.setattr(module, "PIECE_VALUES", 5000)
    assert len(blocks.pieces(x, scaling.size)) > (1 if scaling.rows == 128 else 10)
    for one, other in zip(whole, found(), strict=True):
        assert torch.equal(one, other)
    assert blocks.is_transposed(quantize(x.mT, form, scaling).values) or form is E2M1


@EACH
def test_zeros_and_what_is_not_finite(kind: str) -> None:
    form, scaling = KINDS[kind]
    zeros = quantize(torch.zeros(4, 256), form, scaling)
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 256))
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = heavy(4, 256, 3)
        x[1, 5] = bad
        quantized = quantize(x, form, scaling)
        found = quantized.dequantize()
        scale = quantized.scale if quantized.tensor_scale is None else quantized.tensor_scale
        assert scale.float()[1 // (scaling.rows or 4) if scale.shape[0] > 1 else 0, 0].isnan()
        height, width = scaling.rows or 4, scaling.columns or 256
        if scaling.rule == "e4m3":
            height, width = 4, 256  # its tensor's scale is NaN
        is_hit = (torch.arange(4)[:, None] // height == 1 // height) & (torch.arange(256) // width == 0)
        assert torch.equal(found.isnan(), is_hit)


@EACH
def test_tiny_and_huge_values(kind: str) -> None:
    form, scaling = KINDS[kind]
    for size in (1e-36, 1e-30, 1e30, 3e38):
        x = heavy(8, 256, 4, torch.float32)
        x *= size / x.abs().max()
        error = (quantize(x, form, scaling).dequantize() - x).abs().max() / x.abs().max()
        assert float(error) <= form.half_step * 1.01


def test_scales_of_the_past_saturate() -> None:
    x = torch.tensor([[1.0, -8.0, 4.0, torch.inf]])
    past = torch.tensor([[4.0]])
    for scaling in (TENSOR, ROW):
        found = quantize(x, E4M3, scaling, amax=past)
        top = float(448 * found.scale)
        assert found.dequantize().tolist() == [[1.0, -top, 4.0, top]]
        same = quantize(x, E4M3, scaling, scale=found.scale)
        assert torch.equal(same.dequantize(), found.dequantize())
    assert quantize(x, E4M3, TENSOR, amax=past * torch.inf).dequantize().isnan().all()
    # NVFP4's is the tensor's: as of a matrix that other ranks have larger parts of.
    half, whole = heavy(16, 64, 5), torch.cat((heavy(16, 64, 5), 100 * heavy(16, 64, 6)))
    part = quantize(half, E2M1, NV, amax=whole.abs().max().float().view(1, 1))
    assert torch.equal(part.dequantize(), quantize(whole, E2M1, NV).dequantize()[:16])


def test_block_amax() -> None:
    x = heavy(37, 150, 7)
    for _, scaling in KINDS.values():
        height, width = scaling.rows or 37, scaling.columns or 150
        amax = block_amax(x, scaling)
        assert torch.equal(block_amax(x.mT.contiguous().mT, scaling), amax)
        for i, j in np.ndindex(*amax.shape):
            block = x[i * height : (i + 1) * height, j * width : (j + 1) * width]
            assert amax[i, j] == block.abs().max()


@pytest.mark.parametrize("kind", ["tile", "block", "mx", "row", "tensor"])
def test_an_outlier_stays_in_its_block(kind: str) -> None:
    """What a value that is a million times too large does to the others: nothing outside its block. Per tensor, it
    does: nearly all others become zero, which is the negative control."""
    form, scaling = KINDS[kind]
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    planted = x.clone()
    planted[130, 200] = 1e6
    before, after = (quantize(each, form, scaling).dequantize() for each in (x, planted))
    height, width = scaling.rows or 256, scaling.columns or 512
    outside = (torch.arange(256)[:, None] // height != 130 // height) | (
        torch.arange(512) // width != 200 // width
    )
    assert torch.equal(after[outside], before[outside])
    lost = float((after == 0).double().mean())
    if scaling == TENSOR:
        assert not outside.any()
        assert lost > 0.95
    else:
        assert outside.any()
        assert lost <= 1.05 * (height * width) / x.numel()


@EACH
def test_counts_of_overflow_and_underflow(kind: str) -> None:
    form, scaling = KINDS[kind]
    x = heavy(40, 256, 8) ** 3
    x[0, :7] = 0
    found = quantize(x, form, scaling)
    seen = counts(x, found)
    assert seen.values == x.numel()
    assert seen.amax == x.abs().max()
    dequantized = found.dequantize()
    assert seen.underflow == ((dequantized == 0) & (x != 0)).sum()
    assert seen.underflow > 0
    # Own amaxes leave nothing to saturate, but where the scale is rounded down (an E4M3 scale that is far below
    # the largest block's has few bits).
    assert (seen.overflow > 0) == (kind in ("mx, rounded down", "nv"))
    if scaling.rule in ("fp32", "power_of_two"):
        scale = found.scale / 8
        saturated = quantize(x, form, scaling, scale=scale)
        spread = scale.repeat_interleave(scaling.rows or 40, 0).repeat_interleave(scaling.columns or 256, 1)
        top = form.largest + form.half_step * 2.0 ** math.floor(math.log2(form.largest))
        beyond = x.double().abs() > top * spread[:40, :256].double()
        assert abs(counts(x, saturated).overflow - beyond.sum()) <= 1
        assert beyond.any()


def test_a_block_whose_scale_is_zero_underflows() -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    x[3, 16:32] *= 1e-9
    seen = counts(x, quantize(x, E2M1, NV))
    assert seen.overflow == 0
    assert seen.underflow >= 16


def test_hadamard_spreads_and_leaves_products() -> None:
    transform = torch.from_numpy(matrix(3)).double()
    assert torch.equal(transform @ transform.mT, torch.eye(16, dtype=torch.float64))
    assert not np.array_equal(matrix(3), matrix(4))
    assert np.array_equal(matrix(3), matrix(3))
    x, y = torch.randn(7, 90, dtype=torch.float64), torch.randn(5, 90, dtype=torch.float64)
    left, right = transformed(x, 3), transformed(y, 3)
    assert left.shape == (7, 96)
    assert torch.allclose(left @ right.mT, x @ y.mT, rtol=1e-12, atol=1e-12)
    for columns in (90, 80):
        view = x[:, :columns].mT.contiguous().mT
        assert torch.allclose(transformed(view, 3), transformed(x[:, :columns], 3), rtol=1e-12, atol=1e-12)
        assert transformed(view, 3).mT.is_contiguous()
    spike = torch.zeros(1, 32)
    spike[0, 3] = 8.0
    assert transformed(spike, 0).abs().tolist() == [[2.0] * 16 + [0.0] * 16]


def nbytes(quantized: Quantized) -> int:
    kept = [quantized.values, quantized.scale]
    return sum(each.numel() * each.element_size() for each in kept)


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_that_the_planner_counts(name: str) -> None:
    low, operands = LOW_PRECISION[name], RECIPES[name]
    x = torch.randn(300, 420).bfloat16()
    for operand, fact in (
        (operands.fprop_input, low.activation),
        (operands.fprop_weight, low.weight),
        (operands.dgrad_gradient, low.gradient),
    ):
        quantized = operand.quantized(x)
        alone = 4 if fact.is_per_tensor else 0  # the planner leaves out numbers that stand for a whole tensor
        assert nbytes(quantized) == fact.num_bytes(420, 300) + alone


def described(operand: Operand) -> str:
    scaling = operand.scaling
    marks = [scaling.rule, *(["stochastic"] * operand.is_stochastic), *(["hadamard"] * operand.is_transformed)]
    return f"{operand.format.name} {scaling.rows}x{scaling.columns} {' '.join(marks)}"


def test_recipes_are_those_of_their_sources() -> None:
    """Input, weight and gradient where they are the same in both of their products; NVFP4's six."""
    hybrid = ["e4m3 NonexNone fp32", "e4m3 NonexNone fp32", "e5m2 NonexNone fp32"]
    meant = {
        "fp8-delayed": hybrid,
        "fp8-current": hybrid,
        "fp8-rowwise": ["e4m3 1xNone power_of_two"] * 3,
        "fp8-block": ["e4m3 1x128 power_of_two", "e4m3 128x128 power_of_two", "e4m3 1x128 power_of_two"],
        "mxfp8": ["e4m3 1x32 e8m0"] * 3,
    }
    for name, (activation, weight, gradient) in meant.items():
        found = RECIPES[name]
        assert described(found.fprop_input) == described(found.wgrad_input) == activation
        assert described(found.fprop_weight) == described(found.dgrad_weight) == weight
        assert described(found.dgrad_gradient) == described(found.wgrad_gradient) == gradient
    nvfp4 = RECIPES["nvfp4"]
    assert described(nvfp4.fprop_input) == "e2m1 1x16 e4m3"
    assert described(nvfp4.wgrad_input) == "e2m1 1x16 e4m3 hadamard"
    assert described(nvfp4.fprop_weight) == described(nvfp4.dgrad_weight) == "e2m1 16x16 e4m3"
    assert described(nvfp4.dgrad_gradient) == "e2m1 1x16 e4m3 stochastic"
    assert described(nvfp4.wgrad_gradient) == "e2m1 1x16 e4m3 stochastic hadamard"


def test_which_quantizations_serve_twice() -> None:
    for name, operands in RECIPES.items():
        weight = operands.fprop_weight.serves(operands.dgrad_weight)
        activation = operands.fprop_input.serves(operands.wgrad_input)
        gradient = operands.dgrad_gradient.serves(operands.wgrad_gradient)
        per_tensor = name in ("fp8-delayed", "fp8-current")
        assert (weight, activation, gradient) == (
            per_tensor or name in ("fp8-block", "nvfp4"),
            per_tensor,
            per_tensor,
        )
    assert not Operand(E2M1, NV_BLOCK, is_stochastic=True).serves(Operand(E2M1, NV_BLOCK))


def test_fp32_scales_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32 scales are of whole rows"):
        Scaling(1, 128, "fp32")
