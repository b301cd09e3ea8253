"""A closer look at a few designated steps: the peak of live bytes, and communication that compute waits for.

Both cost time, so neither runs in a step that is timed.

Peak bytes. On a GPU the allocator knows. On a CPU the profiler reports each allocation and release of the CPU
allocator, temporaries inside operators among them; the running sum on top of what was live before the step is the
curve, and its maximum the peak.

Waiting. Tensor parallelism waits in the operator `wait_tensor` of PyTorch's functional collectives, FSDP2 in
`Work.wait`: a dispatch mode and a wrapper charge these to the axis that the collective's group belongs to. What
this package waits for itself (pipeline transfers, bucketed gradients) charges the clock directly, in every step.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh


def peak_bytes_of(step: Callable[[], object], device: torch.device) -> int:
    """Run `step` once; the most bytes of tensors that were live at one time, those from before it included."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    before_bytes = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  (missing in PyTorch's stubs)
        peak = max(peak, running)
    return before_bytes + peak


def live_bytes() -> int:
    """Bytes of the storages of all CPU tensors that Python knows, each once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # type() and not isinstance, which would ask deprecated objects of PyTorch for their class.
        if issubclass(type(thing), torch.Tensor) and type(thing) is not DTensor and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextmanager
def waits_charged(clock: Clock, mesh: Mesh) -> Iterator[None]:
    """While it lasts, waits of tensor parallelism and of FSDP2 inside compute are charged to their axis."""
    plain_wait = dist.Work.wait

    def timed_wait(work: dist.Work, *arguments: Any) -> Any:
        # Inside compute only FSDP2 waits for works; elsewhere the clock is on the right cause already.
        with clock.of("dp" if clock.cause == "compute" else clock.cause):
            return plain_wait(work, *arguments)

    dist.Work.wait = timed_wait  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with _FunctionalWaits(clock, mesh):
            yield
    finally:
        dist.Work.wait = plain_wait  # pyright: ignore[reportAttributeAccessIssue]


class _FunctionalWaits(TorchDispatchMode):
    """Times `wait_tensor`, having noted which axis each functional collective's output belongs to."""

    def __init__(self, clock: Clock, mesh: Mesh) -> None:
        super().__init__()
        self._clock, self._mesh = clock, mesh
        self._axis_of: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor turns it into operators on plain tensors, which come back here.
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            axis = self._axis_of.pop(args[0].untyped_storage().data_ptr(), "tp")
            with self._clock.of(axis):
                return func(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        axis = self._mesh.axis_of_group(args[-1])
        if axis is not None and isinstance(output, torch.Tensor):
            self._axis_of[output.untyped_storage().data_ptr()] = "dp" if axis.startswith("dp") else axis
        return output
