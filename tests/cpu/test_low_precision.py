"""Layers with operands of few bits: what they compute, keep, tell, and do when a scale saturates.

That layouts agree is in the parity cases (`parity_precision.py`), and that counts are the planner's in
`test_exact.py`.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from example import example_batches, example_run, part_of
from parity_precision import case

from trainwright.plan.memory_over_time import memory_over_time
from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.recipe import PRECISIONS
from trainwright.train.checkpoint.identity import mark_of
from trainwright.train.checkpoint.keeper import Keeper, Position
from trainwright.train.clock import Clock
from trainwright.train.faults.attendant import Attendant
from trainwright.train.loop import require_device
from trainwright.train.mesh import build_mesh
from trainwright.train.model.linear import Linear
from trainwright.train.parallelize import Trainer, parallelize
from trainwright.train.precision.arithmetic import Arithmetic, UnderWay
from trainwright.train.precision.largest import Current, Delayed
from trainwright.train.precision.linear import LowPrecision
from trainwright.train.precision.recipes import RECIPES
from trainwright.train.precision.shared import HeldWeight, SharedInput
from trainwright.train.verify.subject import random_tokens

LOW = tuple(each for each in PRECISIONS if each in RECIPES)


def layer_of(precision: Any, linear: Linear, inputs: SharedInput[Any] | None = None) -> LowPrecision:
    arithmetic = Arithmetic("layer", precision, Current({}, Clock()), UnderWay())
    return LowPrecision(arithmetic, inputs or SharedInput(1), HeldWeight(holds=True), keeps_input=False)


def trainer_of(fields: dict[str, Any]) -> Trainer:
    run = example_run(**fields).check()
    mesh = build_mesh(run.layout, 0, torch.device("cpu"), 1, timedelta(seconds=10))
    return parallelize(run, mesh, Clock())


def keeper_of(trainer: Trainer, root: Path) -> Keeper:
    policy = Checkpointing(every_steps=1, asynchronous=False)
    mark = mark_of(random_tokens(trainer.run, 4).shards)
    attendant = Attendant(trainer, None, print)
    return Keeper(trainer, root / "commits", policy, mark, 4, lambda text: None, attendant)


def step(trainer: Trainer) -> float:
    return trainer.step(part_of(trainer.run, 0, example_batches(trainer.run)), 0.01).loss


@pytest.mark.parametrize("precision", LOW)
def test_products_are_those_of_what_was_rounded(precision: str) -> None:
    """Of operands that are read back in float64, all three products, and nothing rounded but the result."""
    generator = torch.Generator().manual_seed(3)
    linear = Linear(96, 160, bias=True).to(torch.bfloat16)
    x = torch.randn(2, 100, 96, generator=generator).to(torch.bfloat16).requires_grad_()
    layer = layer_of(precision, linear)
    linear.product = layer
    y = linear(x)
    upstream = torch.randn(y.shape, generator=generator).to(torch.bfloat16)
    y.backward(upstream)
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None
    assert x.grad is not None

    rounded = layer.arithmetic
    flat, gradient, weight = x.detach().flatten(0, 1), upstream.flatten(0, 1), linear.weight.detach()
    x_TI, x_IT = (each.dequantize(torch.float64) for each in rounded.both("input", flat))
    dy_TO, dy_OT = (each.dequantize(torch.float64) for each in rounded.both("gradient", gradient))
    w_OI, w_IO = (each.dequantize(torch.float64) for each in rounded.both("weight", weight))
    expected = {
        "y": (x_TI @ w_OI.mT + linear.bias.detach(), y.flatten(0, 1)),
        "dx": (dy_TO @ w_IO.mT, x.grad.flatten(0, 1)),
        "dw": (dy_OT @ x_IT.mT, linear.weight.grad),
        "db": (gradient.double().sum(0), linear.bias.grad),
    }
    for name, (wanted, seen) in expected.items():
        # A rounding to bf16 at the end, of y another one with its bias, and sums in fp32.
        assert torch.allclose(seen.double(), wanted, rtol=2**-7, atol=2**-8 * float(wanted.abs().mean())), name


def test_readers_of_one_tensor_share_what_is_kept() -> None:
    """A byte a value and the scales, once for two layers; a third of its own keeps its own."""
    inputs: SharedInput[Any] = SharedInput(2)
    layers = [Linear(128, 128, bias=False).to(torch.bfloat16) for _ in range(3)]
    for linear in layers[:2]:
        linear.product = layer_of("fp8-block", linear, inputs)
    layers[2].product = layer_of("fp8-block", layers[2])
    x = torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [linear(x) for linear in layers]
    once = 256 * 128 + 4 * (256 // 128) * 128
    assert sum(kept.values()) == 2 * once
    assert len(outputs) == 3


def test_a_weight_is_rounded_again_after_an_update() -> None:
    trainer = trainer_of(case("fp8-block", {"optimizer": {"lr": 0.01, "warmup_steps": 0, "schedule": "constant"}}))
    first, second = step(trainer), step(trainer)
    assert second < first


@pytest.mark.parametrize("precision", LOW)
def test_the_ledger_has_the_casts_that_are_held(precision: str) -> None:
    """As the planner's parameters have: each weight twice in few bits, beside its copy and its master."""
    trainer = trainer_of(case(precision))
    without = trainer.held_bytes()["parameters"]
    step(trainer)
    held = trainer.held_bytes()["parameters"]
    assert held > 1.1 * without
    predicted = memory_over_time(trainer.run).ranks[0].bytes["parameters"][-1]
    # Scales of rows, 4 bytes each, aren't in the planner's share of a weight.
    assert held == pytest.approx(predicted, rel=5e-3)


