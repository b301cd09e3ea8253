"""Masks are fair, differ wherever they should, and are the same for whoever draws them."""

import pytest
import torch

from trainwright.train.model.dropout import Dropping, unfused_core
from trainwright.train.model.layers import attention_core

RATE = 0.25


def dropping(*samples: int, seed: int = 0, sequence_part: int = 0, head_part: int = 0) -> Dropping:
    return Dropping(RATE, seed, torch.tensor(samples), sequence_part, head_part)


def test_a_value_is_dropped_at_the_rate_or_scaled() -> None:
    x = torch.ones(4, 128, 64, dtype=torch.float64)
    seen = dropping(0, 1, 2, 3).branch(0, "mlp", x)
    assert set(seen.unique().tolist()) == {0.0, 1 / (1 - RATE)}
    # 32,768 draws: the share's standard deviation is 0.0024. Along each dim by itself, too.
    assert float((seen == 0).double().mean()) == pytest.approx(RATE, abs=0.01)
    for dim in range(3):
        others = [each for each in range(3) if each != dim]
        share = (seen == 0).double().mean(others)
        deviation = (RATE * (1 - RATE) / (x.numel() / x.shape[dim])) ** 0.5
        assert float((share - RATE).abs().max()) < 5 * deviation


def test_masks_differ_by_seed_sequence_layer_and_place_alone() -> None:
    x = torch.ones(1, 64, 32)
    masks = [
        dropping(0).branch(0, "mlp", x),
        dropping(0, seed=1).branch(0, "mlp", x),
        dropping(1).branch(0, "mlp", x),
        dropping(0).branch(1, "mlp", x),
        dropping(0).branch(0, "attention", x),
        dropping(0).weights(0, x.unsqueeze(0)[:, :, :32])[0],
    ]
    for at, one in enumerate(masks[:-1]):
        assert torch.equal(one, dropping(0).branch(0, "mlp", x)) == (at == 0)
    same = 1 - 2 * RATE * (1 - RATE)  # of two independent masks
    for at, one in enumerate(masks):
        for other in masks[at + 1 :]:
            agree = float((one[:, :32] == other[:, :32]).double().mean())
            assert agree == pytest.approx(same, abs=0.07)


def test_parts_are_parts_of_the_whole() -> None:
    x = torch.ones(2, 8, 6)
    whole = dropping(5, 9).branch(2, "mlp", x)
    for part in range(2):
        mine = dropping(5, 9, sequence_part=part).branch(2, "mlp", x[:, :4])
        assert torch.equal(mine, whole[:, 4 * part : 4 * part + 4])
    weights = torch.ones(2, 4, 8, 8)
    every = dropping(5, 9).weights(2, weights)
    for part in range(2):
        mine = dropping(5, 9, head_part=part).weights(2, weights[:, :2])
        assert torch.equal(mine, every[:, 2 * part : 2 * part + 2])
    assert torch.equal(dropping(9).branch(2, "mlp", x[:1]), whole[1:])


@pytest.mark.parametrize("window", [None, 3, 100])
def test_unfused_attention_is_flash_attention(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 9, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )
    for scale in (None, 0.3):
        seen, expected = (core(query, key, value, window, scale) for core in (unfused_core, attention_core))
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)
