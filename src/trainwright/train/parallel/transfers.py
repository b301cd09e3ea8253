"""Where sends and receives go between the acts of a schedule, so that no pair of ranks ever waits in a circle.

The rows are played act by act; when an act's result is needed on another rank, its send enters the sender's
program and its receive enters the receiver's, at that moment. All programs are then parts of one sequence of
events, in which each transfer has both its ends at one place: a rank that does its program in order, with
transfers that wait or with ones that don't, can't deadlock. (NCCL matches transfers of a pair by order alone.)
"""

from typing import Literal, NamedTuple

from trainwright.spec.schedule import Act, Rows


class Transfer(NamedTuple):
    """One tensor between stages: an output going forward (kind F) or its gradient coming back (kind B)."""

    way: Literal["send", "receive"]
    kind: Literal["F", "B"]
    microbatch: int
    chunk: int
    """Of this rank: the chunk that made it, or that will use it."""
    peer: int
    """The other rank of the pipeline."""
    tag: int
    """The same on both ends and different from all other transfers of the step."""


Program = tuple[Act | Transfer, ...]


def programs(rows: Rows, vpp: int) -> tuple[Program, ...]:
    """For each rank of the pipeline its acts with the transfers between them."""
    pp = len(rows)
    stages = pp * vpp
    done: list[list[Act | Transfer]] = [[] for _ in rows]
    at = [0] * pp
    here: set[tuple[str, int, int]] = set()
    """(kind, microbatch, stage): inputs that have reached their stage."""
    while any(at[rank] < len(rows[rank]) for rank in range(pp)):
        before = list(at)
        for rank in range(pp):
            if at[rank] == len(rows[rank]):
                continue
            act = rows[rank][at[rank]]
            stage = act.chunk * pp + rank
            first_of_its_kind = stage == 0 if act.kind == "F" else stage == stages - 1
            if not first_of_its_kind and (act.kind, act.microbatch, stage) not in here:
                continue
            at[rank] += 1
            done[rank].append(act)
            to = stage + 1 if act.kind == "F" else stage - 1
            if 0 <= to < stages:
                kind = "F" if act.kind == "F" else "B"
                here.add((kind, act.microbatch, to))
                tag = (act.microbatch * stages + to) * 2 + (kind == "B")
                peer = to % pp
                done[rank].append(Transfer("send", kind, act.microbatch, act.chunk, peer, tag))
                done[peer].append(Transfer("receive", kind, act.microbatch, to // pp, rank, tag))
        assert at != before, "the rows wait for one another in a circle"
    return tuple(tuple(program) for program in done)
