"""Faults that `verify --inject` plants, each a mistake that a trainer like this one has been known to make.

A fault says what a run must have for it to be there at all, and changes a trainer that is ready to step. PyTorch
is imported where it is used, so that a command can list the faults without a second's wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from trainwright.spec.errors import nearest, reject
from trainwright.spec.layout import Axis
from trainwright.spec.run import Run

if TYPE_CHECKING:
    import torch

    from trainwright.train.data import Batch
    from trainwright.train.verify.subject import Subject

Needs = Callable[[Run], str]
"""What the run lacks for the fault to be there; empty where it lacks nothing."""


@dataclass(frozen=True)
class Fault:
    """Something that can be wrong, what it needs, and how it is planted."""

    text: str
    needs: Needs
    plant: "Callable[[Subject], None]"


def require_fault(name: str, run: Run) -> Fault:
    """The fault of this name; `InvalidSpec` where there is none, or `run` is none that can have it."""
    if name not in FAULTS:
        reject("--inject", name, f"no such fault; {nearest(name, FAULTS)}")
    missing = FAULTS[name].needs(run)
    if missing:
        reject("--inject", name, f"needs {missing}; change the run with --set, or give --processes more")
    return FAULTS[name]


def _all_of(*needs: Needs) -> Needs:
    def missing(run: Run) -> str:
        return " and ".join(filter(None, (need(run) for need in needs)))

    return missing


def _above_1(axis: Axis) -> Needs:
    return lambda run: "" if run.layout.degree(axis) > 1 else f"layout.{axis} above 1"


def _shards(run: Run) -> str:
    has = run.recipe.zero and run.layout.dp > run.recipe.dp_replicate
    return "" if has else "recipe.zero of 1 to 3 and shards over layout.dp above 1"


def _several_ranks(run: Run) -> str:
    return "" if run.layout.world > 1 else "two ranks or more"


def _several_microbatches(run: Run) -> str:
    return "" if run.num_microbatches > 1 else "two microbatches or more"


def _ties(run: Run) -> str:
    return "" if run.model.tied_embeddings else "model.tied_embeddings=true"


def _sequence_parallelism(run: Run) -> str:
    return "" if run.recipe.sequence_parallel else "recipe.sequence_parallel=true"


def _rotary(run: Run) -> str:
    return "" if run.model.rope is not None else "model.rope"


def _replicates(run: Run) -> str:
    has = run.recipe.zero == 0 or run.layout.dp * run.layout.cp == run.recipe.dp_replicate
    return "" if has else "recipe.zero=0"


def _replicates_experts(run: Run) -> str:
    return "" if run.model.is_moe and run.layout.expert_dp > 1 else "experts, and ranks that hold the same ones"


def _summed_over(axis: str, of_experts: bool, subject: "Subject") -> None:
    """Gradients of the experts, or of all else, are summed over `axis` alone; over nothing, where it has no
    group."""
    import torch.distributed as dist

    from trainwright.train.parallel.replicated import Replicated

    form, mesh = subject.trainer.data_parallel, subject.trainer.mesh
    assert isinstance(form, Replicated)
    alone = dist.new_group([mesh.rank], use_local_synchronization=True)
    for bucket in form.buckets:
        if bucket.slots[0].of_experts == of_experts:
            bucket.group = mesh.groups.get(axis, alone)  # pyright: ignore[reportAttributeAccessIssue]


def _without_dp_reduction(subject: "Subject") -> None:
    """Each rank goes on with its own gradients; of shards, with its own part of them."""
    from trainwright.train.parallel.replicated import Replicated
    from trainwright.train.parallel.sharded import Sharded
    from trainwright.train.verify.shards import OwnPart

    form = subject.trainer.data_parallel
    if isinstance(form, Replicated):
        _summed_over("cp", False, subject)
    else:
        assert isinstance(form, Sharded)
        for module in subject.sharded_modules():
            module.set_custom_reduce_scatter(OwnPart())


def _mean_of_shards(subject: "Subject") -> None:
    """FSDP2's own habit: gradients divided by the ranks that they were summed over."""
    for module in subject.sharded_modules():
        module.set_gradient_divide_factor(float(subject.trainer.mesh.layout.dp))


def _change_batch(subject: "Subject", change: "Callable[[Batch], Batch]") -> None:
    """Let the pipeline see another batch than the step does, which divides the loss by its count."""
    plain = subject.trainer.pipeline.run
    subject.trainer.pipeline.run = lambda batch: plain(change(batch))


def _scaled_by_microbatches(subject: "Subject") -> None:
    number = subject.trainer.run.num_microbatches
    _change_batch(subject, lambda batch: replace(batch, global_tokens=batch.global_tokens * number))


def _without_last_microbatch(subject: "Subject") -> None:
    from trainwright.train.data import IGNORED

    def skipped(batch: "Batch") -> "Batch":
        *others, last_BS = batch.targets_BS
        return replace(batch, targets_BS=[*others, last_BS.new_full(last_BS.shape, IGNORED)])

    _change_batch(subject, skipped)


