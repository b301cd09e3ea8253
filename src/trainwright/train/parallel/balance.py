"""Auxiliary-loss-free balancing of experts (arXiv:2408.15664): after each step the bias that steers their choice
is moved by what every rank of the stage has counted.

Counts are whole numbers, so that the bias is the same on all ranks and in every layout, to the bit. It is kept in
the precision of master weights, whatever the piece computes in, and stands in no gradient, clip or optimizer.
"""

import torch
import torch.distributed as dist

from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import mixtures
from trainwright.train.model.routing import moved_bias
from trainwright.train.model.transformer import Transformer

AXES = ("tp", "cp", "dp")
"""Over which tokens, or parts of sequences, are shared out among ranks with the same layers; over the two ranks of
`twins` too, where a stage is held twice."""


class Balance:
    """The balance biases of this rank's pieces, which begin at zero."""

    def __init__(
        self, pieces: list[Transformer], mesh: Mesh, dtype: torch.dtype, rate: float, *, has_twin: bool
    ) -> None:
        self._mesh, self._rate = mesh, rate
        self._axes = (*AXES, "twins") if has_twin else AXES
        named = [each for piece in pieces for each in mixtures(piece) if each[1].balance_bias is not None]
        # Twins have their chunks in opposite order, so names decide.
        self._mixtures = [mixture for _, mixture in sorted(named, key=lambda each: each[0])]
        for piece in pieces:
            for _, mixture in mixtures(piece):
                experts = mixture.mlp.num_experts
                mixture.load_X = torch.zeros(experts, dtype=torch.int64, device=mesh.device)
                if mixture.balance_bias is not None:
                    mixture.balance_bias = torch.zeros(experts, dtype=dtype, device=mesh.device)

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the biases by the loads of the step, and begin to count anew."""
        if not self._mixtures:
            return
        # Layers may have different numbers of experts, so end to end.
        loads = torch.cat([mixture.load_X for mixture in self._mixtures])
        for axis in self._axes:
            if axis in self._mesh.groups:
                dist.all_reduce(loads, group=self._mesh.groups[axis])
        parts = loads.split([len(mixture.load_X) for mixture in self._mixtures])
        for mixture, load_X in zip(self._mixtures, parts, strict=True):
            assert mixture.balance_bias is not None
            mixture.balance_bias.copy_(moved_bias(mixture.balance_bias, load_X, self._rate))
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the loads that were counted."""
        for mixture in self._mixtures:
            mixture.load_X.zero_()
