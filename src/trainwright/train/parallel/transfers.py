"""Where sends and receives go between the acts of a schedule, so that no pair of ranks ever waits in a circle.

The rows are played act by act; when an act's result is needed on another rank, its send enters the sender's
program and its receive enters the receiver's, at that moment. All programs are then parts of one sequence of
events, in which each transfer has both its ends at one place: a rank that does its program in order, with
transfers that wait or with ones that don't, can't deadlock. (NCCL matches transfers of a pair by order alone.)

Where the next stage is another chunk of the same rank, as in the middle of a V, the result is handed over.
"""

from typing import Literal, NamedTuple

from trainwright.spec.schedule import Act, Placement, Rows


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


class Handover(NamedTuple):
    """The same from one chunk of a rank to another."""

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int
    to: int
    """The chunk that will use it."""


Program = tuple[Act | Transfer | Handover, ...]


def programs(rows: Rows, placement: Placement) -> tuple[Program, ...]:
    """For each rank of the pipeline its acts with the transfers between them."""
    stages = max(map(max, placement)) + 1
    # A stage that is held twice does a microbatch where the row of acts says.
    place_of = {
        (act.microbatch, placement[rank][act.chunk]): (rank, act.chunk)
        for rank, row in enumerate(rows)
        for act in row
        if act.kind == "F"
    }
    done: list[list[Act | Transfer | Handover]] = [[] for _ in rows]
    at = [0] * len(rows)
    here: set[tuple[str, int, int]] = set()
    """(kind, microbatch, stage): inputs that have reached their stage."""
    while any(at[rank] < len(row) for rank, row in enumerate(rows)):
        before = list(at)
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            act = row[at[rank]]
            stage = placement[rank][act.chunk]
            kind: Literal["F", "B"] = "F" if act.kind == "F" else "B"
            begins = act.kind == "W" or stage == (0 if kind == "F" else stages - 1)
            if not begins and (kind, act.microbatch, stage) not in here:
                continue
            at[rank] += 1
            done[rank].append(act)
            to = stage + 1 if kind == "F" else stage - 1
            if act.kind == "W" or not 0 <= to < stages:
                continue
            here.add((kind, act.microbatch, to))
            peer, chunk = place_of[act.microbatch, to]
            if peer == rank:
                done[rank].append(Handover(kind, act.microbatch, act.chunk, chunk))
                continue
            tag = (act.microbatch * stages + to) * 2 + (kind == "B")
            done[rank].append(Transfer("send", kind, act.microbatch, act.chunk, peer, tag))
            done[peer].append(Transfer("receive", kind, act.microbatch, chunk, rank, tag))
        assert at != before, "the rows wait for one another in a circle"
    return tuple(tuple(program) for program in done)
