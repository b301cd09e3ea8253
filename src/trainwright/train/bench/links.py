"""What ranks say to one another: each collective over sizes and groups.

Collectives are measured as a layer uses them: ranks come to one from compute, one later than the other, and where
they outnumber the cores a rank that waits may not be the one that runs next. Back to back collectives show none of
that.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainwright.spec.record import Sample, SampleOp
from trainwright.train.bench.stopwatch import FEWEST, REPETITIONS, Stopwatch
from trainwright.train.collectives import all_gather, reduce_scatter

if TYPE_CHECKING:
    from trainwright.train.bench import Part

OPS: tuple[SampleOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MESSAGE_BYTES = (1 << 14, 1 << 19, 1 << 22)
STATE_BYTES = (1 << 24,)
"""And of what carries gradients and parameters."""
STATE_OPS = ("all_reduce", "all_gather", "reduce_scatter")
LARGE_MESSAGE_BYTES = (1 << 26, 1 << 28)
"""And of GPUs."""
MOST_CALLS = 4
TURN_S = 0.02
"""A repetition has so many calls, each after its work, or fewer where they take that long."""
WORK_MATMULS = 4
"""Of 256 cubed: about a millisecond of one core, as a block of a small layer is."""
LEAST_COLLECTIVE_S = 2e-5
"""Where the noise of two timings hides a small collective: the cost of the call in Python."""


def parts(watch: Stopwatch) -> Iterator[tuple[str, "Part"]]:
    """Groups are made as the parts are asked for, by all ranks of the world alike."""
    sizes = (*MESSAGE_BYTES, *STATE_BYTES, *(LARGE_MESSAGE_BYTES if watch.device.type == "cuda" else ()))
    for size in (size for size in range(2, watch.busy + 1) if watch.busy % size == 0):
        group = _groups_of(watch, size)
        for message_bytes in sizes:
            for op in OPS if message_bytes not in STATE_BYTES else STATE_OPS:
                yield f"{op} of {size}", partial(_collective, watch, op, size, group, message_bytes)


def _groups_of(watch: Stopwatch, size: int) -> dist.ProcessGroup | None:
    """This rank's group of neighbours; None for a rank that is in none."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, watch.busy, size)]
    group = groups[watch.rank // size] if watch.takes_part else None
    assert group is None or isinstance(group, dist.ProcessGroup)
    return group


def _call_of(watch: Stopwatch, op: SampleOp, group: dist.ProcessGroup, message_bytes: int) -> Callable[[], object]:
    size = group.size()
    whole = torch.ones(message_bytes // 4, device=watch.device)
    part = torch.ones(whole.numel() // size, device=watch.device)
    whole = whole[: size * part.numel()]
    received = torch.empty_like(whole)
    at = dist.get_rank(group)
    next_rank = dist.get_global_rank(group, (at + 1) % size)
    previous_rank = dist.get_global_rank(group, (at - 1) % size)

    def send() -> None:
        operations = [
            dist.P2POp(dist.isend, whole, next_rank, group),
            dist.P2POp(dist.irecv, received, previous_rank, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    calls: dict[SampleOp, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
        "send": send,
    }
    return calls[op]


def _collective(
    watch: Stopwatch,
    op: SampleOp,
    size: int,
    group: dist.ProcessGroup | None,
    message_bytes: int,
    budget_s: float,
) -> list[Sample]:
    """Seconds that a collective adds to each piece of work that it follows."""
    call = _call_of(watch, op, group, message_bytes) if group is not None else _nothing
    work = _work_of(watch, WORK_MATMULS)

    def both() -> None:
        work()
        call()

    with_call, without = in_turn(watch, (both, work), budget_s, MOST_CALLS)
    typical_s = statistics.median(without)
    seconds = [max(each - typical_s, LEAST_COLLECTIVE_S) for each in with_call]
    return watch.sample(op, "fp32", message_bytes, message_bytes, seconds, size)


def in_turn(
    watch: Stopwatch, bodies: tuple[Callable[[], object], ...], budget_s: float, most_calls: int
) -> list[list[float]]:
    """Seconds of each body, of the slowest rank: all of them in every repetition, so that each has the same
    neighbours."""

    def seconds_of(body: Callable[[], object], calls: int) -> float:
        watch.barrier()
        return watch.seconds_of(body, calls) / calls if watch.takes_part else 0.0

    probe_s = 0.0
    for _ in range(2):
        probe_s = max(watch.slowest([sum(seconds_of(body, 1) for body in bodies)])[0], 1e-6)
    calls = min(most_calls, math.ceil(TURN_S / probe_s))
    repetitions = min(REPETITIONS, max(FEWEST, int(budget_s / (probe_s * calls))))
    rounds = [[seconds_of(body, calls) for body in bodies] for _ in range(repetitions)]
    return [watch.slowest([each[place] for each in rounds]) for place in range(len(bodies))]


def _work_of(watch: Stopwatch, matmuls: int) -> Callable[[], None]:
    left, right = (torch.randn(256, 256, device=watch.device) for _ in range(2))

    def work() -> None:
        for _ in range(matmuls):
            torch.mm(left, right)

    return work


def _nothing() -> None:
    """Of a rank that only waits."""
