"""Samples into a cluster: the rates of this machine, fitted so that outliers don't move them.

Each measured size is represented by the median of its repetitions. Compute is measured twice. One rank alone
gives the device's peak and the shape of each curve, cleanly. All ranks of the node at once, which is how a run
computes, give one factor per operation: with more ranks than cores, n ranks on c cores each take n/c as long,
which the planner counts as `core_sharing`; what they take beyond that (shared memory bandwidth and caches,
turbo) is contention, and lowers the whole curve. Its median over sizes is taken, as the system's scheduler
makes single sizes unreliable. Kernels are timed bare; what modules and autograd put around each operation is the
launch, which the planner adds. A collective is a line over message bytes by least absolute relative deviation,
which goes through two of the points, so all pairs are tried (Bloomfield and Steiger, Least Absolute
Deviations, 1983).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, get_args

import numpy as np

from trainwright.spec.cluster import (
    ClusterSpec,
    CollectiveOp,
    CollectiveRate,
    Curve,
    Device,
    Fabric,
    Format,
    Node,
    PeakFlops,
    Provenance,
    Rates,
)
from trainwright.spec.errors import reject
from trainwright.spec.record import Calibration, Fit, Sample

COLLECTIVES: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
LARGEST_FRACTION = 1.5
"""What `spec.cluster.Curve` allows."""
WORKER_BYTES = 300_000_000
"""Resident memory of a worker that has imported PyTorch and joined a process group: 222 to 299 MB seen with
torch 2.13 on CPU."""


class Machine(NamedTuple):
    """What the operating system says of the node, which no sample can."""

    name: str
    processor: str
    cores: int
    memory_bytes: int


class Point(NamedTuple):
    """One measured size: median seconds, and how many repetitions it is the median of."""

    size: float
    work: float
    seconds: float
    repetitions: int


def calibrate(samples: Sequence[Sample], machine: Machine) -> Calibration:
    """The cluster that the samples of one node describe: as many devices as there were busy ranks.

    `InvalidSpec` where a needed operation was not measured.
    """
    ranks = max(sample.busy_ranks for sample in samples)
    cores = min(machine.cores, ranks)
    compute = _Compute(samples, ranks, cores)
    links = _Links(samples)
    fits = [*compute.fits, *links.fits]
    measured = Provenance(
        kind="measured",
        source=f"trainwright calibrate on {machine.processor}, {ranks} ranks on {cores} cores",
        samples=sum(len(sample.seconds) for sample in samples),
    )
    cluster = ClusterSpec(
        name=machine.name,
        device=Device(
            name=machine.processor,
            kind="cpu",
            peak_flops_per_s=PeakFlops.parse(compute.peaks),
            memory_bytes=machine.memory_bytes // ranks,
            memory_bytes_per_s=compute.memory_bytes_per_s,
            num_sms=1,
        ),
        node=Node(devices=ranks, concurrent_devices=cores),
        fabric=Fabric(link="shared memory", link_domain=ranks, link_bytes_per_s=links.bytes_per_s),
        rates=Rates(
            matmul=compute.matmul,
            attention_forward=compute.attention["attention_forward"],
            attention_backward=compute.attention["attention_backward"],
            memory=compute.memory_fraction,
            elementwise=compute.elementwise,
            launch_s=compute.launch_s,
            link=links.fraction,
            link_latency_s=links.latency_s,
            network=1.0,
            network_latency_s=0.0,
            collectives=links.rates,
        ),
        framework_bytes=WORKER_BYTES,
        provenance=_provenance(measured),
    )
    return Calibration(cluster=cluster, fits=tuple(fits))


def _provenance(measured: Provenance) -> dict[str, Provenance]:
    system = Provenance(kind="measured", source="what the operating system reports, shared out over the ranks")
    no_network = Provenance(kind="assumed", source="one node: there is no network, and it is never used")
    not_sampled = Provenance(
        kind="assumed", source="no sample can tell it; the residual `host` of a comparison shows what is missing"
    )
    return {
        "device": measured,
        "device.memory_bytes": system,
        "device.num_sms": Provenance(kind="assumed", source="one process computes with one thread"),
        "node": system,
        "fabric": measured,
        "fabric.nics_per_node": no_network,
        "fabric.nic_bytes_per_s": no_network,
        "rates": measured,
        "rates.network": no_network,
        "rates.network_latency_s": no_network,
        "rates.straggling_per_doubling": no_network,
        "rates.step_overhead_s": not_sampled,
        "rates.microbatch_overhead_s": not_sampled,
        "framework_bytes": Provenance(
            kind="assumed", source="222 to 299 MB resident in a worker of torch 2.13 before it trains, rounded up"
        ),
    }


class _Compute:
    """Peaks, curves, memory bandwidth and launch cost."""

    def __init__(self, samples: Sequence[Sample], ranks: int, cores: int) -> None:
        self._samples = samples
        self._ranks, self._cores = ranks, cores
        self.fits: list[Fit] = []
        self.launch_s = _median(point.seconds / point.work for point in self._alone("launch", None))
        self.launch_s *= self._contention("launch", None)
        self._note("launch", "launch", None, lambda point: self.launch_s * point.work)
        precisions = self._formats("matmul")
        self.peaks = {precision: self._best_rate("matmul", precision) for precision in precisions}
        if "fp32" not in self.peaks:
            reject("samples", "no fp32 matmul", "measure it; it is the peak that attention is a fraction of")
        self.matmul: dict[Format, Curve] = {
            precision: self._curve("matmul", precision, self.peaks[precision]) for precision in precisions
        }
        self.attention: dict[str, dict[Format, Curve]] = {
            op: {fmt: self._curve(op, fmt, self.peaks[fmt]) for fmt in self._formats(op) if fmt in self.peaks}
            for op in ("attention_forward", "attention_backward")
        }
        self.memory_bytes_per_s = self._best_rate("copy", None)
        streamed_bytes_per_s = self.memory_bytes_per_s / self._contention("copy", None)
        self.memory_fraction = streamed_bytes_per_s / self.memory_bytes_per_s
        self._note("memory", "copy", None, lambda point: point.work / streamed_bytes_per_s)
        self.elementwise: dict[Format, float] = {
            fmt: self._elementwise_fraction(fmt) for fmt in self._formats("elementwise")
        }

    def _formats(self, op: str) -> list[Format]:
        """Number formats that an operation was measured in."""
        formats: set[Format] = {sample.precision for sample in self._samples if sample.op == op}
        return sorted(formats)

    def _elementwise_fraction(self, precision: str) -> float:
        """What elementwise operators reach of the memory bandwidth, with all ranks busy."""
        points = self._alone("elementwise", precision)
        alone_bytes_per_s = _median(point.work / point.seconds for point in points)
        bytes_per_s = alone_bytes_per_s / self._contention("elementwise", precision)
        self._note(f"elementwise {precision}", "elementwise", precision, lambda point: point.work / bytes_per_s)
        return min(1.0, bytes_per_s / self.memory_bytes_per_s)

    def _alone(self, op: str, precision: str | None) -> list[Point]:
        """Points of one busy rank."""
        points = _points(self._samples, op, precision, busy_ranks=1)
        if not points:
            reject("samples", f"no {op} {precision or ''}".strip(), "measure it by one rank alone")
        return points

    def _shared(self, op: str, precision: str | None) -> list[Point]:
        """Points of all ranks at once, as if each had a core to itself."""
        share = self._cores / self._ranks
        points = _points(self._samples, op, precision, busy_ranks=self._ranks)
        return [point._replace(seconds=point.seconds * share) for point in points]

    def _contention(self, op: str, precision: str | None) -> float:
        """How many times longer a call takes when all ranks are busy, beyond their sharing of cores."""
        alone = {point.size: point.seconds for point in self._alone(op, precision)}
        shared = self._shared(op, precision)
        ratios = [point.seconds / alone[point.size] for point in shared if point.size in alone]
        return max(1.0, _median(ratios)) if ratios else 1.0

    def _best_rate(self, op: str, precision: str | None) -> float:
        return max(point.work / point.seconds for point in self._alone(op, precision))

    def _curve(self, op: str, precision: str, peak_flops_per_s: float) -> Curve:
        contention = self._contention(op, precision)
        sizes, fractions = [], []
        for point in self._alone(op, precision):
            sizes.append(point.size)
            fractions.append(min(point.work / (point.seconds * contention) / peak_flops_per_s, LARGEST_FRACTION))
        curve = Curve(size=tuple(sizes), fraction=tuple(fractions))
        self._note(
            f"{op} {precision}",
            op,
            precision,
            lambda point: point.work / (peak_flops_per_s * curve.at(point.size)),
        )
        return curve

    def _note(self, name: str, op: str, precision: str | None, predict: Callable[[Point], float]) -> None:
        """Note how well a rate says what was seen with all ranks busy."""
        points = self._shared(op, precision) or self._alone(op, precision)
        self.fits.append(_fit(name, points, predict))


class _Links:
    """Collectives, and from them what the link as such does; all zero-cost where one rank was measured."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.fits: list[Fit] = []
        rates = []
        for op in COLLECTIVES:
            for size in sorted({sample.busy_ranks for sample in samples if sample.op == op}):
                points = _points(samples, op, None, busy_ranks=size)
                latency_s, seconds_per_byte = fit_line(points)
                rate = CollectiveRate(
                    op=op, group_size=size, latency_s=latency_s, bytes_per_s=1 / seconds_per_byte
                )
                rates.append(rate)
                self.fits.append(
                    _fit(
                        f"{op} of {size} ranks",
                        points,
                        lambda point, rate=rate: rate.latency_s + point.work / rate.bytes_per_s,
                    )
                )
        self.rates = tuple(rates)
        sends = [rate for rate in rates if rate.op == "send"]
        self.bytes_per_s = max((rate.bytes_per_s for rate in sends), default=1e12)
        self.latency_s = min((rate.latency_s for rate in sends), default=0.0)
        # Bus bandwidth of an all-reduce: each link carries 2 (n - 1) / n of the message.
        buses = [2 * (r.group_size - 1) / r.group_size * r.bytes_per_s for r in rates if r.op == "all_reduce"]
        self.fraction = min(1.0, max(buses, default=self.bytes_per_s) / self.bytes_per_s)


