"""Rates of links from samples: each collective as a line over message bytes, by the size of its group and by how
many ranks of the node were at it; and how much of one hides behind compute.

From sends follows what a link as such does, from all_reduce what collectives reach of it. Groups that span nodes
give the network's figures, with one NIC for each device: what is measured is what a device gets of them.
"""

from collections.abc import Sequence
from typing import get_args

from trainwright.measure.points import Point, fit_line, fit_of, points
from trainwright.spec.cluster import CollectiveOp, CollectiveRate, OverlapRates
from trainwright.spec.record import Fit, Machine, Sample

COLLECTIVES: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
LARGEST_NORM = 10.0
"""Of `OverlapRates.fsdp_norm`: all hides."""


class LinkRates:
    """All zero-cost where one rank was measured."""

    def __init__(self, samples: Sequence[Sample], machine: Machine) -> None:
        self._samples, self._machine = samples, machine
        self.fits: list[Fit] = []
        found = {
            (sample.op, sample.group_size, sample.busy_ranks) for sample in samples if sample.op in COLLECTIVES
        }
        rates = [self._rate(op, *key) for op in COLLECTIVES for name, *key in sorted(found) if name == op]
        # Where several levels fill the node, the last one has the most nodes at work.
        inside = [rate for rate in rates if rate.group_size <= machine.devices]
        self.rates = tuple({(rate.op, rate.group_size, rate.at_work): rate for rate in inside}.values())
        self.between = [rate for rate in rates if rate.group_size > machine.devices]
        self.bytes_per_s, self.latency_s, self.fraction = _link(inside, 1)
        self.network_bytes_per_s, self.network_latency_s, self.network_fraction = _link(
            self.between, machine.devices
        )
        self.overlap = self._overlap()
        self.replica_s_per_byte = self._own_s_per_byte("overlap")
        self.shard_s_per_byte = self._own_s_per_byte("sharded")

    def _rate(self, op: CollectiveOp, size: int, busy: int) -> CollectiveRate:
        measured = points(self._samples, op, None, busy, size)
        latency_s, seconds_per_byte = fit_line(measured)
        name = f"{op} of {size} ranks" + (f", {busy} at work" if busy != size else "")
        self.fits.append(fit_of(name, measured, lambda point: latency_s + point.work * seconds_per_byte))
        return CollectiveRate(
            op=op,
            group_size=size,
            at_work=min(busy, self._machine.devices),
            latency_s=latency_s,
            bytes_per_s=1 / seconds_per_byte,
        )

    def _overlap(self) -> OverlapRates:
        """By steps of all ranks, where they were measured."""
        replicas, shards = (self._beside(op) for op in ("overlap", "sharded"))
        return OverlapRates(
            dp=hidden_fraction(replicas) if replicas else 0.0,
            fsdp_norm=norm(*(point.seconds for point in shards)) if shards else 1.0,
        )

    def _own_s_per_byte(self, op: str) -> float:
        """What a step with both takes beyond the sum of the two: a rank's own work, for which ranks take turns."""
        measured = self._beside(op)
        if not measured:
            return 0.0
        compute, communication, both = measured
        turns = max(self._machine.devices / self._machine.concurrent_devices, 1.0)
        return max(both.seconds - compute.seconds - communication.seconds, 0.0) / both.work / turns

    def _beside(self, op: str) -> list[Point]:
        """Compute, communication, and both."""
        busy = max((sample.busy_ranks for sample in self._samples if sample.op == op), default=1)
        return points(self._samples, op, None, busy, busy)


def _link(rates: Sequence[CollectiveRate], members: int) -> tuple[float, float, float]:
    """Bytes per second of a link, latency of a hop, and what collectives reach of it, where a ring has so many
    links side by side."""
    sends = [rate for rate in rates if rate.op == "send"]
    bytes_per_s = max((rate.bytes_per_s for rate in sends), default=1e12)
    latency_s = min((rate.latency_s for rate in sends), default=0.0)
    # Bus bandwidth of an all-reduce: each link carries 2 (n - 1) / n of the message.
    buses = [2 * (r.group_size - 1) / r.group_size * r.bytes_per_s for r in rates if r.op == "all_reduce"]
    return bytes_per_s, latency_s, min(1.0, max(buses, default=bytes_per_s) / (bytes_per_s * members))


def hidden_fraction(measured: Sequence[Point]) -> float:
    """Of compute alone, a collective alone and both at once: what part of the shorter one hid behind the
    longer."""
    compute_s, collective_s, both_s = (point.seconds for point in measured)
    hidden_s = compute_s + collective_s - both_s
    return min(max(hidden_s / min(compute_s, collective_s), 0.0), 1.0)


def norm(compute_s: float, collective_s: float, both_s: float) -> float:
    """p for which (compute^p + collective^p)^(1/p) is what both took: 1 where they add up, `LARGEST_NORM` where
    the shorter one hides."""

    def together(power: float) -> float:
        longer = max(compute_s, collective_s)
        return longer * (1 + (min(compute_s, collective_s) / longer) ** power) ** (1 / power)

    low, high = 1.0, LARGEST_NORM
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if together(middle) > both_s else (low, middle)
    return low if low > 1 + 1e-9 else 1.0
