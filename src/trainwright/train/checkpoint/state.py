"""This rank's blocks of the whole state: weights, moments, balance biases and histories of largest values, by
their names in the whole model and their places in whole tensors.

Weights are what the optimizer moves: fp32 masters where the run computes in bf16. Moments of a weight are
`NAME:first` and `NAME:second`. Moments in int8 have a scale for every 256 values of a rank's block, and so are
stored with the block: `NAME:first_scale@START:STOP,...` is of the block of that place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainwright.spec.recipe import INT8_BLOCK
from trainwright.train.checkpoint.headers import slices_text
from trainwright.train.model.experts import mixtures
from trainwright.train.model.initialize import global_name
from trainwright.train.parallel.local import local_of
from trainwright.train.parallelize import Trainer
from trainwright.train.updates import Updates

OF_ADAMW = {"first": "exp_avg", "second": "exp_avg_sq"}
"""PyTorch's names of AdamW's moments."""

HISTORY = "amax_history"
"""Of a layer whose scales come from past steps: input, weight and gradient, the newest step first. A commit of a
run without such scales has none, and a run that begins with it has no past."""
FALLEN = "in_activation_format"
"""1 of a layer that has fallen back to it, where a recipe lets layers do so."""

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a block in a whole tensor."""


@dataclass(frozen=True)
class Held:
    """A block that this rank holds."""

    name: str
    whole_shape: tuple[int, ...]
    start: tuple[int, ...]
    values: torch.Tensor
    """In the block's shape; the memory of the state itself."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.start

    @property
    def is_whole(self) -> bool:
        return tuple(self.values.shape) == self.whole_shape


def held_blocks(trainer: Trainer) -> Iterator[Held]:
    """Every block of the state on this rank, some twice: a tied table has two copies where both ends are here."""
    yield from held_weights(trainer)
    for name, parameter, moments in kept_moments(trainer):
        for kind, values in moments.items():
            yield from blocks_of_moment(name, parameter, kind, values)


def held_weights(trainer: Trainer) -> Iterator[Held]:
    """Weights, and what else decides a step: the biases that steer the choice of experts, and the largest values
    of past steps that scales are made from."""
    for name, parameter in trainer.data_parallel.parameters():
        start, _ = place_of(parameter)
        local = local_of(parameter)
        yield Held(global_name(trainer.run.model, name), tuple(parameter.shape), start, local)
    for piece in trainer.pieces:
        for name, mixture in mixtures(piece):
            bias = mixture.balance_bias
            if bias is not None:
                yield Held(f"{name}.balance_bias", tuple(bias.shape), (0,) * bias.ndim, bias)
    if trainer.low_precision is not None:
        for name, delayed in trainer.low_precision.delayed.items():
            history_RH = delayed.history_RH
            yield Held(f"{name}.{HISTORY}", tuple(history_RH.shape), (0, 0), history_RH)
        for name, has in trainer.low_precision.fallen.items():
            yield Held(f"{name}.{FALLEN}", (1,), (0,), has)


def kept_moments(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor, dict[str, torch.Tensor]]]:
    """What the optimizer keeps of each parameter: name in the whole model, parameter, and local tensors by kind.
    Empty before the first update."""
    state = trainer.optimizer.state
    for name, parameter in trainer.data_parallel.parameters():
        if isinstance(trainer.optimizer, Updates):
            moments = dict(state.get(parameter, {}))
        else:
            moments = {
                kind: local_of(state[parameter][key]) for kind, key in OF_ADAMW.items() if parameter in state
            }
        yield global_name(trainer.run.model, name), parameter, moments


def blocks_of_moment(name: str, parameter: torch.Tensor, kind: str, values: torch.Tensor) -> Iterator[Held]:
    """A moment of a parameter as a block of the whole one; a scale of int8 as a tensor of its own."""
    start, shape = place_of(parameter)
    if kind.endswith("_scale"):
        scale_name = name_of_scale(f"{name}:{kind}", start, shape)
        yield Held(scale_name, tuple(values.shape), (0,) * values.ndim, values)
    else:
        yield Held(f"{name}:{kind}", tuple(parameter.shape), start, values.view(shape))


def name_of_scale(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Of the scales of a block's moment."""
    return f"{name}@{slices_text(start, shape)}"


def place_of(tensor: torch.Tensor) -> Place:
    """Where this rank's part of a tensor lies in the whole: a block, as each axis of the mesh cuts a dim in
    chunks."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    at = tensor.device_mesh.get_coordinate()
    assert at is not None
    cuts = [
        (isinstance(placement, _StridedShard), axis, placement.dim)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    # Data parallelism stands outermost in a mesh and cuts last what tensor parallelism has cut: DTensor calls that
    # strided.
    for _, axis, dim in sorted(cuts):
        chunk = -(-shape[dim] // tensor.device_mesh.size(axis))
        first = min(shape[dim], chunk * at[axis])
        start[dim] += first
        shape[dim] = min(chunk, shape[dim] - first)
    assert tuple(shape) == tuple(tensor.to_local().shape), f"{tensor.placements} give {shape}"
    return tuple(start), tuple(shape)


def make_moments(trainer: Trainer, step: int) -> None:
    """Give the optimizer the moments that it has after `step` updates, of any value, to be filled in."""
    optimizer = trainer.optimizer
    if isinstance(optimizer, Updates):
        for group in optimizer.param_groups:
            group["steps_done"] = step
            kinds = ("first",) if group["rule"] == "muon" else ("first", "second")
            for parameter in group["params"]:
                local = local_of(parameter)
                optimizer.state[parameter].update(_empty(local, kinds, group["moments"]))
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(
                step=torch.tensor(float(step), dtype=torch.float32, device=local_of(parameter).device),
                **{key: torch.zeros_like(parameter) for key in OF_ADAMW.values()},
            )


def _empty(local: torch.Tensor, kinds: tuple[str, ...], moments: str) -> dict[str, torch.Tensor]:
    if moments == "int8":
        scales = -(-local.numel() // INT8_BLOCK)
        made = {kind: torch.zeros(local.numel(), dtype=torch.uint8, device=local.device) for kind in kinds}
        return made | {
            f"{kind}_scale": torch.zeros(scales, dtype=torch.float32, device=local.device) for kind in kinds
        }
    dtype = torch.bfloat16 if moments == "bf16" else local.dtype
    return {kind: torch.zeros(local.numel(), dtype=dtype, device=local.device) for kind in kinds}
