"""Zero-bubble schedules: a backward's weight gradient, which no other stage waits for, fills what was waiting.

A bubble is here, as in arXiv:2401.10241 s5, what the busiest rank waits between its first act and its last.
"""

from functools import lru_cache
from itertools import chain, zip_longest

from trainwright.spec.schedules.acts import Act, Row, Rows
from trainwright.spec.schedules.notation import written


def zb_h1(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """1F1B with weight gradients put off by as many microbatches as the rank is deep (arXiv:2401.10241 fig. 3).

    Rank r holds pp - r microbatches whole, as under 1F1B, and up to r more for their weight gradients. The bubble
    is (pp - 1)(F + I - W), that of 1F1B less (pp - 1) 2W.
    """
    acts = [[Act(kind, at, 0) for at in range(num_microbatches)] for kind in ("F", "I", "W")]
    return tuple(_staggered(acts, (0, pp - rank - 1, pp - 1)) for rank in range(pp))


def _staggered(acts: list[list[Act]], delays: tuple[int, ...]) -> Row:
    """Kinds of acts in turn, each kind so many turns late."""
    late = ([None] * delay + kind for kind, delay in zip(acts, delays, strict=True))
    return tuple(filter(None, chain.from_iterable(zip_longest(*late))))


def zb_v(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """Two chunks per rank in a V, so that what comes down turns round on the last rank and all ranks hold the
    same (arXiv:2401.10241 s6; V-ZB of arXiv:2405.15362).

    A rank holds at most 2 pp microbatches of a chunk, which is as much as 1F1B's first rank. There is no bubble
    where F, I and W of a chunk take the same time and there are 2 pp - 1 microbatches or more. Ranks begin one
    after another and end so: a step that waits for all of them still takes (pp - 1) F more than one's work.
    """
    # With fewer microbatches the order is that of enough of them, less those that there aren't.
    rows = _v_rows(pp, max(num_microbatches, 2 * pp - 1))
    if num_microbatches >= 2 * pp - 1:
        return rows
    return tuple(tuple(act for act in row if act.microbatch < num_microbatches) for row in rows)


@lru_cache(maxsize=4)
def _v_rows(pp: int, num_microbatches: int) -> Rows:
    return tuple(_v_row(pp, rank, num_microbatches) for rank in range(pp))


def _v_row(pp: int, rank: int, num_microbatches: int) -> Row:
    above = pp - rank - 1
    return written(
        [
            ("F0", 2 * above + 1),
            ("F1 F0", rank),
            ("F1 I1 W1", above + 1),
            ("F0 I0 W0 F1 I1 W1", num_microbatches - 2 * above - 1 - rank),
            ("I0 W0 F1 I1 W1", above),
            ("I0 I1", rank),
            ("I0 W0", above + 1),
            ("W1", rank),
            ("W0", rank),
        ]
    )
