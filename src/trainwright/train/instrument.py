"""What is looked at beside the clock: the peak of live bytes, and communication that compute waits for.

The first costs time, and runs in no step that is timed; the second runs in all steps.

Peak bytes. On a GPU the allocator knows. On a CPU every operator's outputs are looked at: a storage that is new
counts from then until it is gone, whichever thread lets go of it (the profiler's record of allocations misses
those that gloo's threads release). Temporaries inside one operator are not seen.

Waiting. FSDP2 waits inside compute: a wrapper charges that to dp. What this package waits for itself (tensor
parallelism, pipeline transfers, bucketed gradients) charges the clock directly.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.train.clock import Clock

MOST_COLLECTIONS = 4
"""Of garbage, each of which may make more of it."""


def peak_bytes_of(step: Callable[[], object], device: torch.device) -> int:
    """Run `step` once; the most bytes of tensors that were live at one time, those from before it included."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    with LiveBytes(live_storages()) as live:
        step()
    return live.peak_bytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live CPU storages while it is on, beginning with `storages`."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()
        self._bytes_of: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gone: deque[int] = deque()
        self.bytes = self.peak_bytes = 0
        for storage in storages:
            self._watch(storage)

    def __enter__(self) -> Self:
        # FSDP2 empties and fills the storages that it gathers into, which is no operator.
        plain_resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            resized = plain_resize(storage, num_bytes)
            self._watch(storage)
            return resized

        self._plain_resize = plain_resize
        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor turns it into operators on plain tensors, which come back here.
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, torch.Tensor) and self._counts(output):
                self._watch(output.untyped_storage())
        return result

    def _let_go(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._gone.append(key)

    def _reap(self) -> None:
        """Take off what is gone."""
        while self._gone:
            gone = self._gone.popleft()
            self.bytes -= self._bytes_of.pop(gone)
            del self._references[gone]

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether it has bytes: DTensor plans with tensors that say cpu and have none."""
        return tensor.untyped_storage().device.type == "cpu"

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new or has another size than before."""
        self._reap()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._bytes_of:
            # Other threads let go of storages too: they only leave a note, which the next look reads.
            self._references[key] = weakref.ref(storage, lambda reference: self._let_go(key, reference))
        self.bytes += num_bytes - self._bytes_of.get(key, 0)
        self._bytes_of[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def live_storages() -> list[torch.UntypedStorage]:
    """Storages of all CPU tensors that Python knows, each once. Garbage goes first, and what it held: it would be
    let go of at any time later."""
    for _ in range(MOST_COLLECTIONS):
        if not gc.collect():
            break
    storages: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        # type() and not isinstance, which would ask deprecated objects of PyTorch for their class.
        if issubclass(type(thing), torch.Tensor) and type(thing) is not DTensor and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage
    return list(storages.values())


@contextmanager
def looked_at_closely(clock: Clock) -> Iterator[None]:
    """While it lasts, the clock is precise: it waits for a device that runs behind the program."""
    clock.precise = True
    try:
        yield
    finally:
        clock.precise = False


@contextmanager
def waits_charged(clock: Clock, device: torch.device) -> Iterator[None]:
    """While it lasts, FSDP2's waits inside compute are charged to dp. Elsewhere the clock is on the right cause
    already. It costs some microseconds a wait."""

    def charging(wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed_wait(*arguments: Any, **named: Any) -> Any:
            if clock.cause != "compute":
                return wait(*arguments, **named)
            with clock.of("dp"):
                return wait(*arguments, **named)

        return timed_wait

    # On a GPU it waits for events of other streams too, in these two.
    places = [(dist.Work, "wait")]
    if device.type == "cuda":
        places += [(FSDPParamGroup, "wait_for_unshard"), (FSDPParamGroup, "finalize_backward")]
    plain = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, wait in plain:
        setattr(place, name, charging(wait))
    try:
        yield
    finally:
        for place, name, wait in plain:
            setattr(place, name, wait)