def test_scales_of_past_steps() -> None:
    """The largest of the last steps, the present's where there is none; steps further back are forgotten."""
    layer = Delayed(2, Current({}, Clock()), torch.device("cpu"))
    seen = []
    for value in (3.0, 5.0, 1.0, 1.0, 1.0):
        x = torch.full((4, 4), value)
        seen.append(float(layer.of("input", x)))
        layer.advance()
    assert seen == [3.0, 3.0, 5.0, 5.0, 1.0]


def test_no_number_is_no_past() -> None:
    layer = Delayed(2, Current({}, Clock()), torch.device("cpu"))
    for value in (3.0, float("inf"), float("nan")):
        layer.of("input", torch.full((4, 4), value))
        layer.advance()
    assert float(layer.of("input", torch.full((4, 4), 5.0))) == 5.0


def test_a_scale_that_saturates_is_named_and_the_layer_falls_back() -> None:
    trainer = trainer_of(case("fp8-delayed", {"precision_fallback": True, "precision_report_steps": 1}))
    layers = trainer.low_precision
    assert layers is not None
    for number in (1, 2):
        assert layers.watch(number)
        step(trainer)
        calm = layers.report(number)
    assert calm.alarms == ()
    assert set(calm.layers["layers.0.attention.query"]) == {"input", "weight", "gradient"}
    with torch.no_grad():
        named = dict(trainer.data_parallel.parameters())
        named["layers.1.attention_norm.weight"].mul_(50)
        trainer.data_parallel.after_update()
    layers.watch(3)
    step(trainer)
    record = layers.report(3)
    assert any(alarm.startswith("layers.1.attention.query: ") and "input" in alarm for alarm in record.alarms)
    assert "layers.1.attention.query" in record.fallen
    query = trainer.pieces[0].get_submodule("layers.1.attention.query")
    assert isinstance(query, Linear)
    assert query.product is torch.nn.functional.linear
    layers.watch(4)
    step(trainer)
    assert "layers.1.attention.query" not in layers.report(4).layers


def test_what_has_fallen_and_past_steps_go_through_a_commit(tmp_path: Path) -> None:
    fields = case("fp8-delayed", {"precision_fallback": True})
    trainer = trainer_of(fields)
    assert trainer.low_precision is not None
    step(trainer)
    name = "layers.2.mlp.down"
    trainer.low_precision.fallen[name].fill_(1)
    trainer.low_precision.restored()
    keeper_of(trainer, tmp_path).after_step(Position(1, trainer.run.recipe.global_batch), 0.1, is_last=True)
    expected = step(trainer)
    other = trainer_of(fields)
    assert keeper_of(other, tmp_path).resume().step == 1
    assert other.low_precision is not None
    assert float(other.low_precision.fallen[name]) == 1
    down = other.pieces[0].get_submodule(name)
    assert isinstance(down, Linear)
    assert down.product is torch.nn.functional.linear
    assert step(other) == expected


def test_a_commit_without_histories_is_one_without_past(tmp_path: Path) -> None:
    fields = case("fp8-delayed")
    recipe = {**fields["recipe"], "precision": "bf16", "emulate_precision": False}
    plain = trainer_of({**fields, "recipe": recipe})
    step(plain)
    keeper_of(plain, tmp_path).after_step(Position(1, plain.run.recipe.global_batch), 0.1, is_last=True)
    other = trainer_of(fields)
    assert keeper_of(other, tmp_path).resume().step == 1
    assert other.low_precision is not None
    assert all(layer.is_new for layer in other.low_precision.delayed.values())
    assert step(other) == pytest.approx(step(plain), rel=1e-2)


def test_hardware_that_is_not_there_is_refused() -> None:
    """The cluster of the run has fp8, and the device that it is carried out on hasn't."""
    run = example_run(recipe={"precision": "fp8-current"}).check()
    refusal = r"recipe\.precision='fp8-current': has no hardware here .*emulate_precision=true"
    with pytest.raises(InvalidSpec, match=refusal):
        require_device(run, torch.device("cpu"))
    require_device(run.changed(recipe=run.recipe.changed(emulate_precision=True)), torch.device("cpu"))
