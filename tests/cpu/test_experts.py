"""Mixtures of experts by hand: capacity, loads, the loss for balance, kernels, counts."""

import pytest
import torch
from example import example_batches, example_run, plain_model
from parity_moe import BIASES, DEEPSEEK, QWEN, case
from torch import nn

from trainwright.spec.model import MoeMlp
from trainwright.spec.run import Run
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.model.experts import MixtureOfExperts, _AddedUp, mixtures, set_routing
from trainwright.train.model.initialize import initial_value
from trainwright.train.model.layers import mlp_of
from trainwright.train.model.routing import chosen_experts, moved_bias, within_capacity
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.dispatch import _PutBack
from trainwright.train.parallel.recompute import apply_recompute


def moe_run(mlp: dict | None = None, recipe: dict | None = None) -> Run:
    return example_run(**case(mlp, recipe)).check()


def mixture_of(run: Run, dtype: torch.dtype) -> MixtureOfExperts:
    """One mixture whose weights all matter."""
    torch.manual_seed(0)
    mixture = mlp_of(run.model, run.model.layers[-1].mlp).to(dtype)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert isinstance(mixture, MixtureOfExperts)
    return mixture


def test_capacity_takes_the_first_of_each_sequence() -> None:
    mlp = MoeMlp(num_experts=2, top_k=1, d_ff=8)
    chosen = torch.tensor([[0, 0, 0, 1], [1, 0, 1, 0]])
    marks_BSX = torch.stack([chosen == 0, chosen == 1], dim=-1)
    none_before = torch.zeros(2, 2, dtype=torch.int64)
    kept = within_capacity(marks_BSX, none_before, 4, 1.0, mlp)  # two of four tokens
    assert kept[0, :, 0].tolist() == [True, True, False, False]
    assert kept[0, :, 1].tolist() == [False, False, False, True]
    assert kept[1].equal(marks_BSX[1])
    # Second halves, told of the first.
    earlier = marks_BSX[:, :2].sum(1)
    assert within_capacity(marks_BSX[:, 2:], earlier, 4, 1.0, mlp).equal(kept[:, 2:])
    # 4 * 0.6 / 2 = 1.2 is two, rounded up.
    assert within_capacity(marks_BSX, none_before, 4, 0.6, mlp).equal(kept)


def test_what_is_dropped_does_not_depend_on_the_micro_batch() -> None:
    run = moe_run(DEEPSEEK, {"capacity_factor": 0.5})
    mixture = mixture_of(run, torch.float64)
    x_BSD = torch.randn(4, 16, 32, dtype=torch.float64)
    dropless = mixture(x_BSD)
    mixture.capacity_factor = 0.5
    together = mixture(x_BSD)
    assert (together - dropless).abs().max() > 1e-3
    alone = torch.cat([mixture(each[None]) for each in x_BSD])
    assert torch.allclose(together, alone, rtol=0, atol=1e-13)


def test_groups_without_a_balance_bias_are_as_good_as_their_best_expert() -> None:
    scores = torch.tensor([[[0.5, 0.0, 0.4, 0.3]]])
    fields = {"num_experts": 4, "top_k": 2, "d_ff": 8, "num_groups": 2, "top_groups": 1}
    assert chosen_experts(scores, None, MoeMlp(**fields)).tolist() == [[[0, 1]]]
    two_best = MoeMlp(**fields, balance_bias=True)
    assert chosen_experts(scores, torch.zeros(4), two_best).tolist() == [[[2, 3]]]


def test_the_bias_goes_against_the_load() -> None:
    moved = moved_bias(torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([8, 0, 4, 4]), 0.25)
    assert moved.tolist() == [-0.25, 0.75, 0.0, 0.0]


def test_recomputation_counts_no_token_twice() -> None:
    run = moe_run(DEEPSEEK, {"recompute": "full"})
    model = plain_model(run, torch.float64)
    apply_recompute(model, run.recipe)
    inputs, targets = example_batches(run)[0]
    model.eval()
    with torch.no_grad():
        model(inputs[None])
    model.train()
    assert all(not mixture.load_X.any() for _, mixture in mixtures(model)), "only training moves the bias"
    summed_cross_entropy(model(inputs[None]), targets[None]).backward()
    assert [int(mixture.load_X.sum()) for _, mixture in mixtures(model)] == [16 * 3] * 3


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_loss_for_balance_is_that_of_the_paper(router: str) -> None:
    """Equations 17 to 20 written out, and their gradient against the one that a layer sends into itself."""
    run = moe_run({"router": router, "normalize_top_k": False}, {"balance_loss": 0.7})
    mixture = mixture_of(run, torch.float64)
    x_BSD = torch.randn(2, 16, 32, dtype=torch.float64)

    def gradients(*, of_paper: bool) -> list[torch.Tensor]:
        mixture.zero_grad()
        mixture.loss_weight = 0.0 if of_paper else 0.7 / 8
        loss = mixture(x_BSD).square().sum()
        if of_paper:
            logits = x_BSD @ mixture.router.weight.T
            for logits_SX in logits:
                s = logits_SX.softmax(-1) if router == "softmax" else logits_SX.sigmoid()
                chosen = s.topk(2, dim=-1).indices
                f = torch.stack([(chosen == expert).sum() for expert in range(8)]) * 8 / (2 * 16)
                p = (s / s.sum(-1, keepdim=True)).mean(0)
                loss = loss + 0.7 / 8 * (f * p).sum()
        loss.backward()
        return [each.grad for each in mixture.parameters() if each.grad is not None]

    expected, seen = gradients(of_paper=True), gradients(of_paper=False)
    assert len(expected) == len(seen) == 4
    for one, other in zip(expected, seen, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)
    mixture.zero_grad()
    mixture.loss_weight = 0.0
    mixture(x_BSD).square().sum().backward()
    assert float((mixture.router.weight.grad - expected[0]).abs().max()) > 1e-4, "the loss must be seen"