def fit_line(points: Sequence[Point]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte, both of least absolute relative deviation from the points.

    Latency is at least zero, and a byte takes some time. `InvalidSpec` for less than two sizes.
    """
    if len(points) < 2:
        reject("samples", f"{len(points)} message size(s)", "measure a collective at two sizes at least")
    through_zero = [(0.0, point.seconds / point.work) for point in points]
    through_two = [_line(first, second) for first, second in combinations(points, 2)]
    lines = [line for line in (*through_zero, *through_two) if line[0] >= 0 and line[1] > 0]

    def deviation(line: tuple[float, float]) -> float:
        return sum(abs(line[0] + line[1] * point.work - point.seconds) / point.seconds for point in points)

    return min(lines, key=deviation)


def _line(first: Point, second: Point) -> tuple[float, float]:
    slope = (second.seconds - first.seconds) / (second.work - first.work)
    return first.seconds - slope * first.work, slope


def _points(samples: Sequence[Sample], op: str, precision: str | None, *, busy_ranks: int) -> list[Point]:
    """The measured sizes of an operation, smallest first, the repetitions of all ranks together. Calls of one
    size and different work (matmuls of two shapes) are one point of the median rate."""
    groups: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.op == op and sample.busy_ranks == busy_ranks and precision in (None, sample.precision):
            groups[sample.size].append(sample)
    points = []
    for size, group in sorted(groups.items()):
        work = group[0].work
        seconds = [each * work / sample.work for sample in group for each in sample.seconds]
        points.append(Point(size, work, _median(seconds), len(seconds)))
    return points


def _fit(name: str, points: Sequence[Point], predict: Callable[[Point], float]) -> Fit:
    errors = [abs(predict(point) - point.seconds) / point.seconds for point in points]
    return Fit(
        name=name,
        samples=sum(point.repetitions for point in points),
        median_error=_median(errors),
        worst_error=max(errors),
    )


def _median(values: Iterable[float]) -> float:
    median = float(np.median(list(values)))
    assert math.isfinite(median)
    return median
