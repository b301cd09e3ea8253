"""Codes of shards, put together, are those of the whole weight to the bit, wherever shards cut blocks.

The ranks' agreement is a maximum, which is taken here in their place. That runs step alike is in the parity cases
(`parity_precision.py`), and that counts are the planner's in `test_exact.py`.
"""

from typing import Any

import pytest
import torch

from trainwright.train.clock import Clock
from trainwright.train.precision.arithmetic import Arithmetic, UnderWay
from trainwright.train.precision.gathered import Agreement, GatheredWeight, Shard
from trainwright.train.precision.largest import Current, Delayed
from trainwright.train.precision.quantized import Quantized
from trainwright.train.precision.shared import HeldWeight

SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "whole blocks": ((256, 192), 0, 2),
    "cut blocks": ((160, 300), 0, 3),
    "a rank without rows": ((5, 64), 0, 4),
    "experts": ((4, 130, 70), 0, 2),
    "experts' rows": ((3, 260, 70), 1, 2),
    "experts' columns": ((3, 70, 260), 2, 2),
}
"""The weight, the dim that is cut, and by how many ranks."""


def arithmetic_of(precision: Any) -> Arithmetic:
    largest: Any = Current({}, Clock())
    if precision == "fp8-delayed":
        largest = Delayed(4, largest, torch.device("cpu"))
    return Arithmetic("layer", precision, largest, UnderWay())


def gathered(weight: torch.Tensor, dim: int, ranks: int, precision: str) -> tuple[Quantized, list[GatheredWeight]]:
    """What a rank has after a gather, and all ranks' weights."""
    each = -(-weight.shape[dim] // ranks)
    padded = torch.Size([each if at == dim else size for at, size in enumerate(weight.shape)])
    agreement, members = Agreement((), Clock()), []
    for rank in range(ranks):
        start = min(rank * each, weight.shape[dim])
        values = weight.narrow(dim, start, min(each, weight.shape[dim] - start)).contiguous()
        member = GatheredWeight(arithmetic_of(precision), HeldWeight(holds=True), agreement)
        member.place(Shard(values, weight.shape, dim, start, padded, torch.bfloat16))
        members.append(member)
    amax = torch.stack([member.own_amax() for member in members]).amax(0)
    agreement._is_reached = True
    for member in members:
        member.agreed(amax.flatten())
    codes = [member.codes() for member in members]
    assert {part.shape for part in codes} == {padded}
    members[0].arrived(torch.cat(codes, dim).contiguous())
    held = members[0]._held.gathered
    assert held is not None
    return held, members


@pytest.mark.parametrize("precision", ["fp8-current", "fp8-delayed", "fp8-block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_shards_are_those_of_the_whole(shape: str, precision: str) -> None:
    sizes, dim, ranks = SHAPES[shape]
    weight = torch.randn(sizes, generator=torch.Generator().manual_seed(7)) * 3
    weight[..., : sizes[-1] // 2] *= 2**-9
    found, _ = gathered(weight, dim, ranks, precision)
    along, across = arithmetic_of(precision).both("weight", weight.bfloat16())
    for seen, expected in ((found, along), (found.transposed(), across)):
        assert torch.equal(seen.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(seen.scale.expand(expected.scale.shape), expected.scale)


def test_a_shard_by_its_own_scales_is_seen() -> None:
    """The control: without agreement the codes are others."""
    weight = torch.randn(256, 64, generator=torch.Generator().manual_seed(7))
    weight[:128] *= 3
    found, members = gathered(weight, 0, 2, "fp8-current")
    members[1].agreed(members[1].own_amax().flatten())
    assert not torch.equal(members[1].codes(), found.values[128:].view(torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_none_on_every_rank(value: float) -> None:
    weight = torch.ones(256, 64)
    weight[3, 3] = value
    found, members = gathered(weight, 0, 2, "fp8-block")
    assert found.scale[0].isnan().all()
    assert bool(found.scale[1].isfinite().all())
    assert all(member.scale[0].isnan().all() for member in members)


def test_a_held_weight_gives_what_was_gathered() -> None:
    weight = torch.randn(64, 48)
    found, _ = gathered(weight, 0, 2, "fp8-current")
    for holds in (True, False):
        held = HeldWeight(holds=holds)
        held.gathered = found
        nothing = torch.zeros(()).expand(64, 48)
        for product, expected in (("Fprop", found), ("Dgrad", found.transposed())):
            seen = held.of(nothing, product, arithmetic_of("fp8-current"))  # pyright: ignore[reportArgumentType]
            assert torch.equal(seen.values.view(torch.uint8), expected.values.view(torch.uint8))
