"""The recipe and layout of a published run: what its columns and its notes say of precision, sharding, recompute,
kernels, routing and overlap, and what its software did where they say nothing."""

import re
from typing import Any

from trainwright.measure.published_row import Row
from trainwright.spec.cluster import AttentionKernel
from trainwright.spec.layout import Layout, Order
from trainwright.spec.recipe import Optimizer, Overlap, Precision, Recipe, RecomputeOp, ScheduleName

UNFUSED = ("megatron-2021", "deepspeed-2020", "bloom-2022")
"""Software of before FlashAttention (arXiv:2205.14135, May 2022)."""

FLASH_1 = ("llm-foundry-2023", "internevo-2023")
"""Triton's kernel and flash-attn 1 (arXiv:2205.14135): both tables are of the first half of 2023."""

FLASH_2 = ("generic-2023", "fms-2023", "torchtitan")
"""FlashAttention-2 (arXiv:2307.08691), of which PyTorch's scaled_dot_product_attention has a copy."""

USERBUFFERS = ("nemo-2024", "nemo-2025", "megatron-bridge-2025", "megatron-bridge-2026", "megatron-bridge-2026-06")
"""NVIDIA's performance recipes overlap collectives of tp (`tp_comm_overlap`)."""

UNOVERLAPPED = ("megatron-2021", "deepspeed-2020", "bloom-2022", "simumax-2025")
"""Gradients are reduced after backward: arXiv:2205.05198 s6.3 says so of Megatron-LM; SimuMax's notes do."""

FUSED_ACCUMULATION = ("megatron-2021", "simumax-2025", *USERBUFFERS)
"""Megatron-LM's gradient accumulation fusion, on by default."""

NVIDIA_RECIPES = ("nemo-2025", "megatron-bridge-2025", "megatron-bridge-2026", "megatron-bridge-2026-06")

FUSED_LOSS = NVIDIA_RECIPES
"""NVIDIA's performance recipes have `cross_entropy_fusion_impl = "te"`."""

BF16_GRADIENTS = ("nemo-2024", *NVIDIA_RECIPES)
"""The same recipes set `grad_reduce_in_fp32 = False`; before them NeMo's distributed optimizer had
`grad_sync_dtype: bf16`."""

SEQUENTIAL = ("nemo-2024", "nemo-2025", "megatron-bridge-2025", "simumax-2025", "generic", "untuned")
"""Transformer Engine's GroupedLinear was a loop over a rank's experts until its grouped kernels of 2026."""

HIERARCHICAL = ("megatron-bridge-2025", "megatron-bridge-2026", "megatron-bridge-2026-06")
"""Their recipes for DeepSeek-V3 and Kimi K2 name DeepEP or HybridEP as the dispatcher."""

NATURAL_IMBALANCE, UNSTATED_IMBALANCE = 1.2, 1.1
"""Tokens on the busiest rank over the mean, natural routing with a balancing loss, or not said which: assumed, as
no source prints it."""

WHOLE_BLOCKS_OF_SELECTIVE_OP = 1 / 3
"""torchtitan's selective op recompute does about a third of a forward pass again."""


def layout_of(row: Row, num_layers: int) -> Layout:
    """Raises `UnreadableRow` where the product of the degrees isn't the number of GPUs."""
    tp, cp, pp, vpp = (row.count(name) for name in ("tp", "cp", "pp", "vpp"))
    devices, product = row.required("n_gpus"), tp * cp * pp
    dp = row.whole("dp")
    if dp is None:
        if devices % product:
            row.refuse(f"tp*cp*pp={tp}*{cp}*{pp}={product} does not divide n_gpus={devices}")
        dp = devices // product
    if dp * product != devices:
        row.refuse(f"tp*cp*pp*dp={tp}*{cp}*{pp}*{dp}={product * dp} is not n_gpus={devices}")
    if pp == 1 and vpp > 1:
        row.assume(f"vpp={vpp} is taken as 1, as there is no pipeline")
        vpp = 1
    # Llama 3 places dp outside of pp (arXiv:2407.21783 s3.3.2); Megatron-Core and torchtitan do the reverse.
    is_llama_paper = "2407.21783" in row.text("source")
    order: Order = "tp-cp-pp-dp" if is_llama_paper else "tp-cp-dp-pp"
    is_moe = row.count("moe_experts", 0) > 1
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        ep=row.count("ep") if is_moe else 1,
        etp=row.count("etp") if is_moe else 1,
        order=order,
        stage_layers=_stage_layers(num_layers, pp * vpp),
    )


