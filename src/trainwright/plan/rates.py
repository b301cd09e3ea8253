"""Seconds of an operation on a cluster, without its launch: rooflines.

matmul       max(FLOPs * skew / (peak * fraction(FLOPs) * sustained), bytes / memory bandwidth)
attention    FLOPs / (peak * fraction(sequence length) * sustained * generation * head width), backward 2.5 times
the
             FLOPs; unfused FLOPs / (peak * its fraction), backward twice
elementwise  bytes / (memory bandwidth * fraction for the activations' number format)

grouped      as a matmul of all its FLOPs, since experts run side by side, times grouped * m/(m+h) * d/(d+g)

for m tokens an expert and d the narrower side of its matrix; 108 grouped matmuls of B200 and 12 of A100 have that
form (MooreThreads/SimuMax), with 9% to 16% of mean error.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from trainwright.plan.operations import AttentionCore, Elementwise, Matmul
from trainwright.plan.table import Floats, Table
from trainwright.spec.cluster import ClusterSpec, Curve, Format
from trainwright.spec.errors import reject

WHOLE_HEAD = 128.0
"""Width of the heads that attention's curves were measured with."""


def curve(rate: Curve, size: Floats) -> Floats:
    """`Curve.at` for arrays."""
    first, last = rate.size[0], rate.size[-1]
    between = np.minimum(np.maximum(size, first), last)
    return between / np.interp(between, rate.size, np.array(rate.size) / np.array(rate.fraction))


def slowdown(
    table: Table, kind: Literal["matmul", "attention", "memory", "elementwise", "update", "launch"]
) -> Floats | float:
    """How many times longer a call takes for the ranks of its node that are at work too, (rows,)."""
    measured = table.cluster.rates.at_work
    if not measured:
        return 1.0
    counts, factors = [1, *(each.ranks for each in measured)], [1.0, *(getattr(each, kind) for each in measured)]
    return np.interp(table.at_work, counts, factors)


def matmuls_s(table: Table, matmuls: Sequence[Matmul]) -> list[Floats]:
    """`matmul_s` of each; those that are timed alike are timed together."""
    alike: dict[tuple[bool, bool, bool], list[int]] = {}
    for place, each in enumerate(matmuls):
        alike.setdefault((each.in_low_precision, each.has_bias, each.groups is None), []).append(place)
    seconds: dict[int, Floats] = {}
    for places in alike.values():
        seconds |= zip(places, matmul_s(table, _stacked([matmuls[place] for place in places])), strict=True)
    return [seconds[place] for place in range(len(matmuls))]


def _stacked(matmuls: list[Matmul]) -> Matmul:
    """Several as one, of arrays (matmuls, rows)."""
    m, k, n, groups = (np.array([getattr(each, size) for each in matmuls]) for size in ("m", "k", "n", "groups"))
    return replace(matmuls[0], m=m, k=k, n=n, groups=None if matmuls[0].groups is None else groups)


def matmul_s(table: Table, each: Matmul) -> Floats:
    """Seconds of one matmul (forward; each of backward's two takes the same)."""
    recipe, cluster = table.recipe, table.cluster
    as_products = each.in_low_precision or recipe.emulate_precision
    fmt: Format = recipe.product_format(cluster) if as_products else recipe.activation_format
    rate, peak = _matmul_rate(cluster, fmt), cluster.peak(fmt)
    if rate is None or peak is None:
        known = ", ".join(sorted(cluster.rates.matmul))
        reject(
            "recipe.precision",
            recipe.precision,
            f"cluster {cluster.name} has no {fmt} matmul rate; it has {known}",
        )
    peak = peak * cluster.rates.sustained.get(fmt, 1.0)
    if each.groups is not None:
        peak = peak * _grouped(table, each)
    skew = _skew(table, each) if each.groups is None else 1.0
    compute_s = each.forward_flops * skew / (peak * curve(rate, each.forward_flops))
    is_low = each.in_low_precision and not recipe.emulate_precision
    in_bytes = recipe.matmul_bytes if is_low else recipe.compute_bytes
    moved = in_bytes * (each.m * each.k + each.k * each.n) + recipe.compute_bytes * each.m * each.n
    groups = 1.0 if each.groups is None else each.groups
    streamed_s = moved * groups / cluster.device.memory_bytes_per_s
    return np.maximum(compute_s * slowdown(table, "matmul"), streamed_s * slowdown(table, "memory"))


