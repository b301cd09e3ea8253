"""A device's own products of quantized matrices against the emulation, for every scaling that it has."""

import pytest
import torch

from trainwright.train.precision.formats import E2M1, E4M3, E5M2, NumberFormat
from trainwright.train.precision.product import by_emulation, by_hardware, engine
from trainwright.train.precision.quantized import BLOCK, MX, NV, NV_BLOCK, ROW, TENSOR, TILE, Scaling, quantize

PAIRS: dict[str, tuple[NumberFormat, Scaling, NumberFormat, Scaling]] = {
    "tensor": (E4M3, TENSOR, E4M3, TENSOR),
    "tensor of gradients": (E5M2, TENSOR, E4M3, TENSOR),
    "row": (E4M3, ROW, E4M3, ROW),
    "tile, block": (E4M3, TILE, E4M3, BLOCK),
    "tile, tile": (E4M3, TILE, E4M3, TILE),
    "mx": (E4M3, MX, E4M3, MX),
    "nv": (E2M1, NV, E2M1, NV),
    "nv, block": (E2M1, NV, E2M1, NV_BLOCK),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("shape", [(256, 512, 384), (37, 150, 45)], ids=str)
def test_hardware_and_emulation_agree(kind: str, shape: tuple[int, int, int]) -> None:
    rows, summed, columns = shape
    form, scaling, other_form, other = PAIRS[kind]
    device = torch.device("cuda")
    chosen = engine(scaling, other, device)
    if not chosen.is_hardware:
        pytest.skip(chosen.why)
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(rows, summed, generator=generator, device=device).bfloat16()
    b = torch.randn(summed, columns, generator=generator, device=device).bfloat16().mT
    one, two = quantize(a, form, scaling), quantize(b, other_form, other)
    found, emulated = by_hardware(one, two, torch.bfloat16), by_emulation(one, two, torch.bfloat16)
    # bf16's rounding of each, and of Hopper's sums of 14 bits what 512 columns lose (docs/log.md, 2026-12-01).
    assert float((found - emulated).float().norm() / emulated.float().norm()) < 2**-8
