"""A trace of torch.profiler (Chrome JSON) into steps, kernels and operators; checked to be one, and of this run.

Fields are those that Kineto writes (github.com/pytorch/kineto, libkineto/src/output_json.cpp): complete events
(`ph` X) with `ts` and `dur` in microseconds. On a GPU the category `kernel` (and `gpu_memcpy`, `gpu_memset`) has
what the device ran; a kernel of NCCL has `Collective name`, `Group size`, `Process Group Description` and
`Process Group Ranks` among its `args`. On a CPU the category `cpu_op` has operators, nested as they call one
another, and gloo's collectives are annotations on threads of its own. `distributedInfo` names rank and world."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.run import Run
from trainwright.spec.trace import METADATA, STEP

EXPECTED = "expected is the Chrome JSON that torch.profiler exports (export_chrome_trace, or its trace handler)"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
GLOO = "gloo:"
UPDATE = "Optimizer.step#"
"""The annotation that torch.optim makes around an update."""


class Span(NamedTuple):
    """An event, in seconds."""

    start_s: float
    end_s: float
    name: str
    thread: Any
    """Of the program, or the device's stream."""
    args: dict[str, Any]


class Trace(NamedTuple):
    """What is used of a trace."""

    name: str
    rank: int
    steps: tuple[Span, ...]
    """Whole ones, in order; of the device where it has some of its own."""
    device: tuple[Span, ...]
    """What a GPU ran; empty for a CPU."""
    program: tuple[Span, ...]
    """Operators and annotations of the thread that steps."""
    transfers: tuple[Span, ...]
    """Collectives of gloo."""
    updates: tuple[Span, ...]
    """Of the optimizer, on the device."""


def parse_trace(text: str, name: str, run: Run) -> Trace:
    """A trace of `run`. `InvalidSpec` where it is none, of another run, or has no whole step."""
    document = _document(text, name)
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise InvalidSpec(f"{name}: has no traceEvents; {EXPECTED}")
    info = document.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    _require_same(document, info, name, run)
    spans: dict[str, list[Span]] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("cat"), str):
            span = _span(event, name)
            spans.setdefault(event["cat"].lower(), []).append(span)
    annotations, on_gpu = spans.get("user_annotation", []), spans.get("gpu_user_annotation", [])
    device = tuple(span for category in ON_DEVICE for span in spans.get(category, []))
    steps = _steps(on_gpu) if device else ()
    steps = steps or _steps(annotations)
    if not steps:
        seen = ", ".join(sorted(spans)) or "none"
        why = (
            f"no whole step (an annotation {STEP}N, which profiler.step() with a schedule makes) among its events"
        )
        raise InvalidSpec(f"{name}: {why} (categories: {seen}); {EXPECTED}, of some steps")
    if not device and "cpu_op" not in spans:
        raise InvalidSpec(f"{name}: has neither kernels nor operators; {EXPECTED}, with activities recorded")
    main = steps[0].thread
    # gloo's annotations of sends last until they have left, so that they are open beside what the program does.
    mine = [span for span in annotations if not span.name.startswith(GLOO)]
    return Trace(
        name=name,
        rank=info["rank"] if isinstance(info.get("rank"), int) else 0,
        steps=steps,
        device=device,
        program=tuple(span for span in [*spans.get("cpu_op", []), *mine] if span.thread == main),
        transfers=tuple(span for span in annotations if span.name.startswith(GLOO)),
        updates=tuple(span for span in on_gpu if span.name.startswith(UPDATE)),
    )


def _document(text: str, name: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except RecursionError:
        raise InvalidSpec(f"{name}: not JSON: nested too deeply; {EXPECTED}") from None
    except json.JSONDecodeError as error:
        # What is cut off is found wrong where it ends, or ends in the middle of something.
        if error.pos >= len(text.rstrip()) or not text.rstrip().endswith(("}", "]")):
            why = "ends early, as if its writer had been stopped; record or copy it again"
            raise InvalidSpec(f"{name}: not whole JSON (line {error.lineno}): it {why}") from None
        raise InvalidSpec(f"{name}: not JSON (line {error.lineno}): {error.msg}; {EXPECTED}") from None
    except ValueError:  # an integer of more digits than Python converts
        raise InvalidSpec(f"{name}: not JSON: a number of too many digits; {EXPECTED}") from None
    if isinstance(document, list):
        return {"traceEvents": document}
    if not isinstance(document, dict):
        raise InvalidSpec(f"{name}: is no trace; {EXPECTED}")
    return document


def _require_same(document: dict[str, Any], info: dict[str, Any], name: str, run: Run) -> None:
    """Refuse a trace of another run: of another hash where it has one, else of another number of ranks."""
    marked = document.get(METADATA)
    if marked is not None and marked != run.hash:
        reject(
            "run_hash",
            marked,
            f"{name} is of another run than the run file, {run.hash}; name that run's with --run",
        )
    world = info.get("world_size")
    if isinstance(world, int) and world != run.layout.world:
        why = (
            f"{name} is of another run than the run file, of {run.layout.world} ranks; name that run's with --run"
        )
        reject("world_size", world, why)


def _span(event: dict[str, Any], name: str) -> Span:
    start_us, length_us, args = _number(event.get("ts")), _number(event.get("dur", 0)), event.get("args")
    if start_us is None or length_us is None or length_us < 0:
        said = f"ts={event.get('ts')!r}, dur={event.get('dur')!r} of {event.get('name')!r}"
        raise InvalidSpec(f"{name}: {said} are no microseconds; {EXPECTED}")
    return Span(
        start_s=start_us * 1e-6,
        end_s=(start_us + length_us) * 1e-6,
        name=str(event.get("name")),
        thread=(event.get("pid"), event.get("tid")),
        args=args if isinstance(args, dict) else {},
    )


def _number(value: object) -> float | None:
    """A finite number; None for anything else."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _steps(annotations: Iterable[Span]) -> tuple[Span, ...]:
    found = [span for span in annotations if re.fullmatch(f"{STEP}\\d+", span.name) and span.end_s > span.start_s]
    return tuple(sorted(found))