def _stage_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Empty, the planner's rule, but where embedding and loss have a stage of their own."""
    own = stages - num_layers
    if not 0 < own <= 2:
        return ()
    return (0,) * (own > 1) + (1,) * num_layers + (0,)


def recipe_of(row: Row, software: str, layout: Layout, num_layers: int) -> Recipe:
    """Raises `InvalidSpec` where a cell can't be."""
    is_moe = row.count("moe_experts", 0) > 1
    micro_batch, global_batch = _batch(row, layout.dp)
    sequence_parallel = _sequence_parallel(row, layout.tp, is_moe)
    precision = precision_of(row)
    choices: dict[str, Any] = {
        "seq_len": row.required("seq_len"),
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "precision": precision,
        "gradient_format": _gradient_format(row, precision, software),
        "fused_accumulation": software in FUSED_ACCUMULATION,
        "loss_kernel": "fused" if software in FUSED_LOSS else "plain",
        "loss_chunks": _loss_chunks(row, software),
        "sequence_parallel": sequence_parallel,
        "cp_method": _cp_method(row, software),
        "attention_kernel": attention_kernel_of(row, software),
        "dropout": 0.1 if software == "megatron-2021" else 0.0,
        "cuda_graphs": cuda_graphs_of(row),
        "schedule": _schedule(row, layout),
        "grad_clip": 0.0 if "no gradient clipping" in row.lower("notes") else 1.0,
        "optimizer": _optimizer(row),
        "overlap": _overlap(row, software, sequence_parallel and layout.tp > 1),
    }
    choices |= recompute_of(row, software, num_layers, layout.stages)
    choices |= sharding_of(row, layout.dp, layout.cp)
    if is_moe:
        choices |= routing_of(row)
        choices["dispatch"] = dispatch_of(row, software)
        choices["expert_matmuls"] = "sequential" if software in SEQUENTIAL else "grouped"
    return Recipe(**choices)


def dispatch_of(row: Row, software: str) -> str:
    """DeepEP and HybridEP cross to each node once; Megatron-Bridge's recipes for DeepSeek-V3 and Kimi name one."""
    said = f"{row.lower('notes')} {row.lower('moe_routing')}"
    if re.search(r"hybridep|deepep", said):
        return "hierarchical"
    if re.search(r"alltoall|all-to-all dispatcher", said):
        return "all_to_all"
    if software in HIERARCHICAL and row.says("model_name", "deepseek-v3", "kimi"):
        row.assume("tokens are dispatched by DeepEP or HybridEP, as the model's performance recipe has it")
        return "hierarchical"
    return "all_to_all"


def _batch(row: Row, dp: int) -> tuple[int, int]:
    """Micro-batch and global batch; of the three columns one may be empty."""
    micro, whole, accumulated = (row.whole(name) for name in ("micro_batch", "global_batch_seqs", "grad_accum"))
    if not whole:
        if not micro:
            row.refuse("neither micro_batch nor global_batch_seqs is given")
        if not accumulated:
            row.assume("one microbatch a step is assumed")
        return micro, micro * dp * (accumulated or 1)
    if not micro:
        if accumulated and whole % (dp * accumulated) == 0:
            return whole // (dp * accumulated), whole
        row.assume("a micro-batch of 1 is assumed")
        micro = 1
    if whole % (micro * dp):
        row.refuse(f"micro_batch*dp={micro}*{dp}={micro * dp} does not divide global_batch_seqs={whole}")
    return micro, whole