def _matmul_rate(cluster: ClusterSpec, fmt: Format) -> Curve | None:
    """The curve of a format; fp16 runs as bf16 does where it has none of its own."""
    rates = cluster.rates.matmul
    return rates.get(fmt) or (rates.get("bf16") if fmt == "fp16" else None)


def _grouped(table: Table, each: Matmul) -> Floats:
    """Rate of a grouped matmul over that of a plain one of all its FLOPs."""
    rates, narrow = table.cluster.rates, np.minimum(each.k, each.n)
    rows = np.maximum(each.m, 1.0)
    shape = rows / (rows + rates.grouped_half_rows) * narrow / (narrow + rates.grouped_half_width)
    return rates.grouped * (rates.grouped_biased if each.has_bias else 1.0) * shape


def _skew(table: Table, each: Matmul) -> Floats:
    """How much slower a matmul is than the square one of the same FLOPs, for its short dimensions; 1 or more."""
    half = table.cluster.rates.matmul_half_dim
    side = np.cbrt(np.maximum(each.forward_flops, 1e-300) / 2)
    own = (1 + half / np.maximum(each.m, 1)) * (1 + half / each.k) * (1 + half / each.n)
    return np.maximum(own / (1 + half / side) ** 3, 1.0)


def attention_s(table: Table, each: AttentionCore) -> tuple[Floats, Floats]:
    """Seconds forward and backward."""
    rates, fmt = table.cluster.rates, table.recipe.activation_format
    peak = table.cluster.peak(fmt) or table.cluster.device.peak_flops_per_s.fp32
    if not each.is_fused:
        reached = peak * rates.attention_kernels.get("unfused", 0.5) / slowdown(table, "attention")
        return each.forward_flops / reached, each.backward_flops / reached
    half = rates.attention_half_head
    width = each.head_width / (each.head_width + half) * (WHOLE_HEAD + half) / WHOLE_HEAD
    generation = rates.attention_kernels.get(table.recipe.attention_kernel, 1.0)
    peak = peak * generation * rates.attention_sustained * min(width, 1.0) / slowdown(table, "attention")
    length = table.recipe.seq_len * np.ones(1)
    forward = each.forward_flops / (peak * curve(_of_format(rates.attention_forward, fmt), length))
    backward = each.backward_flops / (peak * curve(_of_format(rates.attention_backward, fmt), length))
    return forward, backward


def _of_format(rates: dict[Format, Curve], fmt: Format) -> Curve:
    formats: tuple[Format, ...] = (fmt, "bf16", "fp32")
    return next(rates[name] for name in formats if name in rates)


def elementwise_s(table: Table, each: Elementwise) -> tuple[Floats, Floats]:
    """Seconds forward and backward."""
    rates, device = table.cluster.rates, table.cluster.device
    fraction = rates.memory
    if not each.streams:
        fraction = rates.elementwise.get(table.recipe.activation_format, rates.memory)
    bytes_per_s = device.memory_bytes_per_s * fraction
    bytes_per_s = bytes_per_s / slowdown(table, "memory" if each.streams else "elementwise")
    return each.forward_bytes / bytes_per_s, each.backward_bytes / bytes_per_s


def update_s(table: Table, moved_bytes: Floats) -> Floats:
    """Seconds to stream a step's gradients, weights and moments through memory, read and written bytes
    together."""
    rates = table.cluster.rates
    fraction = rates.memory if rates.update is None else rates.update
    return moved_bytes / (table.cluster.device.memory_bytes_per_s * fraction) * slowdown(table, "update")
