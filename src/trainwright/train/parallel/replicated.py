"""Data parallelism where every rank holds the whole piece (zero=0, or shards of one rank): gradients are summed.

Nothing is wrapped, so a single process runs the plain model at its own speed. Gradients go out in flat buckets,
in the order in which backward finishes them; with overlap, each bucket leaves while backward goes on (PyTorch DDP,
arXiv:2006.15704 s3.2).

In bf16 the piece holds bf16 weights; fp32 masters stand beside them, and sums of the microbatches' gradients in
fp32, or in bf16 where the recipe says so (arXiv:1710.03740 s3.1). Norm weights under sequence parallelism have
gradients that are partial sums over tp, which are added up here too, once per step. Experts are summed over the
ranks that hold the same ones (edp), which are others than those of dp.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainwright.spec.units import MIB
from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import mixtures
from trainwright.train.model.transformer import Transformer
from trainwright.train.parallel.local import bytes_of, cut_alike, local_of

BUCKET_BYTES = 25 * MIB
"""DDP's default: large enough for the links' bandwidth, small enough to leave early."""


@dataclass
class Slot:
    """One parameter: the tensor that the piece computes with, and the one that the optimizer moves."""

    name: str
    piece: int
    working: nn.Parameter
    master: nn.Parameter
    of_experts: bool = False
    bucket: "Bucket | None" = None


@dataclass
class Bucket:
    """Gradients of one piece that travel together."""

    group: dist.ProcessGroup
    """Over which they are summed."""
    slots: list[Slot] = field(default_factory=list)
    num_bytes: int = 0
    waiting: int = 0
    """Gradients that backward has yet to finish."""
    work: dist.Work | None = None


class Replicated:
    """See the file's first paragraph. `overlap` lets buckets leave during the last backward pass."""

    def __init__(
        self,
        pieces: list[Transformer],
        mesh: Mesh,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        clock: Clock,
        *,
        overlap: bool,
    ) -> None:
        self._mesh, self._clock, self._overlap, self._gradient_dtype = mesh, clock, overlap, gradient_dtype
        self._is_last = dict.fromkeys(range(len(pieces)), False)
        self._slots = [
            slot for number, piece in enumerate(pieces) for slot in _slots(number, piece, compute_dtype)
        ]
        self.buckets: list[Bucket] = []
        for axis, of_experts in (("dp_cp", False), ("edp", True)):
            group = mesh.groups.get(axis)
            if group is not None:
                self.buckets += _buckets([slot for slot in self._slots if slot.of_experts == of_experts], group)
        self._of_experts = {id(slot.master) for slot in self._slots if slot.of_experts}
        for slot in self._slots:
            slot.master.grad_dtype = gradient_dtype
            if slot.bucket is not None or slot.master is not slot.working:
                slot.working.register_post_accumulate_grad_hook(self._finished(slot))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for slot in self._slots:
            yield slot.name, slot.master

    def copies(self, parameter: nn.Parameter) -> int:
        return self._mesh.layout.expert_dp if id(parameter) in self._of_experts else self._mesh.dp_cp

    def held_bytes(self) -> dict[str, float]:
        masters = sum(bytes_of(slot.master) for slot in self._slots)
        working = sum(bytes_of(slot.working) for slot in self._slots if slot.working is not slot.master)
        values = sum(local_of(slot.master).numel() for slot in self._slots)
        return {"parameters": float(masters + working), "gradients": float(values * self._gradient_dtype.itemsize)}

    def before_act(self) -> None:
        """Nothing is left over."""

    def before_backward(self, piece: int, *, is_last: bool, ends_round: bool) -> None:
        self._is_last[piece] = is_last

    def before_input_gradient(self, piece: int) -> None:
        self._is_last[piece] = False

    @torch.no_grad()
    def after_weight_gradient(self, piece: int, *, is_last: bool, ends_round: bool) -> None:
        # Some gradients were whole after the input gradient and some are now, so a bucket can't count them.
        if is_last and self._overlap:
            for bucket in self.buckets:
                if bucket.slots[0].piece == piece:
                    self._send(bucket)

    @torch.no_grad()
    def reduce(self) -> None:
        with self._clock.of("dp"):
            for bucket in self.buckets:
                if bucket.work is None:
                    self._send(bucket)
            for bucket in self.buckets:
                assert bucket.work is not None
                bucket.work.wait()
                bucket.work = None
        with self._clock.of("tp"):
            self._sum_partial()

    @torch.no_grad()
    def after_update(self) -> None:
        for slot in self._slots:
            slot.master.grad = None
            if slot.master is not slot.working:
                local_of(slot.working).copy_(local_of(slot.master))
        for bucket in self.buckets:
            bucket.waiting = len(bucket.slots)

    def _finished(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        """The hook that runs when a microbatch's gradient of `slot` is complete. The parameter holds it, so it
        holds neither the parameter nor what does: all are gone with the last that is used."""
        to_own, to_slot = weakref.ref(self), weakref.ref(slot)

        @torch.no_grad()
        def hook(working: torch.Tensor) -> None:
            own, of_working = to_own(), to_slot()
            if own is not None and of_working is not None:
                own._add(of_working)

        return hook

    def _add(self, slot: Slot) -> None:
        """A microbatch's gradient is complete."""
        if slot.master is not slot.working:
            _add_to_master(slot, self._gradient_dtype)
        bucket = slot.bucket
        if bucket is None or not self._overlap or not self._is_last[slot.piece]:
            return
        bucket.waiting -= 1
        if bucket.waiting == 0:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        gradients = [_gradient(slot) for slot in bucket.slots]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        # From now on the gradients are parts of the bucket: of the whole, no more than one bucket is there twice.
        for slot, part in zip(bucket.slots, flat.split([each.numel() for each in gradients]), strict=True):
            _set_gradient(slot, part)
        work = dist.all_reduce(flat, group=bucket.group, async_op=True)
        assert isinstance(work, dist.Work)
        bucket.work = work

    def _sum_partial(self) -> None:
        """Turn gradients that are partial sums over tp into whole ones, all in one collective."""
        partial = [slot for slot in self._slots if _is_partial(slot.master.grad)]
        if not partial:
            return
        flat = torch.cat([_gradient(slot).view(-1) for slot in partial])
        dist.all_reduce(flat, group=self._mesh.groups["tp"])
        for slot, summed in zip(partial, flat.split([_gradient(slot).numel() for slot in partial]), strict=True):
            gradient = slot.master.grad
            assert isinstance(gradient, DTensor)
            local = summed.view_as(_gradient(slot)).clone()
            slot.master.grad = DTensor.from_local(local, gradient.device_mesh, (Replicate(),), run_check=False)


def _slots(number: int, piece: Transformer, compute_dtype: torch.dtype) -> list[Slot]:
    masters = dict(piece.named_parameters())
    experts = {id(each) for _, mixture in mixtures(piece) for each in mixture.experts.parameters()}
    of_experts = {name for name, master in masters.items() if id(master) in experts}
    if all(master.dtype == compute_dtype for master in masters.values()):
        return [Slot(name, number, master, master, name in of_experts) for name, master in masters.items()]
    for name, master in masters.items():
        owner_name, _, last = name.rpartition(".")
        setattr(piece.get_submodule(owner_name), last, nn.Parameter(master.detach().to(compute_dtype)))
    piece.tie()
    return [
        Slot(name, number, working, masters[name], name in of_experts)
        for name, working in piece.named_parameters()
    ]


def _buckets(slots: list[Slot], group: dist.ProcessGroup) -> list[Bucket]:
    """Slots of a piece from its last parameter to its first, cut where a bucket is full."""
    buckets: list[Bucket] = []
    for slot in reversed(slots):
        local = local_of(slot.master)
        num_bytes = local.numel() * local.element_size()
        last = buckets[-1] if buckets else None
        if last is None or last.slots[0].piece != slot.piece or last.num_bytes + num_bytes > BUCKET_BYTES:
            last = Bucket(group)
            buckets.append(last)
        last.slots.append(slot)
        last.num_bytes += num_bytes
        last.waiting += 1
        slot.bucket = last
    return buckets


def _gradient(slot: Slot) -> torch.Tensor:
    """The master's gradient as this rank stores it."""
    assert slot.master.grad is not None, f"{slot.name} has no gradient"
    return local_of(slot.master.grad)


def _add_to_master(slot: Slot, dtype: torch.dtype) -> None:
    """Move the working gradient into the master's, in the precision that gradients are summed in."""
    gradient = slot.working.grad
    assert gradient is not None
    slot.working.grad = None
    if slot.master.grad is not None:
        local_of(slot.master.grad).add_(local_of(gradient))
        return
    local = local_of(gradient).to(dtype)
    slot.master.grad = cut_alike(gradient, local)


def _set_gradient(slot: Slot, flat: torch.Tensor) -> None:
    """Put these values in the place of the master's gradient."""
    gradient = slot.master.grad
    assert gradient is not None
    local = flat.view_as(local_of(gradient))
    slot.master.grad = cut_alike(gradient, local)


def _is_partial(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and isinstance(gradient.placements[0], Partial)