@pytest.mark.parametrize("mlp", [{}, DEEPSEEK, QWEN, BIASES], ids=["plain", "deepseek", "qwen", "biases"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_grouped_matmuls_are_sequential_ones(mlp: dict, dtype: torch.dtype, bound: float) -> None:
    run = moe_run(mlp)
    mixture = mixture_of(run, dtype)
    x_BSD = torch.randn(2, 16, 32).to(dtype)
    seen = []
    for name in ("grouped", "sequential"):
        set_routing(mixture, run.recipe.changed(expert_matmuls=name))
        mixture.zero_grad()
        output = mixture(x_BSD)
        output.backward(torch.ones_like(output))
        seen.append([output.detach(), *(each.grad for each in mixture.parameters())])
    for one, other in zip(*seen, strict=True):
        assert float((one - other).norm() / other.norm().clamp(min=1e-6)) < bound


@pytest.mark.parametrize(("choice", "grouped"), [("grouped", 3), ("sequential", 0)])
def test_the_kernel_is_the_one_that_was_asked_for(
    choice: str, grouped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, kernel = [], nn.functional.grouped_mm

    def counted(*given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return kernel(*given, **named)

    monkeypatch.setattr(nn.functional, "grouped_mm", counted)
    run = moe_run(recipe={"expert_matmuls": choice})
    mixture = mixture_of(run, torch.float32)
    set_routing(mixture, run.recipe)
    mixture(torch.randn(2, 16, 32))
    assert len(calls) == grouped


@pytest.mark.parametrize("mlp", [{}, DEEPSEEK, QWEN, BIASES], ids=["plain", "deepseek", "qwen", "biases"])
def test_parameters_are_those_of_the_spec(mlp: dict) -> None:
    run = moe_run(mlp)
    model = Transformer(run.model)
    # The balance bias is a buffer, as no gradient moves it; the spec counts it, as published checkpoints do.
    counted = sum(each.numel() for each in model.parameters())
    biases = sum(mixture.mlp.num_experts for _, mixture in mixtures(model) if mixture.balance_bias is not None)
    assert counted + biases == run.model.params


def test_initial_weights_of_experts() -> None:
    run = moe_run(DEEPSEEK)
    model = plain_model(run, torch.float64)
    experts = model.get_submodule("layers.1.mlp.experts")
    deviations = {name: float(each.detach().std()) for name, each in experts.named_parameters()}
    assert deviations["up"] == pytest.approx(0.02, rel=0.05)
    assert deviations["gate"] == pytest.approx(0.02, rel=0.05)
    assert deviations["down"] == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert float(model.get_parameter("layers.1.mlp.shared.down.weight").detach().std()) == pytest.approx(
        0.02 / 8**0.5, rel=0.1
    )
    name = "layers.1.mlp.experts.up"
    again = initial_value(run.model, 0, name, model.get_parameter(name).shape, torch.float64)
    assert again.equal(model.get_parameter(name))
    assert not again[0].equal(again[1])


def test_rows_are_added_up_and_put_back_as_pytorch_does_it() -> None:
    """To the bit, forward and backward, though no rows are kept."""
    row_RD = torch.randn(12, 5, requires_grad=True)
    place_R, order_R = torch.randint(4, (12,)), torch.randperm(12)
    for ours, theirs in (
        (_AddedUp.apply(row_RD, place_R, 4), torch.zeros(4, 5).index_add(0, place_R, row_RD)),
        (_PutBack.apply(row_RD, order_R), torch.zeros(12, 5).index_copy(0, order_R, row_RD)),
    ):
        assert torch.equal(ours, theirs)  # pyright: ignore[reportArgumentType]
        upstream = torch.randn_like(theirs)
        gradients = [torch.autograd.grad(each, row_RD, upstream)[0] for each in (ours, theirs)]  # pyright: ignore[reportArgumentType]
        assert torch.equal(*gradients)
