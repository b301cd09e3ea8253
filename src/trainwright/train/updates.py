"""The optimizers that PyTorch doesn't have in the form that we need: AdamW with moments of few bits, and Muon.

Muon (github.com/KellerJordan/Muon) moves a matrix by the orthogonal factor of its momentum, which five
Newton-Schulz iterations approach, and keeps one moment. It is scaled to AdamW's usual size of an update, so that
both take the same learning rate and decay (Moonlight, arXiv:2502.16982 s2.2); what is no matrix of a layer is
AdamW's.

An update works on this rank's part of each parameter, one parameter at a time. Only the orthogonal factor needs
the whole matrix: each rank that has a part of it gathers the momentum, over tp and dp, and iterates for itself, in
bf16 (in float64 where the run is).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainwright.train.moments import MOMENT_FORMATS
from trainwright.train.parallel.local import local_of

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
"""All three of github.com/KellerJordan/Muon, as in torch.optim.Muon; the momentum is Nesterov's."""
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's usual update (arXiv:2502.16982 s2.2)."""

Group = dict[str, Any]


class Updates(torch.optim.Optimizer):
    """Moves groups of parameters, each by its `rule` of `RULES`. A group is a dict of `params`, `rule`, `lr`,
    `betas`, `eps`, `weight_decay` and `moments`, the format that moments are kept in."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {"steps_done": 0})
        self._parts: dict[torch.Tensor, _Part] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps_done"] += 1
            for parameter in group["params"]:
                if parameter not in self._parts:
                    self._parts[parameter] = _Part(parameter, self.state[parameter], group["moments"])
                RULES[group["rule"]](self._parts[parameter], group)


class _Part:
    """This rank's part of a parameter, and its moments by name in the format that they are kept in."""

    def __init__(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], moments: str) -> None:
        self.parameter, self.own = parameter, local_of(parameter)
        self._state, self._format = state, MOMENT_FORMATS[moments]

    @property
    def gradient(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return local_of(self.parameter.grad).to(self.own.dtype)

    def read(self, name: str, *, is_signed: bool = True) -> torch.Tensor:
        if name not in self._state:
            return torch.zeros_like(self.own)
        kept = tuple(self._state[key] for key in (name, f"{name}_scale") if key in self._state)
        return self._format.unpack(kept, self.own.dtype, is_signed).view_as(self.own)

    def write(self, name: str, moment: torch.Tensor, *, is_signed: bool = True) -> None:
        kept = self._format.pack(moment.reshape(-1), is_signed)
        self._state.update(zip((name, f"{name}_scale"), kept, strict=False))

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which `own` is this rank's part, cut as the parameter is."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return own
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        part = DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False, **shape)
        return part.full_tensor()

    @functools.cached_property
    def place(self) -> tuple[slice, ...]:
        """Where the part lies in the whole, a block: found by gathering who has what."""
        if not isinstance(self.parameter, DTensor):
            return tuple(slice(0, size) for size in self.own.shape)
        rank = dist.get_rank()
        mine = (self.whole(torch.full_like(self.own, rank, dtype=torch.int32)) == rank).nonzero()
        first = mine[0].tolist() if len(mine) else [0] * self.own.ndim
        return tuple(slice(start, start + size) for start, size in zip(first, self.own.shape, strict=True))


def _adamw(part: _Part, group: Group) -> None:
    """arXiv:1711.05101, as torch.optim.AdamW computes it."""
    gradient, (beta1, beta2) = part.gradient, group["betas"]
    first = part.read("first").lerp_(gradient, 1 - beta1)
    second = part.read("second", is_signed=False).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    part.write("first", first)
    part.write("second", second, is_signed=False)
    correction1, correction2 = (1 - beta ** group["steps_done"] for beta in (beta1, beta2))
    part.own.mul_(1 - group["lr"] * group["weight_decay"])
    size = (second.sqrt() / math.sqrt(correction2)).add_(group["eps"])
    part.own.addcdiv_(first, size, value=-group["lr"] / correction1)


def _muon(part: _Part, group: Group) -> None:
    gradient = part.gradient
    momentum = part.read("first").mul_(MUON_MOMENTUM).add_(gradient)
    part.write("first", momentum)
    direction = orthogonalized(part.whole(gradient.add(momentum, alpha=MUON_MOMENTUM)))
    part.own.mul_(1 - group["lr"] * group["weight_decay"])
    scale = group["lr"] * RMS_OF_ADAMW * math.sqrt(max(part.parameter.shape[-2:]))
    part.own.add_(direction[part.place].to(part.own.dtype), alpha=-scale)


RULES: dict[str, Callable[[_Part, Group], None]] = {"adamw": _adamw, "muon": _muon}


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Near U V^T of the (..., a, b) matrix U S V^T: singular values come to lie about 1, from 0.7 to 1.2. In bf16,
    or float64 where the matrix is."""
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
