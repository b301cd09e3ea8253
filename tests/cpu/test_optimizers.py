"""AdamW with moments of few bits and Muon against PyTorch's, and what they keep."""

from collections.abc import Iterator

import pytest
import torch
from example import example_batches, example_run, part_of
from torch import nn

from trainwright.plan.predict import predict
from trainwright.spec.recipe import INT8_BLOCK, Optimizer
from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh
from trainwright.train.moments import MOMENT_FORMATS, code
from trainwright.train.optimizer import optimizer_of
from trainwright.train.parallel.local import bytes_of
from trainwright.train.parallelize import Trainer, parallelize
from trainwright.train.updates import Updates, orthogonalized


def parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (40, 16), "layers.0.mlp.up.weight": (48, 16), "layers.0.mlp_norm.weight": (16,)}
    return [(name, nn.Parameter(torch.randn(*shape, generator=generator))) for name, shape in shapes.items()]


def gradients(steps: int) -> Iterator[list[torch.Tensor]]:
    """Of three parameters, of sizes that differ by 100 inside a block."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [
            torch.randn(each.shape, generator=generator) * torch.logspace(-2, 0, each.shape[-1])
            for _, each in parameters()
        ]


def moved(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], steps: int
) -> list[torch.Tensor]:
    """By how much `steps` steps have moved each parameter."""
    before = [each.detach().clone() for _, each in named]
    for step in gradients(steps):
        for (_, parameter), gradient in zip(named, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [each.detach() - old for (_, each), old in zip(named, before, strict=True)]


@pytest.mark.parametrize(("moments", "bound"), [("bf16", 4e-3), ("int8", 6e-2)])
def test_moments_of_few_bits_move_weights_nearly_as_fp32_does(moments: str, bound: float) -> None:
    """Bounds: bf16 rounds by 2^-9, the code of 8 bits by 0.4% to 4% in its upper decade and
    twice as much in each one below, of each of two moments."""
    choice = Optimizer(lr=1e-2, weight_decay=0.1)
    one, other = parameters(), parameters()
    exact = moved(optimizer_of(choice, one, torch.float32), one, 20)
    seen = moved(optimizer_of(choice.changed(moments=moments), other, torch.float32), other, 20)
    for mine, expected in zip(seen, exact, strict=True):
        error = float((mine - expected).norm() / expected.norm())
        assert 0 < error < bound


def test_our_adamw_is_torchs_where_moments_are_whole() -> None:
    one, other = parameters(), parameters()
    choice = Optimizer(lr=1e-2)
    common = {"lr": 1e-2, "betas": (choice.beta1, choice.beta2), "eps": choice.epsilon, "moments": "fp32"}
    params = [each for _, each in other]
    groups = [
        {"params": params[:2], "rule": "adamw", "weight_decay": choice.weight_decay, **common},
        {"params": params[2:], "rule": "adamw", "weight_decay": 0.0, **common},
    ]
    exact, seen = moved(optimizer_of(choice, one, torch.float32), one, 5), moved(Updates(groups), other, 5)
    for mine, expected in zip(seen, exact, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)


def test_muon_is_torchs() -> None:
    """Matrices of layers, over steps that momentum joins; and AdamW for the rest. Both iterate in bf16."""
    one, other = parameters(), parameters()
    choice = Optimizer(name="muon", lr=1e-2, weight_decay=0.1)
    seen = moved(optimizer_of(choice, one, torch.float32), one, 4)
    matrix = other[1][1]
    theirs = torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    expected = moved(theirs, other, 4)[1]
    assert float((seen[1] - expected).norm() / expected.norm()) < 2e-2
    adamw = parameters()
    for at, exact in enumerate(moved(optimizer_of(choice.changed(name="adamw"), adamw, torch.float32), adamw, 4)):
        if at != 1:
            torch.testing.assert_close(seen[at], exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (3, 8, 8)])
def test_orthogonalized(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrix)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    # In the matrix's own directions it is diagonal, with singular values about 1.
    inner = left.mT @ found @ right.mT
    size = torch.diagonal(inner, dim1=-2, dim2=-1)
    torch.testing.assert_close(inner, torch.diag_embed(size), rtol=0, atol=1e-9)
    assert float(size.min()) > 0.6
    assert float(size.max()) < 1.3


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_code_of_int8(is_signed: bool) -> None:
    values = code(is_signed)
    assert len(set(values.tolist())) == 256
    moment = torch.cat((values * 3.0, torch.zeros(5), torch.tensor([1e-30])))
    kept = MOMENT_FORMATS["int8"].pack(moment, is_signed)
    assert [each.numel() for each in kept] == [256 + 6, 2]
    assert kept[0].dtype == torch.uint8
    again = MOMENT_FORMATS["int8"].unpack(kept, torch.float32, is_signed)
    torch.testing.assert_close(again[:INT8_BLOCK], moment[:INT8_BLOCK], rtol=1e-6, atol=0)
    assert torch.equal(again[INT8_BLOCK:-1], torch.zeros(5))
    tiny = MOMENT_FORMATS["int8"].pack(torch.tensor([1.0, 1e-12]), is_signed)
    small = float(MOMENT_FORMATS["int8"].unpack(tiny, torch.float32, is_signed)[1])
    assert (small == 0) == is_signed, "a second moment above zero must not become zero"


def trainer_of(**optimizer: object) -> Trainer:
    run = example_run(recipe={"precision": "fp32", "optimizer": {"lr": 0.01, "warmup_steps": 0, **optimizer}})
    return parallelize(run.check(), Mesh(run.layout, 0, torch.device("cpu")), Clock())


@pytest.mark.parametrize(
    ("optimizer", "slack"),
    [
        ({"moments": "bf16"}, 0.0),
        # The last block of a tensor may be short, and its scale is as long as another's.
        ({"moments": "int8"}, 0.02),
        # The planner takes a layer's norms for matrices; AdamW keeps two moments of their 64 in 7,744 values.
        ({"name": "muon"}, 0.01),
        ({"name": "muon", "moments": "bf16"}, 0.01),
    ],
)
def test_moments_are_as_large_as_the_planner_says_and_the_loss_falls(
    optimizer: dict[str, str], slack: float
) -> None:
    trainer = trainer_of(**optimizer)
    batch = part_of(trainer.run, 0, example_batches(trainer.run))
    losses = [trainer.step(batch, 0.01).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    moments = [each for state in trainer.optimizer.state.values() for each in state.values() if each.ndim]
    planned = predict(trainer.run).ledger.bytes["optimizer"]
    assert planned <= sum(map(bytes_of, moments)) <= planned * (1 + slack)
