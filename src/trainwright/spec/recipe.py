"""How it is trained: batch, precision, recompute, sharding, schedule, optimizer. What changes cost but not
architecture."""

import math
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from trainwright.spec.base import Count, Natural, NonNegative, Noun, Positive, Probability, Sequence
from trainwright.spec.cluster import AttentionKernel, ClusterSpec, Device, Format
from trainwright.spec.errors import reject
from trainwright.spec.precision import LOW_PRECISION, VALUE_BYTES, LowPrecision

Precision = Literal[
    "fp32", "bf16", "fp16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "fp64"
]
"""Of the linear layers' matmuls. The fp8 recipes differ in their scales: delayed and current have one per tensor
(from past or present values), rowwise one per row, block one per 1x128 of activations and 128x128 of weights
(DeepSeek-V3, arXiv:2412.19437 s3.3), mxfp8 one per 32 values (OCP MX 1.0), nvfp4 one per 16."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Recompute = Literal["none", "selective", "full", "budget"]
RecomputeOp = Literal["attention", "norm", "activation", "latent_up", "mlp", "moe"]
"""What selective recompute can do again: the attention core; norms; the activation between an MLP's matmuls; the
up-projections of latent attention; a whole dense MLP; a whole MoE MLP, its dispatch included."""
RECOMPUTE_OPS: tuple[RecomputeOp, ...] = get_args(RecomputeOp)

ScheduleName = Literal[
    "1f1b", "interleaved_1f1b", "gpipe", "breadth_first", "zb_h1", "zb_v", "dualpipe", "dualpipe_v"
]


INT8_BLOCK, INT8_SCALE_BYTES = 256, 4
"""Values of a moment that share a scale, in fp32 (arXiv:2110.02861 s2.1)."""


class Optimizer(Noun):
    """AdamW (arXiv:1711.05101) or Muon (github.com/KellerJordan/Muon; AdamW for all that is no hidden matrix, and
    updates of AdamW's size for both, arXiv:2502.16982), and the course of its learning rate.

    Warm-up is linear over warmup_steps. Then `cosine` falls to min_lr_fraction of lr at the last step, `linear`
    does so in a straight line, `wsd` stays and falls linearly over the last decay_fraction of the steps, and
    `constant` stays.
    """

    name: Literal["adamw", "muon"] = "adamw"
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format that the moments are kept in; int8 has a scale per block of 256 (arXiv:2110.02861)."""
    offload: bool = False
    """Master weights and moments lie in host memory, where the update runs."""
    lr: Positive = 3e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    """Of matrices; biases and norms are not decayed."""
    warmup_steps: Natural = 10
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    min_lr_fraction: Probability = 0.1
    decay_fraction: Probability = 0.2


class Overlap(Noun):
    """Which communication may hide behind compute."""

    dp: bool = True
    """Gathers and reductions of dp run beside the layers' compute."""
    pp: bool = True
    """Sends between stages run beside compute."""
    tp: bool = False
    """What sequence-parallel tp gathers and scatters goes round in parts, beside the matmuls that it feeds or that
    feed it (asynchronous tensor parallelism); with tp=1 there is none. Of the embedding, and of a loss in chunks,
    collectives stay whole."""
    ep: bool = False
    """Expert dispatch runs beside compute. `train` hides it behind the shared experts (Megatron-Core's
    moe_shared_expert_overlap); programs that rates were fitted to also behind another microbatch (dual-batch
    overlap)."""


class Recipe(Noun):
    """One step's make-up."""

    seq_len: Count
    global_batch: Count
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: Count = 1
    """Sequences of one forward pass of one data-parallel rank."""
    precision: Precision = "bf16"
    """Of matmuls. All but fp32 and fp64 keep fp32 master weights; fp64 is for proofs."""
    emulate_precision: bool = False
    """The arithmetic of an fp8 or fp4 precision runs by casts and products in bf16 (fp32 where the device has no
    bf16), also on a device that lacks the format: to study it, as nothing becomes faster."""
    amax_history_steps: Count = 1024
    """Of fp8-delayed: past steps whose largest value makes the scale (Transformer Engine's default)."""
    precision_report_steps: Natural = 10
    """Low-precision layers are looked at each so many steps: how many values saturate or become zero; 0: never."""
    precision_fallback: bool = False
    """A layer whose scale was seen to saturate goes on in the activation format."""
    gradient_format: Literal["fp32", "bf16"] = "fp32"
    """Of gradients as they are accumulated and reduced; fp64 runs keep fp64."""
    fused_accumulation: bool = False
    """Weight gradients are added to those of the step inside the matmuls that make them, and not by a pass of its
    own (Megatron-Core's gradient accumulation fusion)."""
    recompute: Recompute = "none"
    """none; selective: recompute_ops are computed again in backward; full: every layer is; budget: the planner
    chooses one of these, the fastest whose peak stays within recompute_budget_bytes."""
    recompute_ops: Annotated[Sequence[RecomputeOp], Field(min_length=1)] = ("attention",)
    """What selective recompute does again."""
    recompute_layers: Natural | None = None
    """Full recompute of this many layers of each stage only; None: of all."""
    recompute_budget_bytes: Count | None = None
    """What the fullest rank may hold at its peak, all causes together; None: the device's memory."""
    zero: Literal[0, 1, 2, 3] = 1
    """Sharded over dp*cp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    reshard_after_forward: bool = True
    """With zero 3: gathered parameters are freed after forward and gathered again in backward."""
    dp_replicate: Count = 1
    """HSDP: shards are replicated this many times over dp; 1 shards over all of it."""
    sequence_parallel: bool = True
    """Norms and residuals are cut along the sequence over tp (arXiv:2205.05198)."""
    cp_method: Literal["all_gather", "ring", "all_to_all"] = "all_gather"
    """Keys and values of other cp ranks: gathered at once (Llama 3), passed round beside compute (ring attention,
    arXiv:2310.01889), or heads exchanged for sequence (DeepSpeed-Ulysses, arXiv:2309.14509)."""
    attention_kernel: AttentionKernel = "flash"
    """flash: the newest flash attention that the device runs; flash_2, flash_1: that generation; unfused: scores
    are written to memory, and kept for backward."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of attention weights and of the two branches of a layer; above 0 its masks are kept for backward."""
    loss_kernel: Literal["plain", "fused"] = "plain"
    """plain: logits, their softmax in fp32 and its gradient are tensors of their own; fused: one kernel each way,
    which writes the gradient over the logits."""
    loss_chunks: Count = 1
    """The loss is computed in this many pieces of the sequence, so that only one piece's logits are alive."""
    z_loss: NonNegative = 0.0
    """Times log(Z)^2 of every target, added to what is minimised, with Z the denominator of the softmax (PaLM,
    arXiv:2204.02311 s5: 1e-4). The loss that is told stays the cross-entropy. It costs a few operations per token
    beside the vocabulary's, which predictions don't count."""
    cuda_graphs: Literal["none", "partial", "full"] = "none"
    """Kernels are launched from captured graphs: none of them, those of static shape, or all."""
    compile: bool = False
    """Each layer but those of multi-token prediction is compiled (torch.compile). Predictions stay the same: what
    is kept is, to the byte, and no source says of the seconds that fusion saves which they are
    (docs/equations.md, section 17)."""
    capacity_factor: Positive | None = None
    """Tokens that an expert takes, over the mean; the rest is dropped. None drops none (dropless)."""
    balance_loss: NonNegative = 0.0
    """Weight of a loss for balanced experts beside the cross-entropy: of each sequence and layer, the mean over
    sequences, the sum over layers (DeepSeek-V3, arXiv:2412.19437 eq. 17-20)."""
    balance_rate: NonNegative = 1e-3
    """By which the balance bias of an expert (`MoeMlp.balance_bias`) moves in a step: down where its load was
    above the mean, up where it was below; DeepSeek-V3's rate for most of its training."""
    expert_imbalance: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Dropless: tokens on the busiest rank of experts over the mean; 1 is forced balance."""
    expert_matmuls: Literal["grouped", "sequential"] = "grouped"
    """Experts of a rank are multiplied by one kernel, or by one matmul after another."""
    dispatch: Literal["all_to_all", "hierarchical"] = "all_to_all"
    """Tokens go to experts by one all-to-all, or once to each node over the network and on inside it (DeepEP)."""
    dispatch_fp8: bool = False
    """Tokens are dispatched to experts in fp8 (and combined in bf16)."""
    gather_fp8: bool = False
    """Parameters are gathered over dp in the low format that the matmuls read."""
    activations_fp8: bool = False
    """What an MLP's activation reads is kept for backward in the low format, and of the attention's output no cast
    copy beside it (as DeepSeek-V3 does, arXiv:2412.19437 s3.3.3); so are the outputs' gradients that wait for a
    weight gradient which the schedule puts off."""
    schedule: ScheduleName = "1f1b"
    mtp_loss_weight: NonNegative = 0.3
    """Of the losses of multi-token prediction, all together, beside the next token's (lambda of DeepSeek-V3,
    arXiv:2412.19437 s4.2)."""
    grad_clip: NonNegative = 1.0
    """Largest norm of the whole gradient, over all axes; 0 leaves the gradient as it is."""
    optimizer: Optimizer = Optimizer()
    overlap: Overlap = Overlap()
    seed: Natural = 0

    @field_validator("zero", mode="before")
    @classmethod
    def _is_a_number(cls, zero: object) -> object:
        # A Literal takes true for 1; a text is refused like any other.
        return str(zero).lower() if isinstance(zero, bool) else zero

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.loss_chunks > self.seq_len:
            reject("loss_chunks", self.loss_chunks, f"must be at most seq_len={self.seq_len}")
        if self.global_batch % self.micro_batch:
            reject("micro_batch", self.micro_batch, f"must divide global_batch={self.global_batch}")
        if len(set(self.recompute_ops)) < len(self.recompute_ops):
            reject("recompute_ops", list(self.recompute_ops), "names an operation twice")
        if self.recompute_layers is not None and self.recompute != "full":
            reject("recompute_layers", self.recompute_layers, f"needs recompute=full, not {self.recompute}")
        if self.recompute_budget_bytes is not None and self.recompute != "budget":
            why = f"needs recompute=budget, not {self.recompute}"
            reject("recompute_budget_bytes", self.recompute_budget_bytes, why)
        if self.capacity_factor is not None and self.expert_imbalance > 1:
            reject(
                "expert_imbalance",
                self.expert_imbalance,
                "is for dropless routing; capacity_factor bounds the load",
            )
        for field in ("emulate_precision", "precision_fallback", "gather_fp8", "dispatch_fp8", "activations_fp8"):
            if getattr(self, field) and not self.is_low_precision:
                reject(field, True, f"needs an fp8 or fp4 precision, not {self.precision}")
        low = self.low_precision
        if self.gather_fp8 and low is not None and not low.has_one_cast_of_weights:
            why = (
                f"needs weights that are cast once for both products, and {self.precision} casts them along each "
                "dim, more bytes than bf16 has; set it to false"
            )
            reject("gather_fp8", True, why)
        for field, is_read in (
            ("amax_history_steps", bool(self.low_precision and self.low_precision.amax_history)),
            ("precision_report_steps", self.is_low_precision),
        ):
            value = getattr(self, field)
            if value != type(self).model_fields[field].default and not is_read:
                reject(field, value, f"says nothing of precision={self.precision}; leave it out")
        if not self.reshard_after_forward and self.zero != 3:
            reject("reshard_after_forward", False, f"is for zero=3, which gathers parameters; zero is {self.zero}")
        if self.dp_replicate > 1 and self.zero == 0:
            reject("dp_replicate", self.dp_replicate, "replicates shards, and zero=0 makes none; set it to 1")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def sequence_cut(self, tp: int, cp: int) -> int:
        """What seq_len must be a multiple of. cp cuts the sequence into an early and a late chunk for each rank,
        or into one where heads are exchanged; sequence-parallel tp cuts a rank's positions."""
        chunks = 2 if cp > 1 and self.cp_method != "all_to_all" else 1
        return cp * math.lcm(chunks, tp if self.sequence_parallel else 1)

    @property
    def is_low_precision(self) -> bool:
        """Whether the linear layers' matmuls have fewer than 16 bits."""
        return self.precision in LOW_PRECISION

    @property
    def low_precision(self) -> LowPrecision | None:
        """What the operands of low-precision matmuls are; None where there are none."""
        return LOW_PRECISION.get(self.precision)

    @property
    def matmul_format(self) -> Format:
        """Number format of the linear layers' matmuls."""
        return format_of(self.precision)

    def product_format(self, cluster: ClusterSpec) -> Format:
        """In which the devices of a cluster compute the linear layers' matmuls."""
        if not self.emulate_precision:
            return self.matmul_format
        low = self.low_precision
        # A CPU's bf16 matmul rounds its sums, which such scales are still to be multiplied with.
        scales_sums = low is not None and (low.tensor_scale or not (low.powers_of_two or low.activation.along))
        on_cpu = cluster.device.kind == "cpu"
        return "fp32" if cluster.peak("bf16") is None or (on_cpu and scales_sums) else "bf16"

    @property
    def activation_format(self) -> Format:
        """Number format of activations and of what fp8 recipes leave in high precision."""
        return "bf16" if self.is_low_precision else format_of(self.precision)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation, and of a weight that is no low-precision matmul's."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    @property
    def matmul_bytes(self) -> float:
        """Bytes of a value as the linear layers' matmuls read it, its share of a scale included."""
        low = self.low_precision
        return self.compute_bytes if low is None else low.activation.value_bytes

    @property
    def weight_bytes(self) -> float:
        """The same of a weight."""
        low = self.low_precision
        return self.compute_bytes if low is None else low.weight.value_bytes

    @property
    def code_bytes(self) -> float:
        """The same of its value alone."""
        low = self.low_precision
        return self.compute_bytes if low is None else VALUE_BYTES[low.weight.values]

    @property
    def blocks_per_weight(self) -> float:
        """Blocks with a scale of their own, a weight that low-precision matmuls read; 0 where whole tensors have
        one."""
        low = self.low_precision
        if low is None or low.weight.along is None:
            return 0.0
        return 1 / (low.weight.along * (low.weight.across or 1))

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight."""
        return 8 if self.precision == "fp64" else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is accumulated and reduced."""
        return 8 if self.precision == "fp64" else {"fp32": 4, "bf16": 2}[self.gradient_format]

    @property
    def moment_bytes(self) -> float:
        """Bytes of one moment of one parameter."""
        if self.precision == "fp64":
            return 8
        return {"fp32": 4, "bf16": 2, "int8": 1 + INT8_SCALE_BYTES / INT8_BLOCK}[self.optimizer.moments]


def format_of(precision: Precision) -> Format:
    """The device's number format that the matmuls of a precision run in."""
    formats: dict[str, Format] = {"fp64": "fp64", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    return LOW_PRECISION[precision].format if precision in LOW_PRECISION else formats[precision]


def has_hardware(precision: Precision, device: Device) -> bool:
    """Whether the device's matmuls run it: the number format, and scales of blocks where sums can't wait for
    them."""
    low = LOW_PRECISION.get(precision)
    scales = None if low is None else low.block_scales
    has_format = getattr(device.peak_flops_per_s, format_of(precision)) is not None
    return has_format and (scales is None or scales in device.block_scales)
