"""Context parallelism in which keys and values travel: each rank attends to one rank's part after the other, and
adds up (`parallel/blocks.py`).

What is kept for backward are the rank's own queries, keys and values, the output and its lse; keys and values of
the others come once more then, and their gradients go home, where they are summed. By `all_gather` all parts come
in one collective and gradients go in one; by `ring` a part is passed on while it is attended to, so that two are
here at a time, and its gradient follows it round and ends at home.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from trainwright.train.collectives import all_gather, reduce_scatter
from trainwright.train.parallel.blocks import Merged, Seen, block_backward, block_forward
from trainwright.train.parallel.positions import Context
from trainwright.train.parallel.ring import Passing, Ring

Part = tuple[int, torch.Tensor]
"""A rank, and its keys and values side by side, (B, K, S, H of both)."""


def travelling(
    context: Context,
    method: str,
    again: bool,
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    sliding_window: int | None,
    scale: float | None,
    documents_BS: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention core; `again` computes output and lse once more in backward instead of keeping them.
    documents_BS: of the whole sequence."""
    assert softcap is None, "the door refuses it"
    assert sinks_N is None, "the door refuses them"
    scale = 1 / math.sqrt(query_BNSH.shape[-1]) if scale is None else scale
    core = _Core(context, method, again, sliding_window, scale, documents_BS)
    return _Travelling.apply(query_BNSH, key_BKSH, value_BKSH, core)  # pyright: ignore[reportReturnType]


class Block(NamedTuple):
    """Some of the rank's queries, some keys of a part, and which of them are seen."""

    queries: slice
    keys: slice
    seen: Seen


def blocks(rank: int, source: int, size: int, positions: int, window: int | None) -> Iterator[Block]:
    """What queries of `rank` see of the part of rank `source`, each with two chunks of its `positions`. A query's
    own key is in the first block that it is in."""
    whole, chunk = slice(None), positions // 2
    halves = (slice(chunk), slice(chunk, None))
    if window is None:
        if source == rank:
            yield Block(whole, whole, "causal")
        elif source < rank:
            yield Block(whole, halves[0], "all")
        else:
            yield Block(halves[1], whole, "all")
        return
    for late, queries in zip((rank, 2 * size - 1 - rank), halves, strict=True):
        for early, keys in reversed(list(zip((source, 2 * size - 1 - source), halves, strict=True))):
            apart = (late - early) * chunk
            if apart < 0 or apart - chunk + 1 >= window:
                continue
            if apart == 0 and window >= chunk:
                yield Block(queries, keys, "causal")
            elif apart > 0 and apart + chunk <= window:
                yield Block(queries, keys, "all")
            else:
                place = torch.arange(chunk)
                distance_SS = apart + place[:, None] - place[None, :]
                yield Block(queries, keys, (distance_SS >= 0) & (distance_SS < window))


class _Core(NamedTuple):
    context: Context
    method: str
    again: bool
    sliding_window: int | None
    scale: float
    documents_BS: torch.Tensor | None

    def parts(self, own: torch.Tensor) -> "Gathered | PassedRound":
        return (Gathered if self.method == "all_gather" else PassedRound)(self.context, own)

    def blocks(self, source: int, query_BNSH: torch.Tensor) -> Iterator[Block]:
        context, positions = self.context, query_BNSH.shape[2]
        for block in blocks(context.rank, source, context.size, positions, self.sliding_window):
            queries, keys, seen = block
            if self.documents_BS is not None:
                mine_BS, theirs_BS = self._documents(context.rank)[:, queries], self._documents(source)[:, keys]
                same_BSS = mine_BS[:, :, None] == theirs_BS[:, None, :]
                if isinstance(seen, str):
                    seen = same_BSS.tril() if seen == "causal" else same_BSS
                else:
                    seen = same_BSS & seen.to(same_BSS.device)
                seen = seen[:, None, None]
            yield Block(queries, keys, seen.to(query_BNSH.device) if isinstance(seen, torch.Tensor) else seen)

    def _documents(self, rank: int) -> torch.Tensor:
        """Of the positions that `rank` holds."""
        assert self.documents_BS is not None
        size = self.context.size
        return self.documents_BS.unflatten(1, (2 * size, -1))[:, [rank, 2 * size - 1 - rank]].flatten(1, 2)

    def forward(self, query_BNSH: torch.Tensor, parts: "Parts", d_key: int) -> tuple[torch.Tensor, torch.Tensor]:
        merged: Merged | None = None
        for source, part in parts:
            key_BKSH, value_BKSH = part[..., :d_key], part[..., d_key:]
            merged = merged or Merged(query_BNSH, value_BKSH.shape[-1])
            for queries, keys, seen in self.blocks(source, query_BNSH):
                block = query_BNSH[:, :, queries], key_BKSH[:, :, keys], value_BKSH[:, :, keys]
                merged.add(queries, *block_forward(*block, seen, self.scale))
        assert merged is not None
        return merged.result()


