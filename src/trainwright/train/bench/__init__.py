"""Micro-measurements that a cluster's rates are fitted to: kernels, the host's work, collectives and their
overlap.

Every rank runs this at once. All is measured at several levels: by one rank alone while the others wait, by two,
by four and so on up to all, because ranks of a node that has fewer cores than them take turns, and slow one
another down beyond that. Collectives are measured over groups of each size that divides the level, all groups at
the same time. One repetition takes as long as its slowest rank. Kernels and the host are measured twice, before
and after the collectives, so that a machine that changes meanwhile shows in its samples. Medians are for
`measure/`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from trainwright.spec.record import Machine, Sample
from trainwright.train.bench import host, kernels, links, sharing
from trainwright.train.bench.stopwatch import Stopwatch
from trainwright.train.mesh import Worker

BUDGET_S = 30.0
"""About how long the whole takes; much shorter ones take longer than they say."""

Part = Callable[[float], list[Sample]]
"""Measures something in about so many seconds."""


@dataclass(frozen=True)
class Bench:
    """Where the measurements run. `world` 1 needs no process group."""

    worker: Worker
    device: torch.device
    budget_s: float = BUDGET_S

    def samples(self, on_progress: Callable[[str, float], None] = lambda what, done: None) -> list[Sample]:
        """All measurements, on rank 0; an empty list on the others. Collective over all ranks."""
        local, shared = [*self._local_parts()], [*self._sharing_parts()]
        parts = [*local, *self._link_parts(), *shared, *local]
        share_s = self.budget_s / len(parts)
        found: list[Sample] = []
        for number, (what, part) in enumerate(parts):
            on_progress(what, number / len(parts))
            found += part(share_s)
        on_progress("measured", 1.0)
        return found

    def _local_parts(self) -> Iterator[tuple[str, Part]]:
        for busy in levels(self.worker.local_world):
            watch = Stopwatch(self.worker.rank, self.worker.world, self.device, busy)
            for what, part in (*kernels.parts(watch), *host.parts(watch)):
                yield f"{what}, {busy} rank(s) busy", part

    def _link_parts(self) -> Iterator[tuple[str, Part]]:
        for busy in levels(self.worker.world)[1:]:
            watch = Stopwatch(self.worker.rank, self.worker.world, self.device, busy)
            for what, part in links.parts(watch):
                yield f"{what}, {busy} ranks busy", part

    def _sharing_parts(self) -> Iterator[tuple[str, Part]]:
        if self.worker.world > 1:
            watch = Stopwatch(self.worker.rank, self.worker.world, self.device, self.worker.world)
            yield from sharing.parts(watch)


def levels(ranks: int) -> list[int]:
    """Numbers of ranks that are busy together: powers of two, and all."""
    return sorted({1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks} | {ranks})


def accelerator(worker: Worker) -> Machine | None:
    """What a GPU node is, by its driver; None on a CPU, of which the system knows more."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(worker.local_rank)
    return Machine(
        device=found.name,
        kind="rocm" if torch.version.hip else "cuda",
        devices=worker.local_world,
        concurrent_devices=worker.local_world,
        nodes=max(worker.world // worker.local_world, 1),
        memory_bytes=found.total_memory,
        num_sms=found.multi_processor_count,
    )
