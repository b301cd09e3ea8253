"""Traces of a GPU as Kineto writes them, made by hand, so that each test knows where every microsecond goes."""

import json
from typing import Any

STREAM, COMMUNICATION_STREAM = 7, 20


def event(category: str, name: str, start_us: float, length_us: float, tid: Any, **args: Any) -> dict[str, Any]:
    """A complete event."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 4242,
        "tid": tid,
        "ts": start_us,
        "dur": length_us,
        "args": args,
    }


def kernel(name: str, start_us: float, length_us: float, stream: int = STREAM, **args: Any) -> dict[str, Any]:
    """What a stream ran, with the arguments that Kineto gives every kernel."""
    shown = {"device": 0, "context": 1, "stream": stream, "correlation": int(start_us), "External id": 1, **args}
    return event("kernel", name, start_us, length_us, stream, **shown)


def collective(name: str, said: str, start_us: float, length_us: float, **group: Any) -> dict[str, Any]:
    """A kernel of NCCL with what torch's ParamCommsUtils adds to it."""
    args = {
        "Collective name": said,
        "In msg nelems": 1024,
        "Out msg nelems": 1024,
        "dtype": "BFloat16",
        **{key.replace("_", " "): value for key, value in group.items()},
    }
    return kernel(name, start_us, length_us, COMMUNICATION_STREAM, **args)


def step(number: int, start_us: float, length_us: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start_us, length_us, 4242)


def trace(events: list[dict[str, Any]], **top: Any) -> str:
    """The file's text."""
    metadata = {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "ts": 0, "args": {"name": "python"}}
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}],
        "displayTimeUnit": "ms",
        **top,
        "traceEvents": [metadata, *events],
    }
    return json.dumps(document)
