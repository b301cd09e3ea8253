"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: Chrome's trace-event JSON.

A process for each rank, a thread for each of its tracks; a track whose events overlap, as sends may,
goes over several threads. Times are in microseconds, rounded to the nanosecond that the viewer keeps, so that
events that touch still do. The format: "Trace Event Format", Chromium project, complete ("X") and metadata ("M")
events.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainwright.spec.timeline import TRACKS, Event, Timeline
from trainwright.spec.units import GIGA, KILO

Thread = tuple[int, str, int]
"""Rank, track, and which of the threads that a track of overlapping events goes over."""


def trace_json(timeline: Timeline) -> str:
    """The predicted step."""
    head = {
        "run": timeline.run_name,
        "step_s": timeline.step_s,
        "microbatches": timeline.num_microbatches,
        "of_microbatches": timeline.of_microbatches,
    }
    processes = [
        f"pipeline rank {rank}, stage {' and '.join(map(str, stages))}"
        for rank, stages in enumerate(timeline.stages)
    ]
    return events_json(head, processes, TRACKS, timeline.events)


def events_json(
    head: Mapping[str, Any], processes: Sequence[str], tracks: Sequence[str], events: Iterable[Event]
) -> str:
    """One JSON document, an event a line: a process for each rank, by its name, and its tracks in this order."""
    lines = ",\n".join(
        json.dumps(each, separators=(",", ":"), allow_nan=False)
        for each in _trace_events(processes, tracks, events)
    )
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(head)},"traceEvents":[\n{lines}\n]}}\n'


def _trace_events(
    processes: Sequence[str], tracks: Sequence[str], events: Iterable[Event]
) -> Iterator[dict[str, Any]]:
    placed = [*_placed(events)]
    found = {thread for _, thread, _, _ in placed}
    ordered = sorted(found, key=lambda thread: (thread[0], tracks.index(thread[1]), thread[2]))
    # Beyond the numbers of processes, as a thread with its process' number counts as its main one.
    numbers = {thread: len(processes) + 1 + at for at, thread in enumerate(ordered)}
    yield from _names(processes, numbers)
    for event, thread, start_ns, end_ns in placed:
        yield _complete(event, numbers[thread], start_ns, end_ns)


def _placed(events: Iterable[Event]) -> Iterator[tuple[Event, Thread, int, int]]:
    """Events with their threads and times; the viewer drops events of one thread that overlap."""
    ends_ns: dict[Thread, int] = {}
    for event in events:
        start_ns, end_ns = sorted((round(event.start_s * GIGA), round(event.end_s * GIGA)))
        if end_ns == start_ns:
            continue
        lane = 0
        while ends_ns.get((event.rank, event.track, lane), 0) > start_ns:
            lane += 1
        thread = (event.rank, event.track, lane)
        ends_ns[thread] = end_ns
        yield event, thread, start_ns, end_ns


def _complete(event: Event, number: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    gives = {"gives back": "the step is this much shorter"} if event.duration_s < 0 else {}
    seconds = (
        {"seconds": {cause: _short(value) for cause, value in event.seconds.items()}} if event.seconds else {}
    )
    return {
        "ph": "X",
        "pid": event.rank + 1,
        "tid": number,
        "name": event.name,
        "cat": event.track,
        "ts": start_ns / KILO,
        "dur": (end_ns - start_ns) / KILO,
        "args": {**{name: _short(value) for name, value in event.args.items()}, **gives, **seconds},
    }


def _names(processes: Sequence[str], numbers: Mapping[Thread, int]) -> Iterator[dict[str, Any]]:
    """Names of processes and threads, and the order in which they are shown."""
    for rank, name in enumerate(processes):
        yield {"ph": "M", "pid": rank + 1, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank + 1, "name": "process_sort_index", "args": {"sort_index": rank}}
    for (rank, track, lane), number in numbers.items():
        at = {"ph": "M", "pid": rank + 1, "tid": number}
        yield {**at, "name": "thread_name", "args": {"name": f"{track} {lane + 1}" if lane else track}}
        yield {**at, "name": "thread_sort_index", "args": {"sort_index": number}}


def _short(value: Any) -> Any:
    """Nine digits of a number: enough to add up."""
    return float(f"{value:.9g}") if isinstance(value, float) else value
