"""What a running program writes down: micro-measurements (`samples.jsonl`), the steps of a training run
(`metrics.jsonl`) and, for each of its ranks, where time and memory went: of every step (`causes/rank-0.jsonl` and
so on), and in sum (`ledger.jsonl`). One JSON object per line, each one of these nouns. What calibration makes of
the samples is here too."""

from typing import Literal

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Positive, Sequence
from trainwright.spec.cluster import ClusterSpec

SampleOp = Literal[
    "matmul",
    "attention_forward",
    "attention_backward",
    "copy",
    "elementwise",
    "launch",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
]


class Sample(Noun):
    """One operation measured several times on one rank."""

    op: SampleOp
    precision: Literal["fp32", "bf16", "fp64"]
    size: Positive
    """What its rate is a curve of: FLOPs of the call for matmul, sequence length for attention, bytes read and
    written for copy and elementwise, message bytes for a collective (the whole tensor), 1 for launch."""
    work: Positive
    """FLOPs of the call, or bytes for copy, elementwise and collectives; 1 for launch. Attention counts causal
    FLOPs, backward 2.5 times the forward ones; elementwise is a mixture of norm, residual, activation and loss,
    forward and backward, and counts the bytes that the planner counts for them."""
    busy_ranks: Count
    """Ranks of the node that did the same at the same time; for a collective, its group's size."""
    rank: Natural = 0
    seconds: Sequence[Positive]
    """One per repetition, in order, the first ones (warm-up) left out."""


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


class Calibration(Noun):
    """A cluster that was measured, with the quality of its fits."""

    cluster: ClusterSpec
    fits: Sequence[Fit]
