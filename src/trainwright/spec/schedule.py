"""Pipeline schedules as data: for each rank a row of acts, in the order in which the rank does them.

The planner gives acts durations and plays the rows; the trainer gives them functions and runs the rows; so
they can't disagree about the order. A rank holds `vpp` chunks of the model; chunk c of rank r is stage
c * pp + r, so that an activation goes round the ranks once per chunk.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from trainwright.spec.errors import reject


class Act(NamedTuple):
    """One piece of work: the forward or backward pass of one microbatch through one chunk."""

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int


Row = tuple[Act, ...]
Rows = tuple[Row, ...]


def gpipe(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """All forwards, then all backwards in reverse (GPipe, arXiv:1811.06965)."""
    forwards = [(m, c) for c in range(vpp) for m in range(num_microbatches)]
    row = tuple(Act("F", m, c) for m, c in forwards) + tuple(Act("B", m, c) for m, c in reversed(forwards))
    return (row,) * pp


def one_f_one_b(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """One forward, one backward, once the pipe is full (PipeDream-flush, arXiv:2104.04473 fig. 4 top).

    Rank r holds at most pp - r microbatches in flight.
    """
    if vpp != 1:
        reject("layout.vpp", vpp, "1f1b holds one chunk per rank; set recipe.schedule=interleaved_1f1b")
    rows = []
    for rank in range(pp):
        warmup = min(pp - rank - 1, num_microbatches)
        forwards = [Act("F", m, 0) for m in range(num_microbatches)]
        backwards = [Act("B", m, 0) for m in range(num_microbatches)]
        rows.append(_alternate(forwards, backwards, warmup))
    return tuple(rows)


def interleaved_1f1b(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """1F1B over vpp chunks per rank, depth first (arXiv:2104.04473 s2.2, fig. 4 bottom).

    Microbatches go in rounds of pp through chunk after chunk; num_microbatches must be a multiple of pp.
    """
    if num_microbatches % pp:
        reject(
            "recipe.micro_batch",
            f"{num_microbatches} microbatches per rank",
            f"interleaved_1f1b needs a multiple of pp={pp}; change micro_batch, global_batch or the schedule",
        )
    units = [
        (m, c) for first in range(0, num_microbatches, pp) for c in range(vpp) for m in range(first, first + pp)
    ]
    forwards = [Act("F", m, c) for m, c in units]
    backwards = [Act("B", m, vpp - 1 - c) for m, c in units]
    rows = []
    for rank in range(pp):
        warmup = (pp - rank - 1) * 2 + (vpp - 1) * pp
        rows.append(_alternate(forwards, backwards, min(warmup, len(units))))
    return tuple(rows)


def _alternate(forwards: list[Act], backwards: list[Act], warmup: int) -> Row:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return tuple(row + backwards[len(forwards) - warmup :])


SCHEDULES: Mapping[str, Callable[[int, int, int], Rows]] = {
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "gpipe": gpipe,
}
"""By the name that `Recipe.schedule` has: (pp, vpp, num_microbatches) to rows."""
