"""The words that schedules are written in: acts, rows, and which stage each chunk of a rank is.

A rank holds `vpp` chunks of the model. A placement says which stages they are, `[rank][chunk]`; an activation goes
from stage to stage, wherever they lie.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple


class Act(NamedTuple):
    """One piece of work on one microbatch and one chunk of a rank."""

    kind: Literal["F", "B", "I", "W"]
    """Forward; whole backward; or its two parts, input gradient and weight gradient (arXiv:2401.10241)."""
    microbatch: int
    chunk: int
    paired: bool = False
    """On two neighbours in a row, a forward and a whole backward of different microbatches: they run as one,
    each hiding the other's communication (arXiv:2412.19437 s3.2.1)."""


Row = tuple[Act, ...]
"""What one rank does, in order."""
Rows = tuple[Row, ...]
"""By rank."""
Placement = tuple[tuple[int, ...], ...]
"""The stage that each chunk of each rank is, `[rank][chunk]`."""


def looped(pp: int, vpp: int) -> Placement:
    """Round and round the ranks: chunk c of rank r is stage c * pp + r."""
    return tuple(tuple(chunk * pp + rank for chunk in range(vpp)) for rank in range(pp))


def folded(pp: int, vpp: int) -> Placement:
    """Down the ranks and back up, a V: the first and the last stage lie on rank 0."""
    assert vpp == 2
    return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))


def mirrored(pp: int, vpp: int) -> Placement:
    """Every stage twice: chunk 0 for microbatches that go down the ranks, chunk 1 for those that go up."""
    assert vpp == 2
    return tuple((rank, pp - 1 - rank) for rank in range(pp))


def alternated(forwards: Sequence[Act], backwards: Sequence[Act], warmup: int) -> list[Act]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    in_turn = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *in_turn, *backwards[len(forwards[warmup:]) :]]


def round_ends(row: Row) -> frozenset[tuple[int, int]]:
    """Backward acts, as (microbatch, chunk), after which the row's next one is another chunk's, or none: where
    zero 2 reduces a chunk's gradients. A rank with one chunk has no rounds: every backward is the end of one."""
    backwards = [act for act in row if act.kind in ("B", "W")]
    chunks = {act.chunk for act in backwards}
    following = [*backwards[1:], None]
    return frozenset(
        (act.microbatch, act.chunk)
        for act, after in zip(backwards, following, strict=True)
        if len(chunks) == 1 or after is None or after.chunk != act.chunk
    )
