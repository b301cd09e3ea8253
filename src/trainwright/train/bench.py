"""Micro-measurements that a cluster's rates are fitted to: matmul, attention, memory, launch, collectives.

Every rank runs this at once. Compute is measured twice: by rank 0 alone while the others wait, and by all ranks
together, because ranks that outnumber the cores share them. Collectives are measured over groups of each size
that divides the world, all groups of a size at the same time and between pieces of compute, as a layout uses
them; one repetition takes as long as its slowest rank. The whole takes about `BUDGET_S` seconds; medians are for
`measure/`.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainwright.spec.model import (
    DenseMlp,
    GroupedQueryAttention,
    LayerGroup,
    LayerSpec,
    ModelSpec,
    Rope,
)
from trainwright.spec.record import Sample, SampleOp
from trainwright.train.collectives import all_gather, reduce_scatter
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.model.functions import gated, rms_norm
from trainwright.train.model.layers import Layer
from trainwright.train.model.rotary import Rotary

BUDGET_S = 9.0
REPETITIONS = 7
WARMUP = 2
REPETITION_S = 0.015
"""Length of a repetition, in which a short call is made many times: long enough for the clock, and for the
system to share out cores among more ranks than it has."""

CALLS_BETWEEN_WORK = 6
WORK_MATMULS = 4
"""Of 256 cubed: about a millisecond of one core, as a block of a small layer is."""
LAUNCHES_OF_A_LAYER = 50
"""Forward and backward, as the planner counts them (a test holds the two against each other)."""
LEAST_COLLECTIVE_S = 2e-5
"""Where the noise of two timings hides a small collective: the cost of the call in Python."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

MATMULS = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 256, 256),
    (512, 512, 512),
    (512, 256, 4096),
    (1024, 1024, 1024),
)
"""(m, k, n), from one that the call's overhead governs to one that saturates a core."""
ATTENTION_LENGTHS = (128, 256, 1024)
MESSAGE_BYTES = (16384, 1 << 19, 1 << 22)


