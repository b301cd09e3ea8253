"""How it is trained: batch, precision, recompute, sharding, schedule, optimizer. What changes cost but not
architecture."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Positive, Probability
from trainwright.spec.cluster import Format
from trainwright.spec.errors import reject

Precision = Literal["fp32", "bf16", "fp8", "fp64"]
Recompute = Literal["none", "selective", "full"]
ScheduleName = Literal["1f1b", "interleaved_1f1b", "gpipe"]


class Optimizer(Noun):
    """AdamW (arXiv:1711.05101) and the course of its learning rate.

    Warm-up is linear over warmup_steps. Then `cosine` falls to min_lr_fraction of lr at the last step, `wsd`
    stays and falls linearly over the last decay_fraction of the steps, `constant` stays.
    """

    name: Literal["adamw"] = "adamw"
    lr: Positive = 3e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    """Of matrices; biases and norms are not decayed."""
    warmup_steps: Natural = 10
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    min_lr_fraction: Probability = 0.1
    decay_fraction: Probability = 0.2


class Overlap(Noun):
    """Which communication may hide behind compute."""

    dp: bool = True
    """Gathers and reductions of dp run beside the layers' compute."""
    pp: bool = True
    """Sends between stages run beside compute."""


class Recipe(Noun):
    """One step's make-up."""

    seq_len: Count
    global_batch: Count
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: Count = 1
    """Sequences of one forward pass of one data-parallel rank."""
    precision: Precision = "bf16"
    """Of matmuls. bf16 and fp8 keep fp32 master weights, gradients and moments; fp64 is for proofs."""
    recompute: Recompute = "none"
    """none; selective: the attention core is computed again in backward; full: every layer is."""
    zero: Literal[0, 1, 2, 3] = 1
    """Sharded over dp*cp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    dp_replicate: Count = 1
    """HSDP: shards are replicated this many times over dp; 1 shards over all of it."""
    sequence_parallel: bool = True
    """Norms and residuals are cut along the sequence over tp (arXiv:2205.05198)."""
    schedule: ScheduleName = "1f1b"
    grad_clip: NonNegative = 1.0
    """Largest norm of the whole gradient, over all axes; 0 leaves the gradient as it is."""
    optimizer: Optimizer = Optimizer()
    overlap: Overlap = Overlap()
    seed: Natural = 0

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.global_batch % self.micro_batch:
            reject("micro_batch", self.micro_batch, f"must divide global_batch={self.global_batch}")
        if self.dp_replicate > 1 and self.zero == 0:
            reject("dp_replicate", self.dp_replicate, "replicates shards, and zero=0 makes none; set it to 1")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def matmul_format(self) -> Format:
        """Number format of the linear layers' matmuls."""
        return self.precision

    @property
    def activation_format(self) -> Format:
        """Number format of activations and of what fp8 recipes leave in high precision."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation, and of a weight as the matmuls read it."""
        return {"fp64": 8, "fp32": 4, "bf16": 2, "fp8": 2}[self.precision]

    @property
    def master_bytes(self) -> int:
        """Bytes of a value of the optimizer: master weights, moments, and gradients as they are reduced."""
        return 8 if self.precision == "fp64" else 4
