"""Rotary position embedding (RoFormer, arXiv:2104.09864) in the half-split form that Llama checkpoints use.

Angle of position s and frequency i is s * theta^(-2i/d). Under `llama3` scaling (Llama 3.1, arXiv:2407.21783)
low frequencies are divided by `factor`, high ones kept, and a linear ramp joins them; `linear` divides all. A
`fraction` below 1 turns the first part of each head and leaves the rest as it is (GPT-NeoX).
"""

import math

import torch

from trainwright.spec.model import Rope, RopeScaling


def frequencies(rope: Rope, d_head: int) -> torch.Tensor:
    """Angle per position of each turned pair, in float64; half as many as widths that are turned."""
    turned = turned_width(rope, d_head)
    frequency = rope.theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    return frequency if rope.scaling is None else _scaled(frequency, rope.scaling)


def turned_width(rope: Rope, d_head: int) -> int:
    """Widths of a head that carry a position, an even number."""
    return int(d_head * rope.fraction) // 2 * 2


class Rotary:
    """Tables of cosine and sine, made for the lengths, types and devices that are asked for, and kept.

    `positions` are those of a sequence's tokens, where they aren't the first ones."""

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.positions: torch.Tensor | None = None
        self._tables: dict[tuple[torch.Size, torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x_BNSH: torch.Tensor) -> torch.Tensor:
        """`x_BNSH` with each position's angles applied."""
        key = (x_BNSH.shape[2:], x_BNSH.dtype, x_BNSH.device)
        if key not in self._tables:
            seq_len, d_head = key[0]
            position_S = torch.arange(seq_len) if self.positions is None else self.positions
            assert len(position_S) == seq_len
            angle_SH = torch.outer(position_S.double(), frequencies(self.rope, d_head))
            angle_SH = torch.cat((angle_SH, angle_SH), dim=-1)
            self._tables[key] = (angle_SH.cos().to(x_BNSH), angle_SH.sin().to(x_BNSH))
        return rotate(x_BNSH, *self._tables[key])


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