@dataclass(frozen=True)
class Bench:
    """Where the measurements run. `world` 1 needs no process group."""

    rank: int
    world: int
    device: torch.device

    def samples(self, on_progress: Callable[[str, float], None] = lambda what, done: None) -> list[Sample]:
        """All measurements, on rank 0; an empty list on the others. Collective over all ranks."""
        parts = [*self._compute_parts(), *self._collective_parts()]
        share_s = BUDGET_S / len(parts)
        found: list[Sample] = []
        for number, (what, part) in enumerate(parts):
            on_progress(what, number / len(parts))
            found += part(share_s)
        on_progress("measured", 1.0)
        return found

    def _compute_parts(self) -> Iterator[tuple[str, Callable[[float], list[Sample]]]]:
        for busy in sorted({1, self.world}):
            for precision in DTYPES:
                for shape in MATMULS:

                    def part(
                        budget_s: float,
                        busy: int = busy,
                        precision: str = precision,
                        shape: tuple[int, int, int] = shape,
                    ) -> list[Sample]:
                        return self._matmul(budget_s, busy, precision, shape)

                    yield f"matmul, {busy} rank(s) busy", part
                for length in ATTENTION_LENGTHS:

                    def attention(
                        budget_s: float, busy: int = busy, precision: str = precision, length: int = length
                    ) -> list[Sample]:
                        return self._attention(budget_s, busy, precision, length)

                    yield f"attention, {busy} rank(s) busy", attention

                def elementwise(budget_s: float, busy: int = busy, precision: str = precision) -> list[Sample]:
                    return self._elementwise(budget_s, busy, precision)

                yield f"elementwise, {busy} rank(s) busy", elementwise

            def memory(budget_s: float, busy: int = busy) -> list[Sample]:
                return self._copy(budget_s, busy) + self._launch(busy)

            yield f"memory and launch, {busy} rank(s) busy", memory

    def _matmul(self, budget_s: float, busy: int, precision: str, shape: tuple[int, int, int]) -> list[Sample]:
        m, k, n = shape
        left_MK = torch.randn(m, k, dtype=DTYPES[precision], device=self.device)
        right_NK = torch.randn(n, k, dtype=DTYPES[precision], device=self.device)
        flops = 2.0 * m * k * n
        return self._timed("matmul", precision, flops, flops, busy, budget_s, lambda: F.linear(left_MK, right_NK))

    def _attention(self, budget_s: float, busy: int, precision: str, length: int) -> list[Sample]:
        heads, width = 8, 32
        shape = (1, heads, length, width)
        query, key, value = (
            torch.randn(shape, dtype=DTYPES[precision], device=self.device, requires_grad=True) for _ in range(3)
        )
        upstream = torch.randn(shape, dtype=DTYPES[precision], device=self.device)
        flops = 4.0 * heads * width * length * length / 2  # two matmuls, half of the keys under the causal mask

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        output = forward()

        def backward() -> object:
            return torch.autograd.grad(output, (query, key, value), upstream, retain_graph=True)

        return [
            *self._timed("attention_forward", precision, length, flops, busy, budget_s / 2, forward),
            *self._timed("attention_backward", precision, length, 2.5 * flops, busy, budget_s / 2, backward),
        ]

    def _elementwise(self, budget_s: float, busy: int, precision: str) -> list[Sample]:
        """Norms, residuals and gated activations of some layers and a loss, forward and backward, as the model has
        them: what is bound by memory. The bytes are those that the planner counts."""
        layers, tokens, d_model, d_ff, vocab = 4, 512, 256, 768, 4096
        x_TD, weight_D, gate_TF, up_TF, logits_BSV = (
            torch.randn(shape, dtype=DTYPES[precision], device=self.device, requires_grad=True)
            for shape in ((tokens, d_model), (d_model,), (tokens, d_ff), (tokens, d_ff), (1, tokens, vocab))
        )
        targets_BS = torch.randint(vocab, (1, tokens), device=self.device)
        inputs = (x_TD, weight_D, gate_TF, up_TF, logits_BSV)
        upstream = [
            torch.ones_like(x_TD),
            *[torch.ones_like(gate_TF)] * layers,
            torch.ones((), device=self.device),
        ]

        def call() -> object:
            h_TD, products = x_TD, []
            for _ in range(layers):
                h_TD = h_TD + rms_norm(h_TD, weight_D, 1e-5)
                h_TD = h_TD + rms_norm(h_TD, weight_D, 1e-5)
                products.append(gated(gate_TF, up_TF, F.silu))
            outputs = [h_TD, *products, summed_cross_entropy(logits_BSV, targets_BS)]
            return torch.autograd.grad(outputs, inputs, upstream)

        size = x_TD.element_size()
        loss_bytes = 2 * size + 4 * 4 + (4 + size if size < 4 else 0)
        layer_bytes = size * (2 * 5 * d_model + 2 * 6 * d_model + 8 * d_ff)
        moved = tokens * (layers * layer_bytes + loss_bytes * vocab)
        return self._timed("elementwise", precision, moved, moved, busy, budget_s, call)

    def _copy(self, budget_s: float, busy: int) -> list[Sample]:
        source = torch.randn(1 << 23, device=self.device)
        target = torch.empty_like(source)
        moved = 2.0 * source.numel() * source.element_size()
        return self._timed("copy", "fp32", moved, moved, busy, budget_s, lambda: target.copy_(source))

    def _launch(self, busy: int) -> list[Sample]:
        """Cost of an operation on next to nothing, autograd and module calls included: a layer so small that
        nothing else is left of it, forward and backward, shared out over its operations."""
        attention = GroupedQueryAttention(num_heads=2, num_kv_heads=1, d_head=8)
        layer_spec = LayerSpec(attention=attention, mlp=DenseMlp(d_ff=16))
        spec = ModelSpec(
            name="tiny",
            d_model=16,
            vocab_size=16,
            layer_groups=(LayerGroup(repeat=1, pattern=(layer_spec,)),),
            rope=Rope(),
        )
        layer, rotary = Layer(spec, layer_spec).to(self.device), Rotary(Rope())
        x_BSD = torch.randn(1, 8, 16, device=self.device, requires_grad=True)

        def call() -> object:
            return torch.autograd.backward(layer(x_BSD, rotary).sum())

        return self._timed("launch", "fp32", 1.0, LAUNCHES_OF_A_LAYER, busy, 0.2, call)

    def _collective_parts(self) -> Iterator[tuple[str, Callable[[float], list[Sample]]]]:
        for size in (size for size in range(2, self.world + 1) if self.world % size == 0):
            group = self._groups_of(size)
            for message_bytes in MESSAGE_BYTES:

                def part(
                    budget_s: float,
                    size: int = size,
                    group: dist.ProcessGroup = group,
                    message_bytes: int = message_bytes,
                ) -> list[Sample]:
                    return self._collectives(budget_s, size, group, message_bytes)

                yield f"collectives of {size} ranks", part

    def _groups_of(self, size: int) -> dist.ProcessGroup:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, self.world, size)]
        group = groups[self.rank // size]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _collectives(
        self, budget_s: float, size: int, group: dist.ProcessGroup, message_bytes: int
    ) -> list[Sample]:
        whole = torch.ones(message_bytes // 4, device=self.device)
        part = torch.ones(whole.numel() // size, device=self.device)
        at = dist.get_rank(group)
        next_rank = dist.get_global_rank(group, (at + 1) % size)
        previous_rank = dist.get_global_rank(group, (at - 1) % size)
        received = torch.empty_like(whole)

        def send() -> None:
            operations = [
                dist.P2POp(dist.isend, whole, next_rank, group),
                dist.P2POp(dist.irecv, received, previous_rank, group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        calls: dict[SampleOp, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: all_gather(whole, part, group=group),
            "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
            "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
            "send": send,
        }
        return [
            self._sample(op, "fp32", message_bytes, message_bytes, size, seconds)
            for op, call in calls.items()
            if (seconds := self._between_work(call, budget_s / len(calls)))
        ]

    def _between_work(self, call: Callable[[], object], budget_s: float) -> list[float]:
        """Seconds that a collective adds to each piece of work that it follows; on rank 0, elsewhere nothing.

        As a layer uses it: ranks come to it from compute, one later than the other, and where they outnumber the
        cores a rank that waits may not be the one that runs next. Back to back collectives show none of that.
        """
        left, right = (torch.randn(256, 256, device=self.device) for _ in range(2))

        def work() -> None:
            for _ in range(WORK_MATMULS):
                torch.mm(left, right)

        def both() -> None:
            work()
            call()

        _seconds_of(both, 1)
        self._barrier()
        probe_s = self._slowest([_seconds_of(both, 2)])[0]
        repetitions = min(REPETITIONS, max(3, int(budget_s / (4 * probe_s))))
        with_call, without = [], []
        for _ in range(repetitions):
            self._barrier()
            with_call.append(_seconds_of(both, CALLS_BETWEEN_WORK) / CALLS_BETWEEN_WORK)
            self._barrier()
            without.append(_seconds_of(work, CALLS_BETWEEN_WORK) / CALLS_BETWEEN_WORK)
        with_call, without = self._slowest(with_call), self._slowest(without)
        if self.rank != 0:
            return []
        typical_s = statistics.median(without)
        return [max(each - typical_s, LEAST_COLLECTIVE_S) for each in with_call]

    def _timed(
        self,
        op: SampleOp,
        precision: str,
        size: float,
        work: float,
        busy: int,
        budget_s: float,
        call: Callable[[], object],
    ) -> list[Sample]:
        """Seconds per call of each repetition: of rank 0 where it alone is busy, of the slowest rank otherwise."""
        takes_part = busy > 1 or self.rank == 0
        self._barrier()
        probe_s = 0.0
        if takes_part:
            _seconds_of(call, WARMUP)
            probe_s = _seconds_of(call, 1)
        probe_s = max(self._slowest([probe_s])[0], 1e-7)
        calls = math.ceil(REPETITION_S / probe_s)
        repetitions = min(REPETITIONS, max(3, int(budget_s / (calls * probe_s))))
        seconds = [0.0] * repetitions
        for repetition in range(repetitions):
            if busy > 1:
                self._barrier()
            if takes_part:
                seconds[repetition] = _seconds_of(call, calls) / calls
        seconds = self._slowest(seconds)
        if self.rank != 0:
            return []
        return [self._sample(op, precision, size, work, busy, seconds)]

    def _sample(
        self, op: SampleOp, precision: str, size: float, work: float, busy: int, seconds: list[float]
    ) -> Sample:
        return Sample.parse(
            {
                "op": op,
                "precision": precision,
                "size": float(size),
                "work": float(work),
                "busy_ranks": busy,
                "seconds": seconds,
            }
        )

    def _barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def _slowest(self, seconds: list[float]) -> list[float]:
        if self.world == 1:
            return seconds
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()


def _seconds_of(call: Callable[[], object], times: int) -> float:
    start_s = time.perf_counter()
    for _ in range(times):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
