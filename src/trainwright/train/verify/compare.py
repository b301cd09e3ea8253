"""One step of one rank beside the same step of the plain program: the relative error (L2) of all that they share.

Gradients are those before clipping, weights those after the update. What a rank holds a part of is put together
first, so that a wrong part on any rank of its group is seen by all of them.

Some gradients are zero by nature, and what comes out is rounding, which no two programs have alike: those of the
keys' biases where no position is turned in (softmax doesn't see what all scores share), and of a router whose one
chosen weight is made one. So a tensor's error is over no less than a part of the whole gradient's norm, and over
no less than what a step moves a weight by.
"""

import math
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from trainwright.train.data import Batch
from trainwright.train.model.experts import mixtures
from trainwright.train.model.initialize import global_name
from trainwright.train.parallelize import Trainer
from trainwright.train.verify.plain import PlainStep

SMALLEST_PART = 1e-6
"""Of the whole gradient's norm: a gradient below it is held to 1e-16 of that norm. Rounding of what is zero was
seen up to 1e-19 of it, the least gradients of substance at 5e-9."""


@dataclass(frozen=True)
class RankErrors:
    """Relative errors of one step on one rank, the tensors' by their names in the whole model."""

    loss: float
    norm: float
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def worst(self) -> dict[str, float]:
        """The largest error of each quantity."""
        return {
            "loss": self.loss,
            "gradients": max(self.gradients.values(), default=0.0),
            "norm": self.norm,
            "weights": max(self.weights.values(), default=0.0),
        }


def compared_step(trainer: Trainer, batch: Batch, lr: float, expected: PlainStep) -> RankErrors:
    """Take a step on this rank's `batch` and hold it against `expected`; all ranks call it."""
    result = trainer.gradients(batch)
    gradients = {}
    for name, parameter in trainer.data_parallel.parameters():
        assert parameter.grad is not None, f"no gradient of {name}"
        whole = global_name(trainer.run.model, name)
        gradients[whole] = relative_error(
            parameter.grad, expected.gradients[whole], least=SMALLEST_PART * expected.grad_norm
        )
    trainer.update(result, lr)
    weights = {}
    for name, parameter in trainer.data_parallel.parameters():
        whole = global_name(trainer.run.model, name)
        moved = lr * math.sqrt(expected.weights[whole].numel())
        weights[whole] = relative_error(parameter, expected.weights[whole], least=moved)
    for piece in trainer.pieces:
        for name, mixture in mixtures(piece):
            if mixture.balance_bias is not None:
                whole = f"{name}.balance_bias"
                weights[whole] = relative_error(mixture.balance_bias, expected.weights[whole])
    return RankErrors(
        loss=_relative(result.loss, expected.loss),
        norm=_relative(result.grad_norm, expected.grad_norm),
        gradients=gradients,
        weights=weights,
    )


def relative_error(seen: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """|seen - expected| over |expected|, or over `least` where that is more, of the whole tensor; infinite where
    it is no number."""
    seen = seen.detach()
    whole = seen.full_tensor() if isinstance(seen, DTensor) else seen
    scale = max(float(expected.norm()), least)
    error = float((whole - expected).norm()) / (scale if scale else 1.0)
    return error if error == error else float("inf")


def _relative(seen: float, expected: float) -> float:
    error = abs(seen - expected) / (abs(expected) or 1.0)
    return error if error == error else float("inf")
