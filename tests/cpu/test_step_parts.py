"""The parts of a step that need no other rank: schedule of transfers, learning rate, clock, peak bytes."""

import gc
import itertools
import math
import weakref

import pytest
import torch
from example import example_batches, example_run, part_of, plain_step

from trainwright.plan.pieces import embedding_piece, head_piece, layer_piece
from trainwright.plan.table import Table
from trainwright.spec.recipe import Optimizer
from trainwright.spec.schedule import SCHEDULES, Act
from trainwright.train.bench.host import LAUNCHES_AROUND_LAYERS, LAUNCHES_OF_A_LAYER
from trainwright.train.clock import Clock
from trainwright.train.instrument import live_storages, peak_bytes_of
from trainwright.train.mesh import Mesh
from trainwright.train.optimizer import learning_rate
from trainwright.train.parallel.local import bytes_of
from trainwright.train.parallel.transfers import Handover, Transfer, programs
from trainwright.train.parallelize import Trainer, parallelize

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "microbatches"),
    [
        ("1f1b", 1, 1, 4),
        ("1f1b", 2, 1, 1),
        ("1f1b", 4, 1, 8),
        ("gpipe", 4, 1, 3),
        ("interleaved_1f1b", 2, 2, 4),
        ("interleaved_1f1b", 4, 3, 8),
        ("interleaved_1f1b", 3, 2, 3),
        ("zb_h1", 4, 1, 6),
        ("zb_v", 2, 2, 5),
        ("zb_v", 4, 2, 9),
        ("zb_v", 3, 2, 1),
        ("dualpipe", 2, 2, 4),
        ("dualpipe", 6, 2, 14),
        ("dualpipe_v", 2, 2, 4),
        ("dualpipe_v", 5, 2, 11),
    ],
)
def test_transfers_meet_even_if_every_one_waits(schedule: str, pp: int, vpp: int, microbatches: int) -> None:
    described = SCHEDULES[schedule]
    rows, placement = described.rows(pp, vpp, microbatches), described.stages(pp, vpp)
    made = programs(rows, placement)
    for row, program in zip(rows, made, strict=True):
        assert row == tuple(step for step in program if isinstance(step, Act))
    at = [0] * pp
    while any(at[rank] < len(made[rank]) for rank in range(pp)):
        before = list(at)
        for rank in range(pp):
            while at[rank] < len(made[rank]) and not isinstance(made[rank][at[rank]], Transfer):
                at[rank] += 1
        for one, other in itertools.combinations(range(pp), 2):
            if at[one] < len(made[one]) and at[other] < len(made[other]):
                here, there = made[one][at[one]], made[other][at[other]]
                if isinstance(here, Transfer) and isinstance(there, Transfer) and meet(here, there, one, other):
                    at[one], at[other] = at[one] + 1, at[other] + 1
        assert at != before, "a circle of waiting ranks"
    tags = [step.tag for program in made for step in program if isinstance(step, Transfer)]
    assert len(tags) == 2 * len(set(tags))
    # Every border between two stages is crossed twice by each microbatch, once there and once back.
    handed_over = sum(isinstance(step, Handover) for program in made for step in program)
    assert len(set(tags)) + handed_over == 2 * (described.num_stages(pp, vpp) - 1) * microbatches
    assert handed_over == 2 * microbatches * (schedule in ("zb_v", "dualpipe_v"))


def meet(here: Transfer, there: Transfer, one: int, other: int) -> bool:
    return (
        here.tag == there.tag
        and here.peer == other
        and there.peer == one
        and {here.way, there.way}
        == {
            "send",
            "receive",
        }
    )


def test_learning_rate() -> None:
    cosine = Optimizer(lr=1.0, warmup_steps=10, schedule="cosine", min_lr_fraction=0.1)
    assert [learning_rate(cosine, step, 100) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(cosine, 10, 100) == pytest.approx(1.0)
    assert learning_rate(cosine, 99, 100) == pytest.approx(0.1)
    half = learning_rate(cosine, 10 + 89 // 2, 100)
    assert half == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 44 / 89)))
    wsd = cosine.changed(schedule="wsd", decay_fraction=0.2)
    assert [learning_rate(wsd, step, 100) for step in (50, 79, 89, 99)] == pytest.approx([1.0, 1.0, 0.55, 0.1])
    linear = cosine.changed(schedule="linear")
    assert [learning_rate(linear, step, 110) for step in (9, 10, 43, 109)] == pytest.approx([1.0, 1.0, 0.7, 0.1])
    assert learning_rate(cosine.changed(schedule="constant"), 99, 100) == 1.0


def test_clock_charges_the_innermost_cause() -> None:
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    clock = Clock()
    clock._now_s = lambda **_: next(ticks)  # type: ignore[method-assign]
    clock.restart()
    with clock.of("compute"), clock.of("tp"):
        pass
    seconds = clock.read()
    assert {cause: spent for cause, spent in seconds.items() if spent} == {"host": 6.0, "compute": 6.0, "tp": 3.0}


def test_peak_bytes_counts_temporaries_and_what_was_there() -> None:
    kept = torch.ones(1_000_000)
    before = peak_bytes_of(lambda: None, CPU)
    assert 4_000_000 <= before <= sum(storage.nbytes() for storage in live_storages())

    def step() -> None:
        first = torch.ones(2_000_000)
        del first
        second = torch.ones(1_000_000)
        # A temporary of an expression: alive beside `second` for a moment, 4 MB each.
        (second * 2).sum()
        third = torch.ones(3_000_000)
        third.untyped_storage().resize_(0)
        del second

    peak = peak_bytes_of(step, CPU)
    assert 16_000_000 <= peak - before < 16_100_000
    assert kept.numel()