def precision_of(row: Row) -> Precision:
    """The recipe's precision for what a table calls it."""
    text = row.lower("precision")
    if "nvfp4" in text or "fp4" in text:
        return "nvfp4"
    if "mxfp8" in text or "mx fp8" in text:
        return "mxfp8"
    if "fp8" in text or "float8" in text:
        return _fp8(row, text)
    if "fp16" in text or re.search(r"(?<!b)float16", text):
        return "fp16"
    if "fp32" in text or "tf32" in text:
        return "fp32"
    return "bf16"


def _fp8(row: Row, text: str) -> Precision:
    said: dict[Precision, str] = {
        "fp8-delayed": r"delayed|transformerengine|\bte\b",
        "fp8-block": r"blk|block|1x128|tile|fine-grained",
        "fp8-rowwise": r"row",
        "fp8-current": r"-cs|current|tensorwise|float8 linears|per-tensor scal",
    }
    for precision, pattern in said.items():
        if re.search(pattern, text):
            return precision
    if row.count("year", 2024) <= 2025 and row.says("framework", "nemo", "megatron", "transformer"):
        row.assume("FP8 is taken as delayed scaling, the default of Transformer Engine then")
        return "fp8-delayed"
    row.assume("FP8 is taken as current scaling of whole tensors")
    return "fp8-current"


def _loss_chunks(row: Row, software: str) -> int:
    if software != "automodel-2026":
        return 1
    row.assume("the loss is computed in pieces, as AutoModel's fused linear cross-entropy does")
    return 8


def _gradient_format(row: Row, precision: Precision, software: str) -> str:
    notes = row.lower("notes")
    if re.search(r"grad_reduce bf16|bf16 grads|bf16 grad|/pure", notes):
        return "bf16"
    if software == "fms-2023":
        return "bf16"  # foundation-model-stack/fms-fsdp fms_fsdp/policies/mixed_precision.py: bfSixteen
    if software in BF16_GRADIENTS:
        row.assume("gradients are accumulated and reduced in bf16, as NVIDIA's performance recipes set it")
        return "bf16"
    if precision == "fp16":
        row.assume("gradients are accumulated and reduced in fp16, as the optimizers of fp16 stacks did")
        return "bf16"
    return "fp32"


def _sequence_parallel(row: Row, tp: int, is_moe: bool) -> bool:
    said = row.flag("sp")
    if tp == 1:
        return False
    if is_moe and said is False:
        row.assume("sequence parallelism is on, as MoE with tensor parallelism needs it")
    if said is None and not is_moe:
        modern = row.count("year", 2024) >= 2023 and row.says("framework", "megatron", "nemo", "titan")
        row.assume(f"sequence parallelism is assumed to be {'on' if modern else 'off'}")
        return modern
    return is_moe or said is True


def _cp_method(row: Row, software: str) -> str:
    text = f"{row.lower('notes')} {row.lower('framework')}"
    if re.search(r"all-to-all\b|all_to_all|ulysses|a2a cp", text) and row.count("cp") > 1:
        return "all_to_all"
    if "2407.21783" in row.text("source") or software == "torchtitan":
        return "all_gather"
    return "ring"


def attention_kernel_of(row: Row, software: str) -> AttentionKernel:
    """By what the notes say, else by the software's time."""
    notes, year = row.lower("notes"), row.count("year", 2024)
    if "without flash" in notes or "no flash" in notes:
        return "unfused"
    if software in UNFUSED:
        return "flash_2" if "flash" in notes and "possibly" not in notes else "unfused"
    if software == "jax":
        return "unfused" if row.says("framework", "paxml") and not row.says("precision", "te") else "flash"
    if software in FLASH_1:
        return "flash_1"
    if software in FLASH_2:
        return "flash_2"
    if software == "generic" and year <= 2024:
        row.assume("FlashAttention-2 is assumed, the newest that most stacks of its year ran")
        return "flash_2"
    return "flash"


