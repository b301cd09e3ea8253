"""Silent corruption: state that several ranks hold has one digest, so ranks hold theirs against one another.

Replicas of dp, cp and HSDP, and norms under tp, are the same to the bit, as their updates follow from the same
sums. A bit that flips in one of them stays, and steers all ranks through the next sum. Digests of all blocks that
the same ranks hold are folded into one, and one small gather compares them; only where they differ are blocks
compared one by one, to name the tensor. Where three or more hold it, the one that differs from the most is named;
of two, both are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from trainwright.train.checkpoint.state import Held, held_blocks
from trainwright.train.faults.reasons import Corrupt
from trainwright.train.parallelize import Trainer

Key = tuple[str, tuple[int, ...]]


@dataclass
class Replicas:
    """Of a run's state, compared by all ranks alike."""

    trainer: Trainer
    _holders: dict[Key, tuple[int, ...]] | None = None
    """Of this rank's blocks: all ranks with the same."""

    def compare(self, step: int) -> None:
        """Raises `Corrupt`, on all ranks, where some rank's state differs from that of its replicas."""
        held = {each.key: each for each in held_blocks(self.trainer)}
        if self._holders is None or self._holders.keys() != held.keys():
            self._holders = holders(self._of_all(list(held)), self.trainer.mesh.rank)
        hashes: dict[tuple[int, ...], Any] = {}
        for key, ranks in sorted(self._holders.items()):
            if len(ranks) > 1:
                hashes.setdefault(ranks, xxhash.xxh3_64()).update(bytes_of(held[key]))
        seen = self._of_all({ranks: each.hexdigest() for ranks, each in hashes.items()})
        if odd_ones(seen).ranks is None:
            return
        # One by one, to name the tensor.
        digests = {key: xxhash.xxh3_64_hexdigest(bytes_of(held[key])) for key in held}
        found = odd_ones(self._of_all({(key, self._holders[key]): digest for key, digest in digests.items()}))
        raise Corrupt(f"step {step}: {found.text}", found.ranks or ())

    def _of_all(self, value: Any) -> list[Any]:
        if self.trainer.mesh.layout.world == 1:
            return [value]
        values: list[Any] = [None] * self.trainer.mesh.layout.world
        dist.all_gather_object(values, value)
        return values


def holders(keys_of_ranks: Sequence[Sequence[Key]], rank: int) -> dict[Key, tuple[int, ...]]:
    """Of each block of `rank`, the ranks that hold it too."""
    found: dict[Key, list[int]] = {}
    for other, keys in enumerate(keys_of_ranks):
        for key in keys:
            found.setdefault(key, []).append(other)
    return {key: tuple(found[key]) for key in keys_of_ranks[rank]}


@dataclass(frozen=True)
class Difference:
    """`ranks` None: there is none; empty: it can't be told whose is wrong."""

    ranks: tuple[int, ...] | None
    text: str = ""


def odd_ones(digests_of_ranks: Sequence[Mapping[Any, str]]) -> Difference:
    """Who differs from the most that hold the same, and in what."""
    found: dict[Any, dict[int, str]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for key, digest in digests.items():
            found.setdefault(key, {})[rank] = digest
    for key, by_rank in sorted(found.items(), key=lambda each: str(each[0])):
        counts = Counter(by_rank.values())
        if len(counts) < 2:
            continue
        name = key[0][0] if isinstance(key[0], tuple) else "state"
        (most, number), (_, next_number), *_ = counts.most_common()
        if number == next_number:
            ranks = ", ".join(map(str, by_rank))
            return Difference((), f"{name} is not the same on ranks {ranks}, and which is right can't be told")
        odd = tuple(rank for rank, digest in by_rank.items() if digest != most)
        others = ", ".join(str(rank) for rank in by_rank if rank not in odd)
        text = f"{name} of rank {', '.join(map(str, odd))} differs from that of its replicas, ranks {others}"
        return Difference(odd, text)
    return Difference(None)


def bytes_of(held: Held) -> memoryview:
    """The bytes of a block, in the order of its values."""
    values = held.values.detach().contiguous().cpu()
    return values.view(-1).view(torch.uint8).numpy().data
