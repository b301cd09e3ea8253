"""Where the seconds of a traced step went: exposed communication is what no compute ran beside.

On a GPU every moment of a step belongs to one cause: to compute where a kernel of it runs, else to communication,
else to copies, else it is idle; of kinds that run at once, to the first of `FIRST`. Communication that runs
beside compute is hidden. On a CPU the thread that steps says what it does at each moment: the clock's annotation
names the cause (without one, a moment without operators in which gloo communicates is exposed), the innermost
operator that is known the kind of compute; what starts a collective is communication too.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from trainwright.measure.trace import Span, Trace
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.explanation import COMMUNICATION, RECOMPUTED, SeenStep, trace_causes
from trainwright.spec.kernels import KernelTable
from trainwright.spec.layout import AXES, Layout
from trainwright.spec.run import Run
from trainwright.spec.trace import CAUSE

FIRST = ("matmul", "attention", "elementwise", "optimizer", *COMMUNICATION, "unnamed", "copies")
"""Whose moment it is where several run."""
COMPUTE = ("matmul", "attention", "elementwise")
NOISE_S = 1e-9
"""Times have nanoseconds."""
WAITED = {"bubble": "pp", "data": "idle", "host": "idle"}
"""Causes of our clock by those of a trace; the others keep their names."""

Interval = tuple[float, float]
Seconds = defaultdict[str, float]


def seen_step(trace: Trace, run: Run, table: KernelTable) -> SeenStep:
    """A mean step of a trace, by the causes of `spec.explanation.trace_causes`."""
    window = (trace.steps[0].start_s, trace.steps[-1].end_s)
    seconds, hidden, collectives = (_of_device if trace.device else _of_program)(trace, run, table, window)
    count, recomputes = len(trace.steps), run.recipe.recompute != "none"
    parts = {name: sum(seconds.get(part, 0.0) for part in COMPUTE) for name in [RECOMPUTED] if recomputes}
    names = trace_causes(recomputes)
    by_cause = {name: parts.get(name, seconds.get(name, 0.0)) / count for name in names}
    first, last = (trace.steps[at].name.partition("#")[2] for at in (0, -1))
    numbers = f"steps {first} to {last}" if count > 1 else f"step {first}"
    notes = [f"seen: rank {trace.rank} alone; predicted: the busiest stage"] if run.layout.world > 1 else []
    if recomputes:
        kinds = ", ".join(f"{kind} {seconds.get(kind, 0.0) / count:.4g} s" for kind in COMPUTE)
        notes.append(f"of the compute, first or again: {kinds}")
    if by_cause["unnamed"]:
        notes.append("unnamed: collectives whose group neither its description nor its ranks tell the axis of")
    return SeenStep(
        source=f"trace of rank {trace.rank}, {numbers}",
        steps=count,
        seconds=by_cause,
        hidden={axis: value / count for axis, value in hidden.items() if value > NOISE_S},
        collectives={kind: value / count for kind, value in collectives.items()},
        notes=tuple(notes),
    )


# GPU


def _of_device(trace: Trace, run: Run, table: KernelTable, window: Interval) -> tuple[Seconds, Seconds, Seconds]:
    updates = sorted(_cut([(span.start_s, span.end_s) for span in trace.updates], window))
    axes = Axes(run.layout, table)
    marked: list[tuple[float, float, str]] = []
    collectives = Seconds(float)
    for span in trace.device:
        start_s, end_s = max(span.start_s, window[0]), min(span.end_s, window[1])
        if end_s <= start_s:
            continue
        kind = "communication" if "Collective name" in span.args else table.kind(span.name)
        if kind == "communication":
            collective = table.collective_of(str(span.args.get("Collective name") or span.name))
            collectives[collective] += end_s - start_s
            kind = axes.of(span, collective)
        elif kind in COMPUTE and any(first <= span.start_s < last for first, last in updates):
            kind = "optimizer"
        marked.append((start_s, end_s, kind))
    if not marked:
        raise InvalidSpec(
            f"{trace.name}: its steps have no kernels on the device; record kernels and steps together"
        )
    seconds = shared_out(marked, window)
    hidden = Seconds(float)
    for axis in COMMUNICATION:
        hidden[axis] = _union_s([(start, end) for start, end, kind in marked if kind == axis]) - seconds[axis]
    return seconds, hidden, collectives


def shared_out(marked: Sequence[tuple[float, float, str]], window: Interval) -> Seconds:
    """Seconds of a window by kind, each moment given to the first of `FIRST` that runs; the rest is idle."""
    place = {kind: at for at, kind in enumerate(FIRST)}
    borders = sorted(
        [(start, 1, place[kind]) for start, _, kind in marked]
        + [(end, -1, place[kind]) for _, end, kind in marked]
    )
    running, seconds, now = [0] * len(FIRST), Seconds(float), window[0]
    for at, change, kind in borders:
        if at > now:
            on = next((name for name, count in zip(FIRST, running, strict=True) if count), "idle")
            seconds[on] += at - now
            now = at
        running[kind] += change
    seconds["idle"] += window[1] - now
    return seconds


class Axes:
    """Which axis of the layout a collective is of: by its group's description, its ranks, its size, its kind."""

    def __init__(self, layout: Layout, table: KernelTable) -> None:
        self._table = table
        groups = {axis: layout.groups(axis) for axis in AXES if axis in used_degrees(layout)}
        self._groups: dict[str, tuple[tuple[int, ...], ...]] = {**groups}
        if layout.ep > 1:
            self._groups["ep"] = layout.expert_groups()
        self._degrees = used_degrees(layout)
        self._known: dict[tuple[str, str, str, str], str] = {}

    def of(self, span: Span, collective: str) -> str:
        described, ranks, size = (
            str(span.args.get(key, ""))
            for key in ("Process Group Description", "Process Group Ranks", "Group size")
        )
        key = (described, ranks, size, collective)
        if key not in self._known:
            self._known[key] = self._find(described, ranks, size, collective)
        return self._known[key]

    def _find(self, described: str, ranks: str, size: str, collective: str) -> str:
        used = self._degrees
        named = self._table.axis(described)
        if named in used:
            return named
        group = _ranks(ranks)
        for axis in used:
            if group and group in map(set, self._groups[axis]):
                return axis
        if any(group > set(each) for each in self._groups.get("dp", ())):
            return "dp"  # data parallelism over the ranks of cp, or of tp, too
        if collective == "send_receive" and "pp" in used:
            return "pp"
        if collective == "all_to_all" and "ep" in used:
            return "ep"
        fitting = [axis for axis, degree in used.items() if str(degree) == size]
        if len(fitting) == 1:
            return fitting[0]
        return next(iter(used)) if len(used) == 1 else "unnamed"


