"""Which tokens a step sees: a function of the seed and the global sample number, never of the layout.

The stream of tokens is cut into windows of seq_len + 1 that overlap by one token, so that each token is a
target once per epoch. Sample i of epoch e is window P(i), with P a permutation of the windows that is keyed by
(seed, e) and evaluated point by point: a Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers
with arbitrary finite domains", s2), so that a trillion tokens need no shuffled list. Step t takes the samples
t * global_batch and on; each data-parallel rank takes its contiguous part of them.

A window holds documents end to end, cut where it begins and ends. Where a token is to see its own document alone,
a batch says for each token which one it is in.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainwright.spec.errors import reject
from trainwright.train.model.later_tokens import shifted
from trainwright.train.shards import Shards


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's part of one step, by microbatch."""

    inputs_BS: list[torch.Tensor]
    """Of whole samples, as are all tensors here."""
    targets_BS: list[torch.Tensor]
    """`IGNORED` marks positions without a target."""
    global_tokens: int
    """Targets of the step over all ranks: what the summed loss is divided by."""
    documents_BS: list[torch.Tensor] | None = None
    """The number of each input's document in its sample; None where all are seen."""
    first_sample: int = 0
    """Global number of the first sequence; the others of this rank follow it."""
    positions: torch.Tensor | None = None
    """Those of each sample that this rank works on; None: all."""

    def samples_B(self, microbatch: int) -> torch.Tensor:
        """Global numbers of a microbatch's sequences."""
        before = sum(len(each) for each in self.inputs_BS[:microbatch])
        return torch.arange(len(self.inputs_BS[microbatch])) + (self.first_sample + before)

    def at(self, positions: torch.Tensor) -> "Batch":
        """The same samples, of which this rank works on some positions alone."""
        return replace(self, positions=positions)

    def inputs(self, microbatch: int, further: int = 0) -> torch.Tensor:
        """At each of this rank's positions, (B, S), the token that stands `further` on in its sample, whoever
        works on that position; token 0 where there is none."""
        return self._here(self.inputs_BS[microbatch], further, filler=0)

    def targets(self, microbatch: int, further: int = 0) -> torch.Tensor:
        """The same of targets; `IGNORED` where there is none."""
        return self._here(self.targets_BS[microbatch], further, filler=IGNORED)

    def _here(self, tokens_BS: torch.Tensor, further: int, filler: int) -> torch.Tensor:
        tokens_BS = shifted(tokens_BS, further, filler)
        return tokens_BS if self.positions is None else tokens_BS[:, self.positions]


IGNORED = -100
"""Target that no loss is taken of; PyTorch's default for `ignore_index`."""


@dataclass(frozen=True)
class PackedDataset:
    """Windows of a token stream in a shuffled order that only `seed` decides."""

    shards: Shards
    seq_len: int
    seed: int
    end_of_document: int | None = None
    """The token after which tokens see no earlier one; None where they see all."""

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            reject(
                "data.path",
                str(self.shards.directory),
                f"holds {self.shards.num_tokens} tokens, which is less than one sample of "
                f"seq_len+1={self.seq_len + 1}; add data or lower recipe.seq_len",
            )

    @property
    def num_windows(self) -> int:
        return (self.shards.num_tokens - 1) // self.seq_len

    def sample(self, number: int) -> np.ndarray:
        """Tokens (seq_len + 1) of global sample `number`, counted through all epochs."""
        epoch, position = divmod(number, self.num_windows)
        window = permuted(position, self.num_windows, f"{self.seed}/{epoch}")
        return self.shards.window(window * self.seq_len, self.seq_len + 1)

    def batch(
        self, step: int, *, global_batch: int, micro_batch: int, dp_rank: int, dp: int, origin: int = 0
    ) -> Batch:
        """What data-parallel rank `dp_rank` of `dp` trains on in step `step`, counted from 0, where step 0 begins
        with sample `origin` (which is below 0 where earlier steps were smaller)."""
        per_rank = global_batch // dp
        first = origin + step * global_batch + dp_rank * per_rank
        tokens = torch.from_numpy(np.stack([self.sample(first + at) for at in range(per_rank)]))
        inputs_BS = tokens[:, :-1].contiguous()
        documents_BS = None if self.end_of_document is None else documents_of(inputs_BS, self.end_of_document)
        return Batch(
            inputs_BS=list(inputs_BS.split(micro_batch)),
            targets_BS=list(tokens[:, 1:].contiguous().split(micro_batch)),
            global_tokens=global_batch * self.seq_len,
            documents_BS=None if documents_BS is None else list(documents_BS.split(micro_batch)),
            first_sample=first,
        )


def documents_of(inputs_BS: torch.Tensor, end_of_document: int) -> torch.Tensor:
    """The number of each token's document in its sample, from 0; an end is part of what it ends."""
    is_end_BS = inputs_BS == end_of_document
    return is_end_BS.cumsum(dim=1) - is_end_BS.long()


def permuted(position: int, size: int, key: str) -> int:
    """Where a permutation of range(size), chosen by `key`, sends `position`."""
    half_bits = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        position = left << half_bits | right
        if position < size:
            return position
