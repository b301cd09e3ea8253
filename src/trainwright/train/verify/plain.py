"""The plain program that every layout answers to: the whole model on one device, a textbook loop, float64.

It shares the page of the model, the loss and the initial weights with the trainer, and nothing of what spreads
them: no group, no schedule, no shard, and PyTorch's own clipping and AdamW. Muon is written out; what is shared of
it is the orthogonal factor of a matrix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from trainwright.spec.layout import Layout
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.data import IGNORED
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.mesh import Mesh
from trainwright.train.model.dropout import Dropping, drop_branches, use_unfused_cores
from trainwright.train.model.experts import mixtures, set_routing
from trainwright.train.model.initialize import initial_value
from trainwright.train.model.later_tokens import shifted
from trainwright.train.model.routing import moved_bias
from trainwright.train.model.transformer import Transformer
from trainwright.train.optimizer import is_decayed
from trainwright.train.precision.apply import LowPrecisionLayers
from trainwright.train.updates import MUON_MOMENTUM, RMS_OF_ADAMW, orthogonalized


class Sample(NamedTuple):
    """One sequence, (S) each, and its number among those of all steps."""

    number: int
    inputs_S: torch.Tensor
    targets_S: torch.Tensor
    documents_S: torch.Tensor | None = None
    """The number of each token's document, where tokens see their own alone."""


@dataclass(frozen=True)
class PlainStep:
    """What one step of the plain program gives, by the names of the whole model's parameters."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    """Before clipping."""
    weights: dict[str, torch.Tensor]
    """After the update; the biases that steer the choice of experts are among them."""


class PlainProgram:
    """The run as a program for one device; `step` by step. In a run with low-precision matmuls their operands have
    few bits, and all else is float64."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.model = plain_model(run, torch.float64)
        self._low_precision = None
        if run.recipe.low_precision is not None:
            alone = run.recipe.changed(zero=0, reshard_after_forward=True, dp_replicate=1, gather_fp8=False)
            self._low_precision = LowPrecisionLayers(alone, Mesh(Layout(), 0, torch.device("cpu")), Clock())
            self._low_precision.apply(self.model, frozenset())
        self._dropping = Dropping(run.recipe.dropout, run.recipe.seed, torch.zeros(1, dtype=torch.int64))
        if run.recipe.dropout:
            use_unfused_cores(self.model, self._dropping)
            drop_branches(self.model, self._dropping)
        choice = run.recipe.optimizer
        matrices = {each: name for name, each in self.model.named_parameters() if is_decayed(name, each)}
        hidden = [each for each, name in matrices.items() if name.startswith("layers.")]
        self._momentum = {each: torch.zeros_like(each) for each in hidden} if choice.name == "muon" else {}
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [each for each in matrices if each not in self._momentum]},
                {
                    "params": [each for each in self.model.parameters() if each not in matrices],
                    "weight_decay": 0.0,
                },
            ],
            weight_decay=choice.weight_decay,
            betas=(choice.beta1, choice.beta2),
            eps=choice.epsilon,
            foreach=False,
        )

    def step(self, samples: Sequence[Sample], lr: float) -> PlainStep:
        """One step on all sequences of the global batch."""
        count = sum(int((each.targets_S != IGNORED).sum()) for each in samples)
        loss, extra = torch.zeros(2, dtype=torch.float64)
        recipe = self._run.recipe
        for number, inputs_S, targets_S, documents_S in samples:
            self._dropping.samples_B = torch.tensor([number])
            if self._low_precision is not None:
                self._low_precision.under_way.samples_B = torch.tensor([number])
            documents_BS = None if documents_S is None else documents_S[None]
            depth = self._run.model.mtp_depth
            later_BS = [shifted(inputs_S[None], further, filler=0) for further in range(1, depth + 1)]
            logits = self.model(inputs_S[None], documents_BS, later_BS)
            of_each = logits if isinstance(logits, tuple) else (logits,)
            for further, logits_BSV in enumerate(of_each):
                targets_BS = shifted(targets_S[None], further, filler=IGNORED)
                entropy = summed_cross_entropy(logits_BSV, targets_BS) / count
                log_total_T = torch.logsumexp(logits_BSV, dim=-1)[targets_BS != IGNORED]
                penalty = recipe.z_loss * (log_total_T**2).sum() / count
                if further == 0:
                    loss, extra = loss + entropy, extra + penalty
                else:
                    extra = extra + (entropy + penalty) * recipe.mtp_loss_weight / self._run.model.mtp_depth
        self.model.zero_grad()
        (loss + extra).backward()
        named = list(self.model.named_parameters())
        gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
        largest = self._run.recipe.grad_clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._muon(lr)
        if self._low_precision is not None:
            self._low_precision.after_update()
        weights = {name: each.detach().clone() for name, each in [*named, *self._moved_biases()]}
        return PlainStep(float(loss.detach()), float(norm), gradients, weights)

    @torch.no_grad()
    def _moved_biases(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The biases that steer the choice of experts, moved by the loads of the step, which are counted anew."""
        for name, mixture in mixtures(self.model):
            if mixture.balance_bias is not None:
                moved = moved_bias(mixture.balance_bias, mixture.load_X, self._run.recipe.balance_rate)
                mixture.balance_bias.copy_(moved)
                mixture.load_X.zero_()
                yield f"{name}.balance_bias", mixture.balance_bias

    @torch.no_grad()
    def _muon(self, lr: float) -> None:
        """Nesterov's momentum, its orthogonal factor at AdamW's size (arXiv:2502.16982 s2.2), decay."""
        for matrix, momentum in self._momentum.items():
            assert matrix.grad is not None
            momentum.mul_(MUON_MOMENTUM).add_(matrix.grad)
            direction = orthogonalized(matrix.grad + MUON_MOMENTUM * momentum)
            matrix.mul_(1 - lr * self._run.recipe.optimizer.weight_decay)
            matrix.sub_(direction, alpha=lr * RMS_OF_ADAMW * max(matrix.shape[-2:]) ** 0.5)


def plain_model(run: Run, dtype: torch.dtype) -> Transformer:
    """The whole model on one device, with the initial weights that every layout starts from."""
    model = Transformer(run.model).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(run.model, run.recipe.seed, name, parameter.shape, dtype))
    model.tie()
    set_routing(model, run.recipe)
    return model
