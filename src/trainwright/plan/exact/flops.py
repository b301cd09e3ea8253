"""FLOPs of a rank's step by part and phase, from the lists of operations."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from trainwright.plan.exact.standing import Standing, whole
from trainwright.plan.operations import AttentionCore, Collective, Matmul, Piece
from trainwright.plan.table import FULL
from trainwright.spec.counts import FlopsCount
from trainwright.spec.model import seen_keys

PARTS = {
    "q_up": "query",
    "q": "query",
    "expert up": "experts",
    "expert gate": "experts",
    "expert down": "experts",
}
"""The planner's operations that are one module of the program."""

ASKS_FIRST = {"q": "kv_down"}
"""Of the first operation that reads an input, the one whose module does before: keys' latents come before queries
that have none."""


def _summed(standing: Standing, each: Matmul) -> int:
    """Rows that a weight gradient sums over: a transform fills its last group up."""
    low, rows = standing.run.recipe.low_precision, whole(each.m)
    if low is None or not low.hadamard or not each.in_low_precision:
        return rows
    return -(-rows // low.hadamard) * low.hadamard


def _forward(standing: Standing, each: Matmul | AttentionCore) -> int:
    if not isinstance(each, AttentionCore) or each.window is None or standing.run.layout.cp == 1:
        return whole(each.forward_flops)
    # Under cp a rank has two chunks of a sequence, one from either end, and a window's queries see few keys at the
    # beginning.
    seq_len, cp, rank = standing.run.recipe.seq_len, standing.run.layout.cp, standing.at.cp
    chunk, window = seq_len // (2 * cp), min(each.window, seq_len)
    positions = [chunk * place + number for place in (rank, 2 * cp - 1 - rank) for number in range(chunk)]
    own = sum(min(position + 1, window) for position in positions)
    mean = Fraction(seen_keys(seq_len, window)) * len(positions)
    return whole(Fraction(each.forward_flops.item()) * own / mean)


def _named(piece: Piece, *, goes_round: bool) -> Iterator[tuple[Matmul | AttentionCore, str]]:
    """What multiplies, and the module that does. goes_round: the inputs of tp's blocks do, and the first module
    that reads one makes the products of all that do (`train/parallel/collective_matmul.py`)."""
    reader: str | None = None
    for each in piece.operations:
        if isinstance(each, Collective) and each.forward and each.goes_round:
            reader = "" if each.forward == ("all_gather",) else None
        if isinstance(each, AttentionCore):
            yield each, each.name
        elif isinstance(each, Matmul):
            name = PARTS.get(each.name, each.name)
            if reader == "":
                reader = ASKS_FIRST.get(each.name, name)
            joins = goes_round and (each.shares_input or each.name in ASKS_FIRST)
            yield each, (reader or name) if joins else name


def flops(standing: Standing) -> tuple[FlopsCount, ...]:
    """Of matmuls and attention."""
    found: Counter[tuple[str, str, str]] = Counter()
    for piece, marks, passes in standing.pieces():
        for each, name in _named(piece, goes_round=standing.run.layout.tp > 1):
            forward = _forward(standing, each) * passes
            if name == "head":
                forward = forward * standing.own_vocabulary // standing.most_vocabulary
            kind = "attention" if isinstance(each, AttentionCore) and each.is_fused else "matmul"
            backward = 2 * forward
            if kind == "attention":
                backward = forward * 5 // 2
            elif isinstance(each, Matmul):
                backward = forward + forward * _summed(standing, each) // whole(each.m)
            found["forward", name, kind] += forward
            at_once = isinstance(each, Matmul) and each.gradients_in_forward
            found["forward" if at_once else "backward", name, kind] += backward
            again, times = forward, standing.times_again(each, marks)
            if isinstance(each, AttentionCore) and not each.is_fused:
                scores = whole(each.scores_flops) * passes
                ends_early = not standing.makes_graph_anew and not marks & FULL
                again = scores if ends_early else forward
                if each.always_again and not (times and ends_early):
                    found["recompute", name, kind] += scores
            if times:
                found["recompute", name, kind] += times * again
            elif isinstance(each, Matmul) and each.name == "expert down" and marks & each.again_anew:
                # Of matmuls one after the other, recomputation ends before the last.
                found["recompute", name, kind] += standing.before_the_last_expert(forward)
    return tuple(
        FlopsCount.parse({"phase": phase, "part": part, "kind": kind, "flops": count})
        for (phase, part, kind), count in sorted(found.items())
        if count
    )
