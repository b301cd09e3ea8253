"""The plain program that every layout answers to: the whole model on one device, a textbook loop, float64.

It shares the page of the model, the loss and the initial weights with the trainer, and nothing of what spreads
them: no group, no schedule, no shard, and PyTorch's own clipping and AdamW.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainwright.spec.run import Run
from trainwright.train.data import IGNORED
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.model.initialize import initial_value
from trainwright.train.model.transformer import Transformer

Sequences = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Inputs and targets (S) of each sequence of a step, over all ranks."""


@dataclass(frozen=True)
class PlainStep:
    """What one step of the plain program gives, by the names of the whole model's parameters."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    """Before clipping."""
    weights: dict[str, torch.Tensor]
    """After the update."""


class PlainProgram:
    """The run as a program for one device; `step` by step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.model = plain_model(run, torch.float64)
        choice = run.recipe.optimizer
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [each for each in self.model.parameters() if each.ndim >= 2]},
                {"params": [each for each in self.model.parameters() if each.ndim < 2], "weight_decay": 0.0},
            ],
            weight_decay=choice.weight_decay,
            betas=(choice.beta1, choice.beta2),
            eps=choice.epsilon,
            foreach=False,
        )

    def step(self, sequences: Sequences, lr: float) -> PlainStep:
        """One step on all sequences of the global batch."""
        count = sum(int((targets_S != IGNORED).sum()) for _, targets_S in sequences)
        loss = torch.zeros((), dtype=torch.float64)
        for inputs_S, targets_S in sequences:
            loss = loss + summed_cross_entropy(self.model(inputs_S[None]), targets_S[None]) / count
        self._optimizer.zero_grad()
        loss.backward()
        named = list(self.model.named_parameters())
        gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
        largest = self._run.recipe.grad_clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        weights = {name: each.detach().clone() for name, each in named}
        return PlainStep(float(loss.detach()), float(norm), gradients, weights)


def plain_model(run: Run, dtype: torch.dtype) -> Transformer:
    """The whole model on one device, with the initial weights that every layout starts from."""
    model = Transformer(run.model).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(run.model, run.recipe.seed, name, parameter.shape, dtype))
    model.tie()
    return model