def trainer_of(**fields: object) -> Trainer:
    run = example_run(**fields).check()  # type: ignore[arg-type]
    return parallelize(run, Mesh(run.layout, 0, CPU), Clock())


def test_bytes_of_one_rank_by_hand() -> None:
    # d_model 32, 4 heads and 2 key heads of 8, d_ff 48, vocabulary 259, 4 layers, untied.
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    values = 2 * 259 * 32 + 4 * layer + 32
    for precision, per_value in {"fp32": (4, 4, 8), "bf16": (6, 4, 8), "fp64": (8, 8, 16)}.items():
        trainer = trainer_of(recipe={"precision": precision})
        sequences = example_batches(trainer.run)
        trainer.step(part_of(trainer.run, 0, sequences), 0.01)
        held = trainer.data_parallel.held_bytes()
        moments = [each for state in trainer.optimizer.state.values() for each in state.values() if each.ndim]
        seen = (held["parameters"], held["gradients"], sum(map(bytes_of, moments)))
        assert seen == tuple(values * each for each in per_value)


def test_bf16_keeps_masters_that_small_updates_move() -> None:
    trainer = trainer_of(recipe={"precision": "bf16", "grad_clip": 0.0})
    batch = part_of(trainer.run, 0, example_batches(trainer.run))
    names = dict(trainer.data_parallel.parameters())
    before = names["layers.0.mlp.up.weight"].detach().clone()
    result = trainer.step(batch, 1e-6)
    after = names["layers.0.mlp.up.weight"].detach()
    assert after.dtype == torch.float32
    assert 0 < float((after - before).abs().max()) < 1e-5
    working = dict(trainer.pieces[0].named_parameters())["layers.0.mlp.up.weight"]
    assert working.dtype == torch.bfloat16
    assert torch.equal(working, after.bfloat16())
    exact = plain_step(trainer.run, example_batches(trainer.run))
    assert result.loss == pytest.approx(exact["loss"], rel=2e-3)  # bf16 has 8 bits; the loss averages over tokens
    assert result.grad_norm == pytest.approx(exact["norm"], rel=2e-2)


def test_gradients_in_bf16_are_summed_in_bf16() -> None:
    """Eight microbatches: each sum rounds by 2^-9 of its value at the most."""
    wide, narrow = (
        trainer_of(recipe={"precision": "bf16", "gradient_format": name, "zero": 0}) for name in ("fp32", "bf16")
    )
    batch = part_of(wide.run, 0, example_batches(wide.run))
    one, other = wide.gradients(batch), narrow.gradients(batch)
    assert narrow.data_parallel.held_bytes()["gradients"] == wide.data_parallel.held_bytes()["gradients"] / 2
    assert other.loss == one.loss
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=5e-3)
    exact = dict(wide.data_parallel.parameters())
    for name, parameter in narrow.data_parallel.parameters():
        expected = exact[name].grad
        assert parameter.grad is not None
        assert expected is not None
        assert parameter.grad.dtype == torch.bfloat16
        assert 0 < float((parameter.grad.float() - expected).norm() / expected.norm()) < 1e-2
    before = exact["layers.0.mlp.up.weight"].detach().clone()
    wide.update(one, 0.01)
    narrow.update(other, 0.01)
    after = dict(narrow.data_parallel.parameters())["layers.0.mlp.up.weight"].detach()
    assert after.dtype == torch.float32
    step = exact["layers.0.mlp.up.weight"].detach() - before
    assert float((after - before - step).norm() / step.norm()) < 5e-2  # the first update is the gradient's sign


def test_training_lowers_the_loss() -> None:
    trainer = trainer_of(recipe={"precision": "fp32"})
    batch = part_of(trainer.run, 0, example_batches(trainer.run))
    losses = [trainer.step(batch, 0.01).loss for _ in range(12)]
    assert losses[0] == pytest.approx(math.log(259), rel=0.02)
    assert losses[-1] < losses[0] - 1.0


def test_recompute_of_some_layers_holds_less_by_those() -> None:
    def peak(**recipe: object) -> int:
        sizes = {"precision": "fp32", "seq_len": 128, "micro_batch": 8}
        trainer = trainer_of(recipe={**sizes, **recipe})
        batch = part_of(trainer.run, 0, example_batches(trainer.run))
        trainer.step(batch, 0.01)
        return peak_bytes_of(lambda: trainer.step(batch, 0.01), CPU)

    nothing, one, three, every = (
        peak(),
        *(peak(recompute="full", recompute_layers=layers) for layers in (1, 3)),
        peak(recompute="full"),
    )
    assert nothing > one > three > every
    assert nothing - three == pytest.approx(3 * (nothing - one), rel=0.02)


def test_the_bench_counts_a_layers_launches_as_the_planner_does() -> None:
    run = trainer_of().run
    piece = layer_piece(Table.of_run(run), run.model.layers[0])
    assert sum(sum(operation.launches) for operation in piece.operations) == LAUNCHES_OF_A_LAYER
    table = Table.of_run(run)
    around = (*embedding_piece(table).operations, *head_piece(table).operations)
    assert sum(sum(operation.launches) for operation in around) == LAUNCHES_AROUND_LAYERS


def test_a_trainer_is_gone_with_the_last_that_uses_it() -> None:
    """No cycle holds it: its memory doesn't wait for Python's collector."""
    run = example_run(recipe={"precision": "bf16"}).check()
    mesh = Mesh(layout=run.layout, rank=0, device=CPU)
    gc.disable()
    try:
        trainer = parallelize(run, mesh, Clock())
        trainer.step(part_of(run, 0, example_batches(run)), 1e-3)
        weights = [weakref.ref(each) for _, each in trainer.data_parallel.parameters()]
        del trainer
        assert not any(each() is not None for each in weights)
    finally:
        gc.enable()
