"""The trainer of one rank, built by the trainer's own list on fake tensors, and the batch that it steps on.

PyTorch's groups, meshes and sharding are made outside of the fake mode (they compute with real small tensors), and
parameters are made fake where `materialize` would draw them: that is the one thing that is replaced, beside the
choice of experts (`fabric.even_choice`).
"""

from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.dryrun.fabric import even_choice
from trainwright.train.dryrun.precision import round_nothing
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import mixtures
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.local import cut_alike
from trainwright.train.parallel.materialize import fill
from trainwright.train.parallelize import Trainer, parallelize


def fake_mode() -> FakeTensorMode:
    """Tables of positions and the like, which are real, become fake where they meet fake tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_trainer(run: Run, mesh: Mesh, mode: FakeTensorMode) -> Trainer:
    """This rank's trainer; call it outside of `mode`."""
    trainer = parallelize(run, mesh, Clock(), partial(_fake_values, mode))
    choose_evenly(trainer)
    round_nothing(trainer, mode)
    return trainer


def choose_evenly(trainer: Trainer) -> None:
    """Let tokens go to experts by their place, as in a run without numbers."""
    for piece in trainer.pieces:
        for _, mixture in mixtures(piece):
            mixture.choose = even_choice


def _fake_values(
    mode: FakeTensorMode,
    piece: Transformer,
    module: nn.Module,
    prefix: str,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """In the place of `materialize`: parameters of the same shapes and places, without values."""

    def empty(name: str, parameter: nn.Parameter) -> torch.Tensor:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        with mode:
            value = torch.empty(local.shape, dtype=dtype, device=device)
        return cut_alike(parameter, value)

    fill(piece, module, empty)


def fake_batch(run: Run, mesh: Mesh) -> Batch:
    """A data-parallel rank's samples, of one document each; call it in the mode."""
    recipe, per_rank = run.recipe, run.recipe.global_batch // run.layout.dp
    shape = (recipe.micro_batch, recipe.seq_len)

    def tokens() -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=torch.int64) for _ in range(run.num_microbatches)]

    def documents() -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=torch.int64) for _ in range(run.num_microbatches)]

    return Batch(
        inputs_BS=tokens(),
        targets_BS=tokens(),
        global_tokens=recipe.tokens_per_step,
        documents_BS=documents() if run.data.document_mask else None,
        first_sample=mesh.coordinate.dp * per_rank,
    )


def begin(trainer: Trainer) -> None:
    """What a step before this one has left: moments. Gradients are made and dropped for it."""
    for _, parameter in trainer.data_parallel.parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    trainer.optimizer.step()
    trainer.data_parallel.after_update()
