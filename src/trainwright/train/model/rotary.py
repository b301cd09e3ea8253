"""Rotary position embedding (RoFormer, arXiv:2104.09864) in the half-split form that Llama checkpoints use.

Angle of position s and frequency i is s * theta^(-2i/d). Under `llama3` scaling (Llama 3.1, arXiv:2407.21783)
low frequencies are divided by `factor`, high ones kept, and a linear ramp joins them; `linear` divides all; `yarn`
(arXiv:2309.00071 s3) has its ramp along the pairs and not along the frequencies, and lengthens what it turns, so
that softmax is as sharp over a longer context as it was. A `fraction` below 1 turns the first part of each head
and leaves the rest as it is (GPT-NeoX).
"""

import math

import torch

from trainwright.spec.model import Rope, RopeScaling


def frequencies(rope: Rope, d_head: int) -> torch.Tensor:
    """Angle per position of each turned pair, in float64; half as many as widths that are turned."""
    turned = turned_width(rope, d_head)
    frequency = rope.theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    if rope.scaling is None:
        return frequency
    if rope.scaling.kind == "yarn":
        kept = _kept_by_yarn(rope.theta, rope.scaling, turned)
        return frequency * (kept + (1 - kept) / rope.scaling.factor)
    return _scaled(frequency, rope.scaling)


def amplitude(scaling: RopeScaling | None) -> float:
    """What turned values are multiplied by: yarn's sqrt(1/t) = 0.1 * ln(factor) + 1 (arXiv:2309.00071 eq. 22), or
    that with `mscale` over that with `mscale_all_dim` (DeepSeek-V2's modeling code)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return _mscale(scaling.factor, 1.0)
    return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)


def sharpened(scaling: RopeScaling | None) -> float:
    """What latent attention's scores are multiplied by on top: `mscale_all_dim` is for the widths of a head that
    aren't turned too, so it enters twice, for queries and keys (DeepSeek-V2's modeling code)."""
    if scaling is None or scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def turned_width(rope: Rope, d_head: int) -> int:
    """Widths of a head that carry a position, an even number."""
    return int(d_head * rope.fraction) // 2 * 2


class Rotary:
    """Tables of cosine and sine, made for the lengths, types and devices that are asked for, and kept.

    `held` are the positions of a sequence's tokens, where they aren't the first ones."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.held: torch.Tensor | None = None
        self._tables: dict[tuple[int, int, torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x_BNSH: torch.Tensor) -> torch.Tensor:
        """`x_BNSH` with each position's angles applied."""
        seq_len, d_head = x_BNSH.shape[2:]
        return rotate(x_BNSH, *self.tables(seq_len, d_head, x_BNSH))

    def tables(self, seq_len: int, d_head: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every position and width, of the type and on the device of `like`."""
        key = (seq_len, d_head, like.dtype, like.device)
        if key not in self._tables:
            position_S = torch.arange(seq_len) if self.held is None else self.held
            assert len(position_S) == seq_len
            angle_SH = torch.outer(position_S.double(), frequencies(self.rope, d_head))
            angle_SH = torch.cat((angle_SH, angle_SH), dim=-1)
            long = amplitude(self.rope.scaling)
            self._tables[key] = ((long * angle_SH.cos()).to(like), (long * angle_SH.sin()).to(like))
        return self._tables[key]


def rotate(x_BNSH: torch.Tensor, cosine_SH: torch.Tensor, sine_SH: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + half) of the first widths by its position's angle."""
    turned = cosine_SH.shape[-1]
    moving, still = x_BNSH[..., :turned], x_BNSH[..., turned:]
    first, second = moving.chunk(2, dim=-1)
    moving = moving * cosine_SH + torch.cat((-second, first), dim=-1) * sine_SH
    return moving if turned == x_BNSH.shape[-1] else torch.cat((moving, still), dim=-1)


def _scaled(frequency: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (kept + (1 - kept) / scaling.factor)


def _kept_by_yarn(theta: float, scaling: RopeScaling, turned: int) -> torch.Tensor:
    """Of each pair the share that keeps its frequency: 1 for those that turn more than beta_fast times over the
    original length, 0 for those below beta_slow turns, and a ramp between the two (arXiv:2309.00071 s3.2)."""

    def pair(turns: float) -> float:
        """The pair, a fractional one, that turns so often over the original length."""
        return turned * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    if first == last:
        last += 0.001  # A step, as in the reference implementation.
    ramp = (torch.arange(turned // 2, dtype=torch.float64) - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
