"""A backward in two acts: what each act gives, and what is held in between."""

import weakref

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from trainwright.train.parallel.weight_gradients import WeightGradients


def leaves() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5), (7, 5), (7,), (4, 7))
    x, up, bias, down = (torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes)
    return x.requires_grad_(), up.requires_grad_(), bias.requires_grad_(), down.requires_grad_()


def block(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, up, bias).sin(), down)


def test_input_gradients_come_first_and_weight_gradients_later() -> None:
    whole, split = leaves(), leaves()
    y = block(*whole)
    y.backward(torch.ones_like(y))
    later = WeightGradients()
    with later:
        y = block(*split)
        y.backward(torch.ones_like(y))
    assert torch.equal(split[0].grad, whole[0].grad)  # type: ignore[arg-type]
    assert all(each.grad is None for each in split[1:])
    later.compute()
    for one, other in zip(split, whole, strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_between_the_acts_only_inputs_of_products_are_held() -> None:
    x, up, bias, down = leaves()
    later = WeightGradients()
    with later:
        hidden = F.linear(x, up, bias)
        active = hidden.sin()
        y = F.linear(active, down)
    # What sine's backward reads, and what the second product's weight gradient reads.
    of_sine, of_product = (weakref.ref(each.untyped_storage()) for each in (hidden, active))
    edge, gradient = get_gradient_edge(y), torch.ones_like(y)
    del hidden, active, y
    assert of_sine() is not None
    with later:
        torch.autograd.backward(edge, gradient)
    del edge
    assert of_sine() is None
    assert of_product() is not None
    later.compute()
    assert of_product() is None


def test_a_recomputed_block_is_computed_again_once() -> None:
    whole, split, calls = leaves(), leaves(), []

    def counted(*tensors: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return block(*tensors)

    y = block(*whole)
    y.backward(torch.ones_like(y))
    later = WeightGradients()
    with later:
        y = checkpoint(counted, *split, use_reentrant=True, preserve_rng_state=False)
        y.backward(torch.ones_like(y))
    assert calls == [False, True]
    later.compute()
    assert calls == [False, True]
    for one, other in zip(split, whole, strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_what_needs_no_split_is_as_it_was() -> None:
    x, up, *_ = leaves()
    later = WeightGradients()
    with later:
        tokens = F.linear(x.detach(), up)
        with torch.no_grad():
            F.linear(x, up)
    tokens.sum().backward()
    assert up.grad is not None
    later.compute()