def used_degrees(layout: Layout) -> dict[str, int]:
    """Degrees above 1, by axis."""
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp, "dp": layout.dp}
    return {axis: degree for axis, degree in degrees.items() if degree > 1}


def _ranks(text: str) -> set[int]:
    """Of `[0, 1, 2, 3]`; nothing where the list is abridged."""
    try:
        found = json.loads(text)
    except ValueError:
        return set()
    return set(found) if isinstance(found, list) and all(isinstance(each, int) for each in found) else set()


# CPU


def _of_program(trace: Trace, run: Run, table: KernelTable, window: Interval) -> tuple[Seconds, Seconds, Seconds]:
    transfers = _merged(_cut([(span.start_s, span.end_s) for span in trace.transfers], window))
    used = used_degrees(run.layout)
    alone = next(iter(used)) if len(used) == 1 else "unnamed"
    is_marked = any(span.name.startswith(CAUSE) for span in trace.program)
    seconds = Seconds(float)
    exposed: list[Interval] = []
    idle: list[Interval] = []
    for start_s, end_s, stack in _moments(trace.program, window):
        kind = _kind(stack, table, alone)
        seconds[kind] += end_s - start_s
        if kind in COMMUNICATION or kind == "unnamed":
            exposed.append((start_s, end_s))
        elif kind == "idle":
            idle.append((start_s, end_s))
    hidden_s = _union_s(transfers) - _common_s(transfers, _merged(exposed))
    if not is_marked:
        waited_s = _common_s(transfers, _merged(idle))
        seconds[alone] += waited_s
        seconds["idle"] -= waited_s
        hidden_s -= waited_s
    collectives = Seconds(float)
    for span in trace.transfers:
        for start_s, end_s in _cut([(span.start_s, span.end_s)], window):
            collectives[table.collective_of(span.name)] += end_s - start_s
    return seconds, Seconds(float, {alone: hidden_s}), collectives


def _kind(stack: Sequence[str], table: KernelTable, alone: str) -> str:
    """What the program does where these annotations and operators are open, the innermost last."""
    cause = next((name.removeprefix(CAUSE) for name in reversed(stack) if name.startswith(CAUSE)), "")
    if cause and cause != "compute":
        return WAITED.get(cause, cause)
    known = next((kind for kind in map(table.known_kind, reversed(stack)) if kind), None)
    if known == "communication":
        return "dp" if any(name.startswith("FSDP::") for name in stack) else alone
    if known is not None:
        return known
    return "elementwise" if any(name.startswith("aten::") for name in stack) else "idle"


def _moments(spans: Iterable[Span], window: Interval) -> Iterable[tuple[float, float, tuple[str, ...]]]:
    """The window in pieces, each with the names that are open, the innermost last."""
    open_spans: list[Span] = []
    now = window[0]

    def until(at_s: float) -> Iterator[tuple[float, float, tuple[str, ...]]]:
        """Pieces up to a time, at which spans end that have ended by then."""
        nonlocal now, open_spans
        while now < at_s:
            done_s = min([at_s, *(span.end_s for span in open_spans)])
            if done_s > now:
                yield now, done_s, tuple(span.name for span in open_spans)
                now = done_s
            open_spans = [span for span in open_spans if span.end_s > now]

    for span in sorted(spans, key=lambda each: (each.start_s, -each.end_s)):
        if window[0] < span.end_s and span.start_s < window[1]:
            yield from until(span.start_s)
            open_spans.append(span)
    yield from until(window[1])


# Intervals


def _cut(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of the intervals is inside the window."""
    found = [(max(start, window[0]), min(end, window[1])) for start, end in intervals]
    return [(start, end) for start, end in found if end > start]


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, as intervals that don't touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _common_s(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Seconds that are in both; each has intervals that don't touch, in order."""
    common_s, at = 0.0, 0
    for start, end in left:
        while at < len(right) and right[at][1] <= start:
            at += 1
        further = at
        while further < len(right) and right[further][0] < end:
            common_s += min(end, right[further][1]) - max(start, right[further][0])
            further += 1
    return common_s


def _union_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in _merged(intervals))
