"""The functions that keep less for backward equal PyTorch's own compositions, forward and backward, in float64;
and they keep what the planner counts."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from trainwright.train.data import IGNORED
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.model.functions import ACTIVATIONS, gated, rms_norm

BOUND = 1e-12


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


def check(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=BOUND, atol=BOUND)
    upstream = torch.randn_like(ours)
    pairs = zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    )
    for mine, expected in pairs:
        torch.testing.assert_close(mine, expected, rtol=BOUND, atol=BOUND)


def saved_bytes(function: Callable[[], torch.Tensor]) -> int:
    """Bytes of all tensors that autograd keeps for the backward of `function`."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storages.values())


def test_rms_norm() -> None:
    x, weight = draw(3, 7, 32), draw(32, seed=1)
    check(rms_norm(x, weight, 1e-5), F.rms_norm(x, (32,), weight, 1e-5), [x, weight])
    assert saved_bytes(lambda: rms_norm(x, weight, 1e-5)) == 8 * (3 * 7 * 32 + 32 + 3 * 7)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gated(name: str) -> None:
    gate, up, activation = draw(5, 24), draw(5, 24, seed=1), ACTIVATIONS[name]
    check(gated(gate, up, activation), activation(gate) * up, [gate, up])
    assert saved_bytes(lambda: gated(gate, up, activation)) == 8 * 2 * 5 * 24


def test_loss() -> None:
    logits, targets = draw(2, 9, 40), torch.randint(40, (2, 9))
    targets[0, 3] = IGNORED
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    check(summed_cross_entropy(logits, targets), theirs, [logits])


def test_loss_of_nothing_is_zero() -> None:
    logits, targets = draw(1, 4, 8), torch.full((1, 4), IGNORED)
    loss = summed_cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 0
    assert not gradient.any()


def test_loss_of_large_logits_is_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], dtype=torch.float64, requires_grad=True)
    loss = summed_cross_entropy(logits, torch.tensor([[1]]))
    assert float(loss.detach()) == pytest.approx(2e4)


def test_low_precision_is_computed_in_fp32() -> None:
    logits = draw(1, 64, 512).detach().float()
    targets = torch.randint(512, (1, 64))
    rounded = logits.bfloat16()
    assert summed_cross_entropy(rounded, targets) == pytest.approx(
        float(F.cross_entropy(rounded.float()[0], targets[0], reduction="sum")), rel=1e-6
    )
    x, weight = draw(8, 64).detach().bfloat16(), torch.ones(64).bfloat16()
    expected = F.rms_norm(x.float(), (64,), weight.float(), 1e-5).bfloat16()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