def _norm_without(axis: Axis, subject: "Subject") -> None:
    """The squares are summed over the ranks that have this rank's place on the axis."""
    mesh = subject.trainer.mesh
    plain, place = mesh.sum_over_world, getattr(mesh.coordinate, axis)

    def summed(values: list[float]) -> list[float]:
        *others, square = values
        squares = [0.0] * mesh.layout.degree(axis)
        squares[place] = square
        sums = plain([*others, *squares])
        return [*sums[: len(others)], sums[len(others) + place]]

    object.__setattr__(mesh, "sum_over_world", summed)


def _without_tied_reduction(subject: "Subject") -> None:
    subject.trainer.tied_across_stages = lambda: []


def _without_norm_reduction(subject: "Subject") -> None:
    """Gradients of norms outside the blocks pass for whole ones, and are sums over this rank's positions."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate

    from trainwright.train.model.layers import Norm

    def part(parameter: "torch.Tensor | None") -> "torch.Tensor | None":
        if parameter is None:
            return None
        assert isinstance(parameter, DTensor)
        return parameter.to_local(grad_placements=(Replicate(),))

    def forward(norm: Norm, x: "torch.Tensor") -> "torch.Tensor":
        weight = part(norm.weight)
        assert weight is not None
        return norm.normalize(x, weight, part(norm.bias))

    for piece in subject.trainer.pieces:
        owners: list[nn.Module] = [piece, *piece.layers.values()]
        for norm in (each for owner in owners for each in owner.children()):
            if isinstance(norm, Norm):
                norm.forward = partial(forward, norm)


def _first_ranks_data(subject: "Subject") -> None:
    if subject.dp_rank == subject.trainer.mesh.layout.dp - 1:
        subject.dp_rank = 0


def _weights_of_the_rank(subject: "Subject") -> None:
    import torch

    from trainwright.train.parallel.local import local_of

    generator = torch.Generator().manual_seed(subject.trainer.mesh.rank)
    for _, parameter in subject.trainer.data_parallel.parameters():
        local = local_of(parameter)
        local.add_(torch.randn(local.shape, generator=generator, dtype=local.dtype), alpha=0.01)


def _positions_one_too_far(subject: "Subject") -> None:
    """From the middle of a sequence on, as where a part of it is cut off at the wrong place. (All positions one
    too far would change nothing: attention sees their distances.)"""
    import torch

    seq_len = subject.trainer.run.recipe.seq_len
    for piece in subject.trainer.pieces:
        for rotary in (piece.rotary, piece.local_rotary):
            if rotary is not None:
                held = torch.arange(seq_len) if rotary.held is None else rotary.held
                rotary.held = held + (held >= seq_len // 2)


FAULTS: Mapping[str, Fault] = {
    "dp-reduction": Fault("gradients are not summed over dp", _above_1("dp"), _without_dp_reduction),
    "cp-reduction": Fault(
        "gradients are not summed over cp",
        _all_of(_above_1("cp"), _replicates),
        partial(_summed_over, "dp", False),
    ),
    "expert-reduction": Fault(
        "gradients of experts are not summed over the ranks that hold the same ones",
        _all_of(_replicates_experts, _replicates),
        partial(_summed_over, "", True),
    ),
    "zero-mean": Fault("ZeRO's scatter gives the mean over dp instead of the sum", _shards, _mean_of_shards),
    "microbatch-scale": Fault(
        "gradients are divided by the number of microbatches once more",
        _several_microbatches,
        _scaled_by_microbatches,
    ),
    "last-microbatch": Fault(
        "the last microbatch counts for nothing", _several_microbatches, _without_last_microbatch
    ),
    "norm-tp": Fault("the clipping norm leaves out tp", _above_1("tp"), partial(_norm_without, "tp")),
    "norm-pp": Fault("the clipping norm leaves out pp", _above_1("pp"), partial(_norm_without, "pp")),
    "norm-dp": Fault("the clipping norm leaves out dp", _above_1("dp"), partial(_norm_without, "dp")),
    "tied": Fault(
        "gradients of a tied embedding are not summed over the pipeline's ends",
        _all_of(_above_1("pp"), _ties),
        _without_tied_reduction,
    ),
    "sequence-norms": Fault(
        "under sequence parallelism, gradients of norms are not summed over tp",
        _all_of(_above_1("tp"), _sequence_parallelism),
        _without_norm_reduction,
    ),
    "data-order": Fault("the last dp rank trains on the first one's samples", _above_1("dp"), _first_ranks_data),
    "initial-weights": Fault("initial weights depend on the rank", _several_ranks, _weights_of_the_rank),
    "rotary": Fault(
        "rotary positions of the second half of a sequence are one too far", _rotary, _positions_one_too_far
    ),
}
"""By the name that `--inject` takes."""