def cuda_graphs_of(row: Row) -> str:
    notes = row.lower("notes")
    said = re.search(r"cuda[_ -]graphs?=(\w+):(\S*)", notes)
    if said:
        if said[1] == "none":
            return "none"
        return "full" if "full" in said[2] or "full" in said[1] else "partial"
    if re.search(r"te cuda graphs|cuda[_ ]graphs? ?=?\s*(transformer_engine|moe_router|attn)", notes):
        return "partial"
    if "full_iteration" in notes or "full iteration" in notes:
        return "full"
    # The tables of 26.08 and the cards that name its performance recipe don't say.
    if "26.08" in row.text("source") or row.lower("recompute_detail") == "perf recipe":
        row.assume("CUDA graphs of whole iterations are assumed, as the performance recipes of 26.08 have them")
        return "full"
    return "none"


def _schedule(row: Row, layout: Layout) -> ScheduleName:
    text = re.sub(r"[^a-z0-9]", "", row.lower("schedule"))
    if layout.pp == 1:
        return "1f1b"
    named: dict[str, ScheduleName] = {
        "dualpipev": "dualpipe_v",
        "dualpipe": "dualpipe",
        "zbv": "zb_v",
        "zb": "zb_h1",
        "zerobubble": "zb_h1",
        "gpipe": "gpipe",
        "breadth": "breadth_first",
    }
    for word, schedule in named.items():
        if word in text:
            return schedule
    return "interleaved_1f1b" if layout.vpp > 1 else "1f1b"


def _optimizer(row: Row) -> Optimizer:
    notes = row.lower("notes")
    return Optimizer(
        name="muon" if "muon" in notes else "adamw",
        moments="bf16" if re.search(r"bf16 (grads and )?moments", notes) else "fp32",
        offload="optimizer offload" in notes or "optimizer cpu offload" in notes,
    )


def _overlap(row: Row, software: str, has_sequence_parallel: bool) -> Overlap:
    notes = row.lower("notes")
    off = re.search(r"comm overlap off|not overlapped|no overlap", notes) is not None
    said_tp = (
        re.search(r"async tp|asynctp|tp[_ -]comm[_ -]overlap|userbuffers", notes) and "vanilla tp" not in notes
    )
    return Overlap(
        dp=not off and software not in UNOVERLAPPED,
        pp=not off and software not in UNOVERLAPPED,
        tp=not off and has_sequence_parallel and (said_tp is not None or software in USERBUFFERS),
        ep=re.search(r"moe_a2a_overlap=true|ep (comm )?overlap|dualpipe|dual-batch", notes) is not None,
    )


def sharding_of(row: Row, dp: int, cp: int) -> dict[str, Any]:
    """zero, dp_replicate and reshard_after_forward; a text says over how many ranks: `over 32`, `group=8`."""
    text = row.lower("zero_or_fsdp")
    zero = row.whole("zero_stage")
    if zero is None:
        zero = _zero(row, text)
    if zero not in (0, 1, 2, 3):
        row.refuse(f"zero_stage={zero} is none of 0, 1, 2, 3")
    choices: dict[str, Any] = {"zero": zero}
    if zero == 3 and re.search(r"reshard_after_forward ?= ?false", text):
        choices["reshard_after_forward"] = False
    said = re.search(r"(?:over|group ?=|degree|shard group)\s*([1-9]\d*)", text)
    shards = int(said[1]) if said else dp * cp
    if "shard in node" in text or ("hsdp" in text and not said):
        shards = row.count("gpus_per_node", 8)
    replicas = dp * cp // shards
    if zero and replicas > 1:
        if dp * cp % shards or dp % replicas:
            row.assume(f"sharding over {shards} ranks does not divide dp={dp} and is taken as over all")
        else:
            choices["dp_replicate"] = replicas
    return choices


