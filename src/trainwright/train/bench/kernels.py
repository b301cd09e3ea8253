"""What a device does: matmuls over shapes and formats, attention forward and backward, operators bound by memory,
long streams, and the optimizer's update."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.spec.recipe import Optimizer
from trainwright.spec.record import Sample
from trainwright.train.bench.stopwatch import Stopwatch
from trainwright.train.loss import summed_cross_entropy
from trainwright.train.model.functions import gated, rms_norm
from trainwright.train.optimizer import adamw, clip, squared_norm

if TYPE_CHECKING:
    from trainwright.train.bench import Part

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

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
LARGE_MATMULS = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 28672))
"""And of a GPU."""
SHARED_MATMULS = ((256, 256, 256), (512, 512, 512), (512, 256, 4096))
"""Those that ranks do together, in fp32: all are slowed down alike."""
ATTENTION_LENGTHS = (128, 256, 1024)
LARGE_ATTENTION_LENGTHS = (2048, 8192)
GROUPED_ROWS = (32, 128, 512)
"""Tokens of each of the experts that a rank holds."""
UPDATED_PARAMS = 1 << 22
UPDATE_BYTES = 40
"""Of AdamW with clipping, of a parameter in fp32, as the planner counts them."""


def parts(watch: Stopwatch) -> Iterator[tuple[str, "Part"]]:
    is_large, alone = watch.device.type == "cuda", watch.busy == 1
    shapes = (*MATMULS, *(LARGE_MATMULS if is_large else ())) if alone else SHARED_MATMULS
    lengths = (*ATTENTION_LENGTHS, *(LARGE_ATTENTION_LENGTHS if is_large else ()))
    for precision in _formats(watch) if alone else ("fp32",):
        for shape in shapes:
            yield f"matmul {precision}", partial(_matmul, watch, precision, shape)
        if precision in ("fp8", "fp64"):
            continue
        for rows in GROUPED_ROWS if alone and precision in ("fp32", "bf16") else ():
            yield f"grouped matmul {precision}", partial(_grouped, watch, precision, rows)
        for length in lengths if alone else lengths[1:2]:
            yield f"attention {precision}", partial(_attention, watch, precision, length)
        yield f"elementwise {precision}", partial(_elementwise, watch, precision)
    yield "memory", partial(_copy, watch)
    yield "update", partial(_update, watch)


def _formats(watch: Stopwatch) -> list[str]:
    """Number formats that the device multiplies in by instructions of its own; those of a CPU that it emulates
    too, as that is how a run in them goes."""
    if watch.device.type != "cuda":
        return ["fp64", "fp32", "bf16"]
    has_fp8 = torch.version.hip is None and torch.cuda.get_device_capability(watch.device) >= (8, 9)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return ["fp64", "fp32", "fp16", *(["bf16"] if has_bf16 else []), *(["fp8"] if has_fp8 else [])]


def _matmul(watch: Stopwatch, precision: str, shape: tuple[int, int, int], budget_s: float) -> list[Sample]:
    m, k, n = shape
    flops = 2.0 * m * k * n
    dtype = DTYPES.get(precision, torch.bfloat16)
    left_MK, right_NK = (torch.randn(rows, k, device=watch.device).to(dtype) for rows in (m, n))
    if precision != "fp8":
        return watch.timed("matmul", precision, flops, flops, budget_s, lambda: F.linear(left_MK, right_NK))
    one = torch.ones((), device=watch.device)
    low_MK, low_NK = left_MK.to(torch.float8_e4m3fn), right_NK.to(torch.float8_e4m3fn)

    def scaled() -> torch.Tensor:
        return torch.ops.aten._scaled_mm(low_MK, low_NK.t(), one, one, out_dtype=torch.bfloat16)

    return watch.timed("matmul", precision, flops, flops, budget_s, scaled)


def _grouped(watch: Stopwatch, precision: str, rows: int, budget_s: float) -> list[Sample]:
    """One matmul of a rank's experts, forward and backward, as the trainer's experts do it."""
    experts, d_model, d_ff = (8, 256, 128) if watch.device.type == "cpu" else (8, 4096, 2048)
    row_RD, weight_XFD, upstream_RF = (
        torch.randn(shape, dtype=DTYPES[precision], device=watch.device)
        for shape in ((experts * rows, d_model), (experts, d_ff, d_model), (experts * rows, d_ff))
    )
    inputs = (row_RD.requires_grad_(), weight_XFD.requires_grad_())
    ends_X = torch.arange(1, experts + 1, dtype=torch.int32, device=watch.device) * rows

    def call() -> object:
        out_RF = F.grouped_mm(row_RD, weight_XFD.transpose(1, 2), offs=ends_X)
        return torch.autograd.grad(out_RF, inputs, upstream_RF)

    flops = 3 * 2.0 * experts * rows * d_model * d_ff
    return watch.timed("grouped", precision, rows, flops, budget_s, call)


def _attention(watch: Stopwatch, precision: str, length: int, budget_s: float) -> list[Sample]:
    heads, width = (8, 32) if watch.device.type == "cpu" else (16, 128)
    shape = (1, heads, length, width)
    query, key, value = (
        torch.randn(shape, dtype=DTYPES[precision], device=watch.device, requires_grad=True) for _ in range(3)
    )
    upstream = torch.randn(shape, dtype=DTYPES[precision], device=watch.device)
    flops = 4.0 * heads * width * length * length / 2  # two matmuls, half of the keys under the causal mask

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()

    def backward() -> object:
        return torch.autograd.grad(output, (query, key, value), upstream, retain_graph=True)

    return [
        *watch.timed("attention_forward", precision, length, flops, budget_s / 2, forward),
        *watch.timed("attention_backward", precision, length, 2.5 * flops, budget_s / 2, backward),
    ]


def _elementwise(watch: Stopwatch, precision: str, budget_s: float) -> list[Sample]:
    """Norms, residuals and gated activations of some layers and a loss, forward and backward, as the model has
    them: what is bound by memory. The bytes are those that the planner counts."""
    layers, tokens, d_model, d_ff, vocab = 4, 512, 256, 768, 4096
    x_TD, weight_D, gate_TF, up_TF, logits_BSV = (
        torch.randn(shape, dtype=DTYPES[precision], device=watch.device, requires_grad=True)
        for shape in ((tokens, d_model), (d_model,), (tokens, d_ff), (tokens, d_ff), (1, tokens, vocab))
    )
    targets_BS = torch.randint(vocab, (1, tokens), device=watch.device)
    inputs = (x_TD, weight_D, gate_TF, up_TF, logits_BSV)
    upstream = [
        torch.ones_like(x_TD),
        *[torch.ones_like(gate_TF)] * layers,
        torch.ones((), device=watch.device),
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
    return watch.timed("elementwise", precision, moved, moved, budget_s, call)


def _copy(watch: Stopwatch, budget_s: float) -> list[Sample]:
    source = torch.randn(1 << (23 if watch.device.type == "cpu" else 28), device=watch.device)
    target = source.clone()  # its pages are there, and not made while it is timed
    moved = 2.0 * source.numel() * source.element_size()
    return watch.timed("copy", "fp32", moved, moved, budget_s, lambda: target.copy_(source))


def _update(watch: Stopwatch, budget_s: float) -> list[Sample]:
    """Clipping and AdamW, as a step ends with them, over matrices of a layer's size."""
    weights = [nn.Parameter(torch.randn(512, 512, device=watch.device)) for _ in range(UPDATED_PARAMS >> 18)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = adamw(Optimizer(), ((f"weight {place}", weight) for place, weight in enumerate(weights)))

    def call() -> None:
        clip(weights, squared_norm((weight, 1) for weight in weights) ** 0.5, 1.0)
        optimizer.step()

    moved = UPDATE_BYTES * UPDATED_PARAMS
    return watch.timed("update", "fp32", moved, moved, budget_s, call)
