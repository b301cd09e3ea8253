"""The optimizer, the course of its learning rate, and clipping by the norm of the whole gradient over all axes."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.spec.recipe import Optimizer
from trainwright.train.parallel.local import local_of
from trainwright.train.updates import Updates

CLIP_EPSILON = 1e-6
"""Beside the norm in the divisor, as in torch.nn.utils.clip_grad_norm_."""


def optimizer_of(
    choice: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], gradient_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """What moves `parameters`, given by name: PyTorch's AdamW where moments and gradients are in the parameters'
    precision, else ours."""
    named = list(parameters)
    are_alike = choice.moments == "fp32" and all(each.dtype == gradient_dtype for _, each in named)
    if choice.name == "adamw" and are_alike:
        return adamw(choice, named)
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        is_matrix = is_decayed(name, parameter)
        rule = "muon" if choice.name == "muon" and is_matrix and name.startswith("layers.") else "adamw"
        groups.setdefault((rule, is_matrix), []).append(parameter)
    common = {
        "lr": choice.lr,
        "betas": (choice.beta1, choice.beta2),
        "eps": choice.epsilon,
        "moments": choice.moments,
    }
    return Updates(
        [
            {"params": each, "rule": rule, "weight_decay": choice.weight_decay if is_matrix else 0.0, **common}
            for (rule, is_matrix), each in groups.items()
        ]
    )


def adamw(choice: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """PyTorch's fused AdamW: moments in the parameters' precision, decay on matrices alone."""
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for name, each in parameters:
        # The fused update takes the tensors of one mesh at a time.
        mesh = each.device_mesh if isinstance(each, DTensor) else None
        groups.setdefault((is_decayed(name, each), mesh), []).append(each)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": choice.weight_decay if decayed else 0.0}
            for (decayed, _), group in groups.items()
        ],
        lr=choice.lr,
        betas=(choice.beta1, choice.beta2),
        eps=choice.epsilon,
        fused=True,
    )


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a matrix; the biases of experts are stacked, and none."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def learning_rate(choice: Optimizer, step: int, steps: int) -> float:
    """Rate of step `step` (counted from 0) of a run of `steps`; `Optimizer` says the course."""
    if step < choice.warmup_steps:
        return choice.lr * (step + 1) / choice.warmup_steps
    floor = choice.min_lr_fraction
    if choice.schedule == "constant":
        return choice.lr
    if choice.schedule in ("cosine", "linear"):
        progress = min(1.0, (step - choice.warmup_steps) / max(1, steps - 1 - choice.warmup_steps))
        left = 1 - progress if choice.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return choice.lr * (floor + (1 - floor) * left)
    decay_steps = max(1, round(steps * choice.decay_fraction))
    left = min(1.0, max(0, steps - 1 - step) / decay_steps)
    return choice.lr * (floor + (1 - floor) * left)


def squared_norm(parameters: Iterable[tuple[nn.Parameter, int]]) -> float:
    """This rank's share of the squared norm of the whole gradient: `parameters` come with the number of ranks
    that hold the same part, each of which counts its fraction, so that shares sum to the square."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter, copies in parameters:
        assert parameter.grad is not None, "a parameter got no gradient"
        by_copies.setdefault(copies, []).append(local_of(parameter.grad))
    total = 0.0
    for copies, gradients in by_copies.items():
        norms = torch.stack([_norm(each) for each in gradients]).double()
        total += float((norms * norms).sum()) / copies
    return total


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """In fp32 at least: a sum of squares in bf16 would stand still."""
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scale all gradients so that their norm, which is `norm`, is `largest` at the most."""
    scale = largest / (norm + CLIP_EPSILON)
    if scale < 1.0:
        for each in parameters:
            assert each.grad is not None
            local_of(each.grad).mul_(scale)
