"""What a running program writes down: micro-measurements (`samples.jsonl`), the steps of a training run
(`metrics.jsonl`) and, for each of its ranks, where time and memory went: of every step (`causes/rank-0.jsonl` and
so on), and in sum (`ledger.jsonl`). One JSON object per line, each one of these nouns. What calibration makes of
the samples is here too."""

import math
from typing import Literal

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Positive, Probability, Sequence
from trainwright.spec.cluster import ClusterSpec

SampleOp = Literal[
    "matmul",
    "grouped",
    "attention_forward",
    "attention_backward",
    "copy",
    "elementwise",
    "update",
    "launch",
    "step",
    "overlap",
    "sharded",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
]


class Sample(Noun):
    """One operation measured several times on one rank."""

    op: SampleOp
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
    size: Positive
    """What its rate is a curve of: FLOPs of the call for matmul, tokens an expert for grouped, sequence length for
    attention, bytes read and written for copy, elementwise and update, message bytes for a collective (the whole
    tensor), microbatches for a step, 1 for launch. Of overlap (gradients of replicas) and sharded (zero 3), 1:
    compute alone, 2: communication alone, 3: a step with both."""
    work: Positive
    """FLOPs of the call (of grouped, forward and the two matmuls of backward), or bytes for copy, elementwise,
    update, overlap, sharded and collectives; launches that the planner counts for launch and for a step. Attention
    counts causal FLOPs, backward 2.5 times the forward ones; elementwise is a mixture of norm, residual,
    activation and loss, forward and backward, and counts the bytes that the planner counts for them, as update
    does."""
    busy_ranks: Count
    """Ranks that did the same at the same time."""
    group_size: Count = 1
    """Of a collective: the ranks of one of its groups."""
    rank: Natural = 0
    seconds: Sequence[Positive]
    """One per repetition, in order, the first ones (warm-up) left out."""
    on_core: Probability = 1.0
    """Of those seconds, the part in which the rank that had least of one had a core: below 1 where ranks outnumber
    cores, or where other programs take them. 1 where nobody looked."""


class Machine(Noun):
    """What a program finds where it measures, which no sample can tell."""

    name: str = "this-machine"
    device: str
    """By the name that its maker gave it."""
    kind: Literal["cuda", "rocm", "cpu"]
    devices: Count
    """Ranks of one node."""
    concurrent_devices: Count
    """How many of them compute at the same time: all of a GPU node, at most the cores of a CPU node."""
    nodes: Count = 1
    memory_bytes: Count
    """Of one device; of a CPU node, shared out over its ranks."""
    num_sms: Count = 1


class TensorHealth(Noun):
    """What rounding to few bits did to one tensor of a layer in a step, over all ranks and microbatches."""

    amax: float
    """The largest magnitude."""
    overflow: Probability
    """Share of values that saturated."""
    underflow: Probability
    """Share of values that weren't zero and became it."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.amax)


class PrecisionRecord(Noun):
    """A step's low-precision layers: a line of `precision.jsonl`."""

    step: Count
    layers: dict[str, dict[str, TensorHealth]]
    """By layer, and by input, weight and gradient. What several layers read stands with the first of them."""
    alarms: tuple[str, ...] = ()
    """Layers whose scales have saturated, in words."""
    fallen: tuple[str, ...] = ()
    """Layers that go on in the activation format."""


class StepRecord(Noun):
    """One step of a training run: a line of `metrics.jsonl`."""

    step: Count
    """From 1 on."""
    loss: float
    """Mean over the step's tokens."""
    tokens_per_s: NonNegative
    """Of all ranks together."""
    step_s: NonNegative
    mfu: NonNegative
    """As the planner counts it, with full attention, against the dense peak of the precision's number format; 0
    where the cluster has no such peak."""
    hfu: NonNegative = 0.0
    """The same with recomputed FLOPs, as the planner counts them, counted as work."""
    flops_per_s: NonNegative = 0.0
    """Of one device, as mfu counts them."""
    grad_norm: float
    """Before clipping, over all axes."""
    peak_bytes: NonNegative
    """Most bytes of live tensors so far on the rank that writes; 0 until it was measured."""
    lr: NonNegative
    """Learning rate of the step."""


class StepSeconds(Noun):
    """Where the time of one step went on one rank: a line of `causes/rank-N.jsonl`."""

    step: Count
    rank: Natural
    seconds: dict[str, NonNegative]
    """By the keys of `ledger.STEP_SECONDS`; they sum to the step. Of the device, where that runs behind the
    program: there they are known a step late, and data and host are what the device waited."""
    checkpoint_s: NonNegative = 0.0
    """What a save after the step held the program up; no part of the step."""


class RankRecord(Noun):
    """One rank of a finished training run."""

    run_hash: str
    rank: Natural
    pp_rank: Natural
    steps_timed: Natural
    """Steps that step_s is the median of; warm-up and instrumented steps are not among them."""
    step_s: NonNegative
    tokens_per_s: NonNegative
    """Of the whole run, all ranks together."""
    seconds: dict[str, float]
    """Of an instrumented step, by the keys of `ledger.SEEN_SECONDS`, scaled to sum to step_s; empty where the run
    was too short for one."""
    bytes: dict[str, float]
    """Bytes of parameters, gradients and optimizer, each counted over its tensors on this rank."""
    peak_bytes: NonNegative
    """Most bytes of live tensors at one time during a step, states included."""


class Fit(Noun):
    """How well one fitted rate says the samples that it was fitted to."""

    name: str
    samples: Count
    """Repetitions in all."""
    median_error: NonNegative
    """Of the measured sizes, |predicted - median seen| / median seen: the median over sizes, and the largest."""
    worst_error: NonNegative
    sizes: Sequence[Positive] = ()
    """The measured sizes, smallest first, those of one rank before those of several."""
    residuals: Sequence[float] = ()
    """Of each, seen over fitted, less 1."""


class Calibration(Noun):
    """A cluster that was measured, with the quality of its fits."""

    cluster: ClusterSpec
    fits: Sequence[Fit]