class _Travelling(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_BNSH: torch.Tensor, key_BKSH: torch.Tensor, value_BKSH: torch.Tensor, core: _Core
    ) -> torch.Tensor:
        parts = core.parts(torch.cat((key_BKSH, value_BKSH), dim=-1))
        out_BNSH, lse_BNS = core.forward(query_BNSH, parts, key_BKSH.shape[-1])
        results = () if core.again else (out_BNSH, lse_BNS)
        ctx.save_for_backward(query_BNSH, key_BKSH, value_BKSH, *results)
        ctx.core = core
        return out_BNSH

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        core: _Core = ctx.core
        query_BNSH, key_BKSH, value_BKSH, *results = ctx.saved_tensors
        d_key = key_BKSH.shape[-1]
        parts = core.parts(torch.cat((key_BKSH, value_BKSH), dim=-1))
        out_BNSH, lse_BNS = results or core.forward(query_BNSH, parts, d_key)
        d_query_BNSH = lse_BNS.new_zeros(query_BNSH.shape)
        returns = parts.returns()
        for source, part in parts:
            d_part = torch.zeros_like(part)
            for queries, keys, seen in core.blocks(source, query_BNSH):
                d_queries, d_keys, d_values = block_backward(
                    gradients[0][:, :, queries],
                    query_BNSH[:, :, queries],
                    part[:, :, keys, :d_key],
                    part[:, :, keys, d_key:],
                    out_BNSH[:, :, queries],
                    lse_BNS[:, :, queries],
                    seen,
                    core.scale,
                )
                d_query_BNSH[:, :, queries] += d_queries
                d_part[:, :, keys, :d_key] += d_keys
                d_part[:, :, keys, d_key:] += d_values
            returns.give(source, d_part)
        d_key_BKSH, d_value_BKSH = returns.own().split((d_key, value_BKSH.shape[-1]), dim=-1)
        return d_query_BNSH.to(query_BNSH.dtype), d_key_BKSH, d_value_BKSH, None


class Returns(Protocol):
    """Takes the gradients of every rank's part home."""

    def give(self, source: int, gradient: torch.Tensor) -> None:
        """This rank's gradient of `source`'s part, in the order in which parts came."""
        ...

    def own(self) -> torch.Tensor:
        """The sum of all ranks' gradients of this rank's part."""
        ...


class Parts(Protocol):
    """Keys and values of all ranks, this rank's first; all ranks go through them together."""

    def __iter__(self) -> Iterator[Part]: ...

    def returns(self) -> Returns: ...


class Gathered:
    """All parts at once."""

    def __init__(self, context: Context, own: torch.Tensor) -> None:
        self._context = context
        whole = own.new_empty((context.size * own.shape[0], *own.shape[1:]))
        with context.clock.of("cp"):
            all_gather(whole, own.contiguous(), group=context.group)
        self._parts = whole.unflatten(0, (context.size, -1))

    def __iter__(self) -> Iterator[Part]:
        for step in range(self._context.size):
            source = (self._context.rank - step) % self._context.size
            yield source, self._parts[source]

    def returns(self) -> Returns:
        return _Scattered(self._context, torch.empty_like(self._parts))


class _Scattered:
    def __init__(self, context: Context, parts: torch.Tensor) -> None:
        self._context, self._parts = context, parts

    def give(self, source: int, gradient: torch.Tensor) -> None:
        self._parts[source] = gradient

    def own(self) -> torch.Tensor:
        total = torch.empty_like(self._parts[0])
        with self._context.clock.of("cp"):
            reduce_scatter(total, self._parts.flatten(0, 1), group=self._context.group)
        return total


class PassedRound:
    """One part after the other: to the next rank goes what came from the one before, while it is used here."""

    def __init__(self, context: Context, own: torch.Tensor) -> None:
        self._ring, self._own = Ring(context.group, context.clock, "cp"), own

    def __iter__(self) -> Iterator[Part]:
        return self._ring.parts(self._own)

    def returns(self) -> Returns:
        return _Followed(self._ring)


class _Followed:
    """Each gradient goes where its part goes next, and takes up that rank's share there; from the last rank it is
    one step home."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._own: torch.Tensor | None = None
        self._coming: Passing | None = None

    def give(self, source: int, gradient: torch.Tensor) -> None:
        if source == self._ring.rank:
            self._own = gradient
            return
        if self._coming is not None:
            gradient += self._coming.arrived()
        self._coming = Passing(self._ring, gradient, tag=1)

    def own(self) -> torch.Tensor:
        assert self._own is not None
        assert self._coming is not None
        return self._own.add_(self._coming.arrived())