def _zero(row: Row, text: str) -> int:
    if re.search(r"grad_op|zero-?2|stage ?2", text):
        return 2
    if re.search(r"fsdp|hsdp|zero-?3|stage ?3|fully", text):
        return 3
    if re.search(r"dist|zero-?1|stage ?1", text):
        return 1
    if re.search(r"none|ddp|replicated|zero-?0", text):
        return 0
    if row.says("framework", "fsdp", "titan"):
        return 3
    row.assume("the optimizer is assumed to be sharded (ZeRO-1)")
    return 1


OPERATIONS: dict[RecomputeOp, str] = {
    "attention": r"core.?attn|core.?attention|attention core|\bsdpa\b",
    "norm": r"norm",
    "activation": r"moe_act|\bact\b|activation func|swiglu|gelu",
    "latent_up": r"mla_up_proj|up.?proj",
    "mlp": r"\bmlp\b",
    "moe": r"\bmoe\b",
}
"""Megatron-Core's `recompute_modules`, and other names of the same."""


def recompute_of(row: Row, software: str, num_layers: int, stages: int) -> dict[str, Any]:
    """recompute, with recompute_ops or recompute_layers."""
    said, detail = row.lower("recompute"), row.lower("recompute_detail")
    if said in ("", "unknown"):
        if row.says("framework", "maxtext"):
            row.assume("full recompute is assumed, MaxText's default")
            return {"recompute": "full"}
        row.assume("recompute is not stated; none is assumed")
        return {"recompute": "none"}
    if said in ("none", "no", "0"):
        return {"recompute": "none"}
    if said == "full":
        return {"recompute": "full"}
    share = _recomputed_share(row, said, detail)
    if share is not None:
        layers = max(1, round(share * num_layers / stages))
        row.assume(f"{share:.0%} of the layers are taken as recomputed")
        return {"recompute": "full", "recompute_layers": layers}
    ops = tuple(op for op, pattern in OPERATIONS.items() if re.search(pattern, detail))
    return {"recompute": "selective", "recompute_ops": ops or ("attention",)}


def _recomputed_share(row: Row, said: str, detail: str) -> float | None:
    """The share of whole layers that are computed again; None where recompute is by operation."""
    every = re.search(r"every ([1-9]\d*)\w* (layer|block)", detail)
    if every:
        return 1 / int(every[1])
    if "selective op" in detail:
        return WHOLE_BLOCKS_OF_SELECTIVE_OP
    mfu, hfu = row.number("mfu"), row.number("hfu")
    if (said == "partial" or "fraction" in detail) and mfu and hfu:
        return min(1.0, max(0.0, 3 * (hfu / mfu - 1)))
    return 0.5 if said == "partial" else None


def routing_of(row: Row) -> dict[str, Any]:
    """capacity_factor, or expert_imbalance of dropless routing."""
    text, experts = f"{row.lower('moe_routing')} {row.lower('notes')}", row.count("moe_experts", 0)
    if re.search(r"token.?drop|tokendrop|capacity", text) and "dropless" not in row.lower("moe_routing"):
        factor = re.search(r"capacity(?: factor)?[ =]*(\d+(?:\.\d+)?)", text)
        return {"capacity_factor": float(factor[1]) if factor and float(factor[1]) > 0 else 1.0}
    if row.says("framework", "nemo") and not row.says("moe_routing", "natural", "dropless") and experts <= 8:
        row.assume("tokens beyond a capacity of 1.0 are dropped, as NeMo's recipes for Mixtral and Grok have it")
        return {"capacity_factor": 1.0}
    if is_routing_natural(row):
        imbalance = NATURAL_IMBALANCE if row.says("moe_routing", "natural") else UNSTATED_IMBALANCE
        row.assume(f"the busiest rank of experts is assumed to have {imbalance} times the mean")
        return {"expert_imbalance": imbalance}
    return {}


def is_routing_natural(row: Row) -> bool:
    """Whether balance is not said to be forced (nor tokens dropped)."""
    text = row.lower("moe_routing")
    return row.count("moe_experts", 0) > 1 and re.search(r"forc|fake|drop, |token.?drop|capacity", text) is None
