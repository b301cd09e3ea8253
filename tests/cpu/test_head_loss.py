"""What the ways to the loss hold in memory, and their numbers in bf16."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.train.data import IGNORED
from trainwright.train.head_loss import HeadLoss
from trainwright.train.instrument import peak_bytes_of

TOKENS, WIDTH, VOCABULARY = 512, 8, 8192
LOGITS_BYTES = 4 * TOKENS * VOCABULARY


def head_input_targets(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator))
    x = torch.randn(1, TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    targets[0, :7] = IGNORED
    return head, x, targets


def peak_of(loss: HeadLoss) -> float:
    """Peak of forward and backward over what was there before, in logits."""
    head, x, targets = head_input_targets()
    gc.collect()  # what earlier tests have left would go in the middle
    before = peak_bytes_of(lambda: None, torch.device("cpu"))

    def both_ways() -> None:
        loss(head, [x], [targets], 1 / TOKENS)[0].backward()

    return (peak_bytes_of(both_ways, torch.device("cpu")) - before) / LOGITS_BYTES


def test_logits_are_held_as_the_planner_says() -> None:
    """In fp32: plain two tensors (the softmax becomes the gradient), fused one, of which a chunk is a part."""
    small = 0.3  # a block of rows and its exponential, weights and inputs
    assert 2 <= peak_of(HeadLoss()) < 2 + small
    assert 1 <= peak_of(HeadLoss(fused=True)) < 1 + 2 * small
    assert peak_of(HeadLoss(chunks=8)) < 2 / 8 + small
    assert peak_of(HeadLoss(fused=True, chunks=4)) < 1 / 4 + 2 * small


@pytest.mark.parametrize("loss", [HeadLoss(), HeadLoss(True), HeadLoss(chunks=5), HeadLoss(True, chunks=5)])
def test_bf16_is_computed_in_fp32(loss: HeadLoss) -> None:
    head, x, targets = head_input_targets(torch.bfloat16)
    objective, entropy = loss(head, [x], [targets], 0.5)
    logits = head(x).float().detach().requires_grad_()
    exact = F.cross_entropy(logits[0], targets[0], reduction="sum")
    assert float(entropy) == pytest.approx(float(exact.detach()), rel=1e-5)
    assert float(objective.detach()) == pytest.approx(0.5 * float(exact.detach()), rel=1e-5)
    d_x, d_weight = torch.autograd.grad(objective, [x, head.weight])
    (d_logits,) = torch.autograd.grad(exact, logits)
    weight_VD = head.weight.detach().float()
    for seen, expected in ((d_x, d_logits @ weight_VD), (d_weight, d_logits[0].T @ x[0].detach().float())):
        assert seen.dtype == torch.bfloat16
        # bf16 has 8 bits, and a matmul's inputs are rounded to it.
        assert float((seen.float() - 0.5 * expected).norm() / (0.5 * expected).norm()) < 1e-2


@pytest.mark.parametrize("change", [lambda x: x.tanh(), lambda x: x.exp()])
def test_logits_that_someone_keeps_are_not_written_over(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A function between head and loss that saved its result would get a wrong gradient; it gets an error."""
    head, x, targets = head_input_targets()
    bent = nn.Sequential()
    bent.forward = lambda x: change(head(x))  # type: ignore[method-assign]
    objective, _ = HeadLoss(fused=True)(bent, [x], [targets], 1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward()
