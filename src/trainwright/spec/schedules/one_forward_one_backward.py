"""1F1B: as soon as the pipe is full, a backward follows each forward, so that few microbatches are held."""

from trainwright.spec.schedules.acts import Act, Rows, alternated


def one_f_one_b(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """One forward, one backward, once the pipe is full (PipeDream-flush, arXiv:2104.04473 fig. 4 top).

    Rank r holds at most pp - r microbatches.
    """
    forwards = [Act("F", m, 0) for m in range(num_microbatches)]
    backwards = [Act("B", m, 0) for m in range(num_microbatches)]
    return tuple(tuple(alternated(forwards, backwards, pp - rank - 1)) for rank in range(pp))


def interleaved_1f1b(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """1F1B over vpp chunks per rank, depth first (arXiv:2104.04473 s2.2, fig. 4 bottom).

    Microbatches go in rounds of pp through chunk after chunk; num_microbatches must be a multiple of pp.
    """
    units = [
        (m, c) for first in range(0, num_microbatches, pp) for c in range(vpp) for m in range(first, first + pp)
    ]
    forwards = [Act("F", m, c) for m, c in units]
    backwards = [Act("B", m, vpp - 1 - c) for m, c in units]
    warmups = ((pp - rank - 1) * 2 + (vpp - 1) * pp for rank in range(pp))
    return tuple(tuple(alternated(forwards, backwards, warmup)) for warmup in warmups)
