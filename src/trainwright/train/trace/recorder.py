"""A mode that sees every collective that PyTorch dispatches, whoever calls it: this package, FSDP2, DTensor.

All of them go through operators, those of `c10d` (sends and receives too) or of `_c10d_functional`, whose
arguments name the group and hold the tensors. What is asynchronous ends in `Work.wait` or `wait_tensor`; matrices
that are multiplied in between are what it overlaps with.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.spec.traffic import Act, Collective
from trainwright.train.mesh import Mesh
from trainwright.train.parallelize import Trainer
from trainwright.train.trace.places import Places

OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""What an operator is called; one that is not here keeps its own name."""

MATRICES = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm")
ATTENTION = "_scaled_dot_product"


@dataclass
class Open:
    """A collective that nobody has waited for yet."""

    number: int
    work: Any
    storage: int
    """Of a functional collective's output."""
    beside: dict[str, None] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records a trainer's collectives and acts while it is on."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._mesh = trainer.mesh
        self.places = Places(trainer, self._on_act)
        self._axes = axes_of_groups(trainer.mesh)
        self._found: list[dict[str, Any]] = []
        self._open: list[Open] = []
        self._acts: list[Act] = []
        self._act: tuple[str, float] | None = None
        self._began_s = 0.0

    def __enter__(self) -> Self:
        self._plain_wait = dist.Work.wait
        plain_wait, recorder = self._plain_wait, self

        def wait(work: dist.Work, *arguments: Any) -> Any:
            started_s = recorder._now_s()
            result = plain_wait(work, *arguments)
            recorder._ended(lambda each: each.work is work, started_s)
            return result

        dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
        self._followed = self.places.followed()
        self._followed.__enter__()
        self._began_s = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._followed.__exit__(None, None, None)
        dist.Work.wait = self._plain_wait  # pyright: ignore[reportAttributeAccessIssue]
        self._on_act(None)
        self._ended(lambda each: True, self._now_s())

    def begin_update(self) -> None:
        """What runs from now on clips and moves the parameters."""
        self.places.outside = "update"
        self._on_act("update")

    @property
    def collectives(self) -> list[Collective]:
        return [Collective(**each) for each in self._found]

    @property
    def acts(self) -> list[Act]:
        return self._acts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented  # They turn it into operators on plain tensors, which come back here.
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._called(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return self._functional(func, args, kwargs)
        name = func._opname
        if self._open and (name in MATRICES or name.startswith(ATTENTION)):
            place = self.places.module
            for each in self._open:
                each.beside[f"{self.places.phase} of {place}" if place else self.places.phase] = None
        return func(*args, **kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        group = _group(args)
        if group is None or func._opname in ("barrier", "monitored_barrier_"):
            return func(*args, **kwargs)
        operation: str = OPERATIONS.get(func._opname) or str(func._opname).strip("_")
        tensors = [_tensors(each) for each in args]
        with_tensors = [each for each in tensors if each]
        # The output comes first where there are both; a gather's is the whole message.
        takes = with_tensors[-1] if operation in ("reduce_scatter", "all_to_all") else with_tensors[0]
        ranks = dist.get_process_group_ranks(group)
        if operation in ("send", "receive"):
            peer = ranks[next(each for each in args if isinstance(each, int))]
            pair = (self._mesh.rank, peer) if operation == "send" else (peer, self._mesh.rank)
            number = self._begin(operation, group.group_name, takes, list(pair))
        else:
            number = self._begin(operation, group.group_name, takes, ranks)
        result = func(*args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        work = next((found for each in parts if (found := _unboxed(each, "Work")) is not None), None)
        self._open.append(Open(number, work, 0))
        return result

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._opname == "wait_tensor":
            storage, started_s = args[0].untyped_storage()._cdata, self._now_s()
            result = func(*args, **kwargs)
            self._ended(lambda each: each.storage == storage, started_s)
            return result
        group = _functional_group(args)
        if group is None:
            return func(*args, **kwargs)  # a helper of theirs that talks to nobody
        operation: str = OPERATIONS.get(func._opname) or str(func._opname)
        result = func(*args, **kwargs)
        takes = _tensors(result if operation == "all_gather" else args[0])
        number = self._begin(operation, group.group_name, takes, dist.get_process_group_ranks(group))
        self._open.append(Open(number, None, result.untyped_storage()._cdata))
        return result

    def _begin(self, operation: str, group: str, tensors: list[torch.Tensor], ranks: list[int]) -> int:
        axis = self._axes.get(group, "world")
        # FSDP2 names the unit of its own collectives; those of other axes stand where the program stands.
        sharded = (axis.startswith("dp") or axis.startswith("edp")) and self.places.unit
        where = self.places.unit if sharded else "" if axis == "pp" else self.places.module
        now_s = self._now_s()
        self._found.append(
            {
                "rank": self._mesh.rank,
                "phase": self.places.phase,
                "act": self.places.act,
                "where": where,
                "operation": operation,
                "axis": axis,
                "ranks": tuple(ranks),
                "dtype": str(tensors[0].dtype).removeprefix("torch."),
                "bytes": sum(each.numel() * each.element_size() for each in tensors),
                "start_s": now_s,
                "end_s": now_s,
                "waited_s": 0.0,
                "beside": (),
            }
        )
        return len(self._found) - 1

    def _ended(self, which: Callable[[Open], bool], started_s: float) -> None:
        """What was waited for from `started_s` until now is over."""
        now_s = self._now_s()
        for each in [each for each in self._open if which(each)]:
            self._open.remove(each)
            self._found[each.number] |= {
                "end_s": now_s,
                "waited_s": now_s - started_s,
                "beside": tuple(each.beside),
            }

    def _on_act(self, name: str | None) -> None:
        now_s = self._now_s()
        if self._act is not None:
            self._acts.append(Act(rank=self._mesh.rank, name=self._act[0], start_s=self._act[1], end_s=now_s))
        self._act = None if name is None else (name, now_s)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


def axes_of_groups(mesh: Mesh) -> dict[str, str]:
    """The axis of each group by the name that PyTorch gave it. One group serves several axes that divide the ranks
    alike; the first of them names it."""
    cp = mesh.layout.cp > 1
    plain = {"first_last": "ends", "dp_cp": "dp x cp" if cp else "dp"}
    if mesh.dp_replicate == 1:
        plain["dp_shard"] = plain["dp_cp"]
    found: dict[str, str] = {}
    for axis, group in mesh.groups.items():
        found.setdefault(group.group_name, plain.get(axis, axis))
    return found


def _group(args: Any) -> Any:
    """The process group among the arguments."""
    return next((found for each in args if (found := _unboxed(each, "ProcessGroup")) is not None), None)


def _functional_group(args: Any) -> Any:
    """The group that a functional collective names in its last argument, or holds."""
    found = _group(args)
    if found is None and args and isinstance(args[-1], str):
        return dist.distributed_c10d._resolve_process_group(args[-1])  # pyright: ignore[reportPrivateImportUsage]
    return found


def _unboxed(value: Any, kind: str) -> Any:
    """A process group or work from the form in which operators take it; None for anything else."""
    if not isinstance(value, torch.ScriptObject) or kind not in str(value._type()):
        return None
    return getattr(dist, kind).unbox(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of an argument: one, a list, or lists of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
