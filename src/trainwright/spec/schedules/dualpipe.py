"""DualPipe: microbatches go through the pipe from both ends at once, and a forward of one way runs together with
a backward of the other, each hiding the other's communication (arXiv:2412.19437 s3.2.1, fig. 5).

A rank at some depth from its end of the pipe does the same whichever end that is, and the same again where the
pipe is folded in its middle (DualPipeV), so one row serves all. Its phrases are the paper's figure: "0" is the
chunk of the microbatches that come in at the near end, "1" that of those which come from the far one. F&B is a
pair's time, B that of a whole backward, W that of a weight gradient.
"""

from trainwright.spec.schedules.acts import Row, Rows
from trainwright.spec.schedules.notation import written


def dualpipe(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """Every stage on two ranks; half of the microbatches, the first ones, go down, the others up.

    The bubble is (pp/2 - 1)(F&B + B - 3W), and a rank holds at most pp + 1 microbatches (ibid., table 2).
    """
    down = num_microbatches // 2
    rows = [_row(pp // 2, depth, down) for depth in range(pp // 2)]
    lower = [_from(row, 0, down) for row in rows]
    upper = [_from(row, 1, down) for row in reversed(rows)]
    return tuple(lower + upper)


def dualpipe_v(pp: int, vpp: int, num_microbatches: int) -> Rows:
    """DualPipe over 2 pp ranks folded in the middle: every stage once, two on each of pp ranks, in a V.

    Both ways of a microbatch are now its way down and its way back up.
    """
    return tuple(_row(pp, rank, num_microbatches) for rank in range(pp))


def _from(row: Row, end: int, down: int) -> Row:
    """The row of a rank that is near an end: 0, where microbatches go down from, or 1, where they go up from."""
    acts = (act._replace(chunk=act.chunk ^ end) for act in row)
    return tuple(act._replace(microbatch=act.microbatch + act.chunk * down) for act in acts)


def _row(half: int, depth: int, num_microbatches: int) -> Row:
    """Of the rank so deep from its end of a pipe of twice `half` ranks; each end has that many microbatches."""
    inside = half - depth - 1
    steady = num_microbatches - 2 * half + depth + 1
    # Where both ways meet nothing is there to overlap with at first, and apart both are there sooner.
    first = "F0&B1" if inside else "F0 B1"
    last = ["B1", "B0"] * (depth + 1)
    return written(
        [
            ("F0", 2 * inside),
            ("F0 F1", depth + 1),
            ("I1 W F1", inside),
            (f"{first} F1&B0", min(steady, 1)),
            ("F0&B1 F1&B0", steady - 1),
            ("B1 F1&B0", inside),
            # The second half of the last backwards leaves its weight gradients for what would be waiting.
            (" ".join(last[: depth + 1]), 1),
            (" ".join(last[depth + 1 :]).replace("B", "I"), 1),
            ("W I0", inside),
            ("W", depth + 1),
        ]
    )
