"""Schedules that do every forward before the first backward: little waiting, all microbatches held."""

from trainwright.spec.schedules.acts import Act, Rows


def breadth_first(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """All microbatches through chunk after chunk, then all back in reverse: GPipe (arXiv:1811.06965) with one
    chunk per rank, looped breadth-first (arXiv:2211.05953) with more."""
    forwards = [(m, c) for c in range(vpp) for m in range(num_microbatches)]
    row = tuple(Act("F", m, c) for m, c in forwards) + tuple(Act("B", m, c) for m, c in reversed(forwards))
    return (row,) * pp
