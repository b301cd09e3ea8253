"""Seconds of a call on ranks that do it at once: repetitions long enough for the clock, of which the slowest rank
counts.

`busy` says how many ranks take part; the others wait meanwhile, which takes no core.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainwright.spec.record import Sample, SampleOp

REPETITIONS = 15
FEWEST = 3
WARMUP = 2
SLOW_S = 0.5
"""From then on one call is enough."""
REPETITION_S = 0.015
"""Length of a repetition, in which a short call is made many times: long enough for the clock, and for the
system to share out cores among more ranks than it has."""


@dataclass(frozen=True)
class Stopwatch:
    """This rank among `world`, of which the first `busy` are measured."""

    rank: int
    world: int
    device: torch.device
    busy: int

    @property
    def takes_part(self) -> bool:
        return self.rank < self.busy

    def timed(
        self,
        op: SampleOp,
        precision: str,
        size: float,
        work: float,
        budget_s: float,
        call: Callable[[], object],
        least_s: float = REPETITION_S,
    ) -> list[Sample]:
        """Seconds per call of each repetition, as one sample on rank 0."""
        probe_s = self._probe_s(call)
        if probe_s > max(budget_s, SLOW_S):
            # So slow a call needs no warm-up: a format that a CPU emulates, for example.
            return self.sample(op, precision, size, work, [probe_s])
        probe_s = [self._probe_s(call) for _ in range(WARMUP)][-1]
        calls = math.ceil(least_s / probe_s)
        repetitions = min(REPETITIONS, max(FEWEST, int(budget_s / (calls * probe_s))))
        seconds = [0.0] * repetitions
        core_s = 0.0
        for repetition in range(repetitions):
            if self.busy > 1:
                self.barrier()
            if self.takes_part:
                before_s = time.process_time()
                seconds[repetition] = self.seconds_of(call, calls) / calls
                core_s += time.process_time() - before_s
        lost = 1 - core_s / (sum(seconds) * calls) if self.takes_part else 0.0
        on_core = min(max(1 - self.slowest([lost])[0], 0.0), 1.0)
        return self.sample(op, precision, size, work, self.slowest(seconds), on_core=on_core)

    def _probe_s(self, call: Callable[[], object]) -> float:
        """Of one call."""
        self.barrier()
        return max(self.slowest([self.seconds_of(call, 1) if self.takes_part else 0.0])[0], 1e-7)

    def sample(
        self,
        op: SampleOp,
        precision: str,
        size: float,
        work: float,
        seconds: list[float],
        group_size: int = 1,
        on_core: float = 1.0,
    ) -> list[Sample]:
        """The sample on rank 0, elsewhere none."""
        if self.rank != 0:
            return []
        values = {"op": op, "precision": precision, "size": float(size), "work": float(work)}
        values |= {"busy_ranks": self.busy, "group_size": group_size, "seconds": seconds, "on_core": on_core}
        return [Sample.parse(values)]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def slowest(self, seconds: list[float]) -> list[float]:
        if self.world == 1:
            return seconds
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()

    def seconds_of(self, call: Callable[[], object], times: int) -> float:
        start_s = time.perf_counter()
        for _ in range(times):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s
