"""Rates of one rank from samples: peaks, curves, memory bandwidth, the optimizer, launches and the host's own
work; and what ranks that are at work together cost one another.

One rank alone gives the peaks and curves, cleanly. With n ranks on c cores a call takes n/c as long where n is
above c: the planner counts that as `core_sharing`. What it takes beyond that is a slowdown, one factor for each
kind of operation and each number of ranks: the median over sizes and formats, as the system's scheduler makes
single sizes unreliable. Kernels are timed bare; what modules and autograd put around each operation is the launch.
"""

from collections.abc import Callable, Sequence

from trainwright.measure.points import Point, fit_of, median, points
from trainwright.spec.cluster import AtWork, Curve, Format
from trainwright.spec.errors import reject
from trainwright.spec.record import Fit, Sample

LARGEST_FRACTION = 1.5
"""What `spec.cluster.Curve` allows."""
LARGEST_GROUPED = 1.2
"""What `Rates.grouped` allows."""

KINDS: dict[str, tuple[str, ...]] = {
    "matmul": ("matmul",),
    "attention": ("attention_forward", "attention_backward"),
    "memory": ("copy",),
    "elementwise": ("elementwise",),
    "update": ("update",),
    "launch": ("launch",),
}
"""Operations that each slowdown of `AtWork` is of."""


class ComputeRates:
    """`InvalidSpec` where a needed operation was not measured by one rank alone."""

    def __init__(self, samples: Sequence[Sample], cores: int) -> None:
        self._samples, self._cores = samples, cores
        self.fits: list[Fit] = []
        local = {op for ops in KINDS.values() for op in ops}
        levels = sorted({sample.busy_ranks for sample in samples if sample.op in local} - {1})
        self.at_work = tuple(self._at_work(ranks) for ranks in levels)
        self.launch_s = median(point.seconds / point.work for point in self._alone("launch", None))
        self._note("launch", "launch", None, lambda point: self.launch_s * point.work)
        precisions = self._formats("matmul")
        # Of a format that a CPU emulates, attention may beat the matmuls.
        self.peaks = {
            precision: max(
                self._best_rate(op, precision)
                for op in ("matmul", *KINDS["attention"])
                if precision in self._formats(op)
            )
            for precision in precisions
        }
        if "fp32" not in self.peaks:
            reject("samples", "no fp32 matmul", "measure it; it is the peak that attention is a fraction of")
        self.matmul: dict[Format, Curve] = {
            precision: self._curve("matmul", precision, self.peaks[precision]) for precision in precisions
        }
        self.grouped = self._grouped()
        self.attention: dict[str, dict[Format, Curve]] = {
            op: {fmt: self._curve(op, fmt, self.peaks[fmt]) for fmt in self._formats(op) if fmt in self.peaks}
            for op in KINDS["attention"]
        }
        self.memory_bytes_per_s = self._best_rate("copy", None)
        self._note("memory", "copy", None, lambda point: point.work / self.memory_bytes_per_s)
        self.elementwise: dict[Format, float] = {
            fmt: min(self._fraction("elementwise", fmt), 1.0) for fmt in self._formats("elementwise")
        }
        self.update = self._fraction("update", None) if self._formats("update") else None
        self.microbatch_overhead_s, self.step_overhead_s = self._host()

    def _formats(self, op: str) -> list[Format]:
        """Number formats that an operation was measured in."""
        formats: set[Format] = {sample.precision for sample in self._samples if sample.op == op}
        return sorted(formats)

    def _alone(self, op: str, precision: str | None) -> list[Point]:
        found = points(self._samples, op, precision, 1)
        if not found:
            reject("samples", f"no {op} {precision or ''}".strip(), "measure it by one rank alone")
        return found

    def _turns(self, ranks: int) -> float:
        """How many ranks take turns on a core."""
        return max(ranks / self._cores, 1.0)

    def _at_work(self, ranks: int) -> AtWork:
        slowdowns = {}
        for kind, ops in KINDS.items():
            ratios = []
            for op in ops:
                for fmt in self._formats(op):
                    alone = {point.size: point.seconds for point in points(self._samples, op, fmt, 1)}
                    shared = points(self._samples, op, fmt, ranks)
                    ratios += [
                        each.seconds / self._turns(ranks) / alone[each.size]
                        for each in shared
                        if each.size in alone
                    ]
            slowdowns[kind] = max(1.0, median(ratios)) if ratios else 1.0
        return AtWork(ranks=ranks, **slowdowns)

    def _best_rate(self, op: str, precision: str | None) -> float:
        return max(point.work / point.seconds for point in self._alone(op, precision))

    def _curve(self, op: str, precision: Format, peak_flops_per_s: float) -> Curve:
        alone = self._alone(op, precision)
        curve = Curve(
            size=tuple(point.size for point in alone),
            fraction=tuple(
                min(point.work / point.seconds / peak_flops_per_s, LARGEST_FRACTION) for point in alone
            ),
        )
        self._note(
            f"{op} {precision}",
            op,
            precision,
            lambda point: point.work / (peak_flops_per_s * curve.at(point.size)),
        )
        return curve

    def _grouped(self) -> float:
        """Rate of grouped matmuls over that of a plain one with all their FLOPs, of which a call has three: the
        median over sizes and formats."""
        plain_s_of: dict[Point, float] = {}
        for fmt in self._formats("grouped"):
            for point in self._alone("grouped", fmt):
                plain_s_of[point] = point.work / (self.peaks[fmt] * self.matmul[fmt].at(point.work / 3))
        if not plain_s_of:
            return 1.0
        rate = min(median(plain_s / point.seconds for point, plain_s in plain_s_of.items()), LARGEST_GROUPED)
        self.fits.append(fit_of("grouped", [*plain_s_of], lambda point: plain_s_of[point] / rate))
        return rate

    def _fraction(self, op: str, precision: Format | None) -> float:
        """What an operation reaches of the memory bandwidth."""
        bytes_per_s = median(point.work / point.seconds for point in self._alone(op, precision))
        self._note(f"{op} {precision or ''}".strip(), op, precision, lambda point: point.work / bytes_per_s)
        return bytes_per_s / self.memory_bytes_per_s

    def _host(self) -> tuple[float, float]:
        """Seconds of an act and of a step that no operation accounts for: the line of a tiny step over its
        microbatches, of which each is two acts, less launches."""
        steps = points(self._samples, "step", None, 1)
        if len(steps) < 2:
            return 0.0, 0.0
        first, *_, last = steps
        own = [point.seconds - self.launch_s * point.work for point in (first, last)]
        each_s = max((own[1] - own[0]) / (last.size - first.size), 0.0)
        step_s = max(own[0] - each_s * first.size, 0.0)

        def predict(point: Point) -> float:
            return self.launch_s * point.work + each_s * point.size + step_s

        self.fits.append(fit_of("step", steps, predict))
        return each_s / 2, step_s

    def _note(self, name: str, op: str, precision: Format | None, predict: Callable[[Point], float]) -> None:
        """Note how well a rate says what was seen, at each number of busy ranks."""
        kind = next(kind for kind, ops in KINDS.items() if op in ops)
        shown = points(self._samples, op, precision, 1)
        for level in self.at_work:
            longer = self._turns(level.ranks) * getattr(level, kind)
            shared = points(self._samples, op, precision, level.ranks)
            shown += [point._replace(seconds=point.seconds / longer) for point in shared]
        self.fits.append(fit_of(name, shown, predict))
