"""One complete description of a training run: model, cluster, layout, recipe, data, token budget.

`check()` cross-examines the nouns: what each can't know of the others. It is called at the door, when a run
is read or planned; behind it nobody checks again. The hash is that of the content, not of the file's text.
"""

import hashlib
import json
from typing import Literal

from pydantic import Field

from trainwright.spec.base import Count, Noun
from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import LacksHardware, reject
from trainwright.spec.layout import Layout
from trainwright.spec.model import GroupedQueryAttention, LatentAttention, ModelSpec, MoeMlp
from trainwright.spec.recipe import PRECISIONS, RECOMPUTE_OPS, Recipe, RecomputeOp, has_hardware
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages
from trainwright.spec.supervision import Guard, Supervision

OF_EXPERTS = (
    "capacity_factor",
    "balance_loss",
    "balance_rate",
    "expert_imbalance",
    "expert_matmuls",
    "dispatch",
    "dispatch_fp8",
)
"""Fields of a recipe that say how experts run."""


class DataSpec(Noun):
    """What it is trained on."""

    source: Literal["python-stdlib", "shards"] = "python-stdlib"
    """python-stdlib: the sources of the running Python's standard library, tokenized by a BPE trained on
    them; shards: a directory of token shards."""
    path: str = ""
    """Directory of the shards; empty for python-stdlib, which is kept in the cache."""
    vocab_size: Count = Field(default=4096, ge=258)
    """Of the BPE that is trained for python-stdlib; for shards, the largest that they may use."""
    document_mask: bool = False
    """Tokens see no other document than their own, though samples hold several; positions count on through the
    sample. The planner counts attention as if they saw all, which is what is computed, and doesn't count the
    mask: a value for each pair of positions, in each layer."""


class Budget(Noun):
    """How long it is trained."""

    tokens: Count


class Run(Noun):
    """Everything that `predict`, `train` and `compare` need to know."""

    name: str = "run"
    layout: Layout
    recipe: Recipe
    data: DataSpec = DataSpec()
    budget: Budget | None = None
    """None: open-ended; `train --steps` says how far."""
    checkpoint: Checkpointing | None = None
    """None: nothing is saved on the way."""
    supervision: Supervision | None = None
    """None: a failure ends the run."""
    guard: Guard | None = None
    """None: every step moves the weights."""
    model: ModelSpec
    cluster: ClusterSpec

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on each data-parallel rank."""
        return self.recipe.global_batch // (self.recipe.micro_batch * self.layout.dp)

    @property
    def steps(self) -> int | None:
        """Steps that the budget buys, the last one full; None without a budget."""
        return None if self.budget is None else -(-self.budget.tokens // self.recipe.tokens_per_step)

    @property
    def hash(self) -> str:
        """Twelve hex digits of the content: equal runs have equal hashes, however they are written."""
        text = json.dumps(self.plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def check(self) -> "Run":
        """Raise `InvalidSpec` at the first field that doesn't fit the others; return self."""
        self._check_model()
        self._check_pipeline()
        self._check_batch()
        self._check_cluster()
        self._check_data()
        self._check_faults()
        return self

    def _check_batch(self) -> None:
        recipe, layout = self.recipe, self.layout
        per_pass = recipe.micro_batch * layout.dp
        if recipe.global_batch % per_pass:
            reject(
                "recipe.global_batch",
                recipe.global_batch,
                f"must be a multiple of micro_batch*dp={recipe.micro_batch}*{layout.dp}={per_pass}",
            )
        if layout.dp % recipe.dp_replicate:
            reject("recipe.dp_replicate", recipe.dp_replicate, f"must divide layout.dp={layout.dp}")
        shared = layout.ep * layout.etp
        if self.model.is_moe and recipe.dp_replicate > 1 and layout.expert_dp % recipe.dp_replicate:
            reject(
                "recipe.dp_replicate",
                recipe.dp_replicate,
                f"must divide the {layout.expert_dp} replicas of every expert, "
                f"tp*cp*dp/(ep*etp)={layout.expert_dp * shared}/{shared}",
            )
        split = recipe.sequence_cut(layout.tp, layout.cp)
        if recipe.seq_len % split:
            reject(
                "recipe.seq_len",
                recipe.seq_len,
                f"must be a multiple of {split}, as cp={layout.cp} and sequence-parallel tp={layout.tp} cut it",
            )
        require_meaning(recipe, self.model)

    def _check_cluster(self) -> None:
        layout, cluster = self.layout, self.cluster
        if layout.world > cluster.max_devices:
            reject(
                "layout",
                f"{layout.world} ranks",
                f"cluster {cluster.name} has no network and holds {cluster.max_devices:.0f} devices; "
                "lower the degrees or give fabric.nics_per_node",
            )
        require_hardware(self.recipe, cluster)

    def _check_faults(self) -> None:
        saves, guard, supervision = self.checkpoint, self.guard, self.supervision
        if guard is not None and guard.action == "roll_back" and (saves is None or saves.every_steps is None):
            why = "needs commits at steps that don't depend on time; set checkpoint.every_steps"
            reject("guard.action", guard.action, why)
        if saves is not None and saves.memory_every_steps and supervision is None:
            why = "is for a run that is supervised, as memory is given back by the supervisor; set supervision"
            reject("checkpoint.memory_every_steps", saves.memory_every_steps, why)
        if supervision is not None and supervision.grow_after_steps and saves is None:
            why = "stops the run at a commit, and none is made; set checkpoint.every_steps, or leave it out"
            reject("supervision.grow_after_steps", supervision.grow_after_steps, why)

    def _check_model(self) -> None:
        layout, vocab = self.layout, self.model.vocab_size
        for layer in self.model.layer_counts():
            heads = layer.attention.num_heads
            if heads % layout.tp:
                reject("layout.tp", layout.tp, f"must divide the {heads} attention heads")
            if isinstance(layer.attention, GroupedQueryAttention):
                kv_heads = layer.attention.num_kv_heads
                if kv_heads % layout.tp and layout.tp % kv_heads:
                    reject("layout.tp", layout.tp, f"and the {kv_heads} key/value heads don't divide one another")
            tp, field = (layout.etp, "layout.etp") if isinstance(layer.mlp, MoeMlp) else (layout.tp, "layout.tp")
            if self.recipe.cp_method == "all_to_all" and heads % (layout.tp * layout.cp):
                split = f"tp*cp={layout.tp * layout.cp} must divide the {heads} attention heads with all_to_all"
                reject("layout.cp", layout.cp, split)
            if layer.mlp.d_ff % tp:
                reject(field, tp, f"must divide the MLP width d_ff={layer.mlp.d_ff}")
            if isinstance(layer.mlp, MoeMlp):
                if layer.mlp.num_experts % layout.ep:
                    reject("layout.ep", layout.ep, f"must divide the {layer.mlp.num_experts} experts")
                if layer.mlp.d_ff_shared % layout.tp:
                    reject("layout.tp", layout.tp, f"must divide d_ff_shared={layer.mlp.d_ff_shared}")
        if layout.tp > vocab:
            reject("layout.tp", layout.tp, f"must be at most vocab_size={vocab}")
        if self.recipe.overlap.tp and layout.tp > 1 and not self.recipe.sequence_parallel:
            why = "is of what sequence parallelism gathers and scatters; set recipe.sequence_parallel=true"
            reject("recipe.overlap.tp", True, f"{why}, or this to false")
        if self.model.is_moe and layout.tp > 1 and not self.recipe.sequence_parallel:
            reject(
                "recipe.sequence_parallel",
                False,
                "must be true with tp above 1 and experts: tp ranks share out tokens",
            )
        if not self.model.is_moe and layout.ep > 1:
            reject("layout.ep", layout.ep, f"{self.model.name} has no experts; set layout.ep=1")
        if not self.model.is_moe and layout.etp > 1:
            reject("layout.etp", layout.etp, f"{self.model.name} has no experts; set layout.etp=1")

    def _check_pipeline(self) -> None:
        layout, schedule = self.layout, SCHEDULES[self.recipe.schedule]
        schedule.check(layout.pp, layout.vpp, self.num_microbatches)
        stages = schedule.num_stages(layout.pp, layout.vpp)
        layers_of_stages(self.model.num_layers, stages, layout.stage_layers)

    def _check_data(self) -> None:
        if self.data.vocab_size > self.model.vocab_size:
            reject(
                "data.vocab_size",
                self.data.vocab_size,
                f"must be at most model.vocab_size={self.model.vocab_size}",
            )
        if self.data.source == "python-stdlib" and self.data.path:
            reject("data.path", self.data.path, "is for data.source=shards; python-stdlib lies in the cache")
        if self.data.source == "shards" and not self.data.path:
            reject("data.path", "", "must name the directory of the shards where data.source=shards")


def require_hardware(recipe: Recipe, cluster: ClusterSpec) -> None:
    """Reject a precision that the cluster's devices don't have, unless it is emulated."""
    wanted = recipe.precision
    if wanted == "fp64" or recipe.emulate_precision or has_hardware(wanted, cluster.device):
        return
    known = [each for each in PRECISIONS if each != "fp64" and has_hardware(each, cluster.device)]
    remedy = f"it may be {', '.join(known)}"
    if recipe.is_low_precision:
        remedy += ", or emulated by casts with recipe.emulate_precision=true"
    message = f"recipe.precision={wanted!r}: {cluster.device.name} has no hardware for it; {remedy}"
    raise LacksHardware(wanted, message)


def require_meaning(recipe: Recipe, model: ModelSpec) -> None:
    """Reject what a recipe says of parts that the model doesn't have: it would change nothing."""
    require_length(recipe, model)
    if not model.is_moe:
        for field in OF_EXPERTS:
            value = getattr(recipe, field)
            if value != Recipe.model_fields[field].default:
                reject(f"recipe.{field}", value, f"is of experts, and {model.name} has none; leave it out")
        if recipe.overlap.ep:
            reject("recipe.overlap.ep", True, f"is of experts, and {model.name} has none; leave it out")
    weight = recipe.mtp_loss_weight
    if not model.mtp_depth and weight != Recipe.model_fields["mtp_loss_weight"].default:
        reject(
            "recipe.mtp_loss_weight",
            weight,
            f"is of multi-token prediction, and {model.name} has none; leave it out",
        )
    biased = any(isinstance(layer.mlp, MoeMlp) and layer.mlp.balance_bias for layer in model.layer_counts())
    if recipe.balance_rate != Recipe.model_fields["balance_rate"].default and not biased:
        remedy = f"{model.name} has no balance_bias that it could move; leave it out"
        reject("recipe.balance_rate", recipe.balance_rate, remedy)
    if recipe.recompute_layers is not None and recipe.recompute_layers > model.num_layers:
        reject("recipe.recompute_layers", recipe.recompute_layers, f"{model.name} has {model.num_layers} layers")
    if recipe.recompute == "selective":
        there = recomputable(model)
        for operation in recipe.recompute_ops:
            if not there[operation]:
                reject("recipe.recompute_ops", operation, f"{model.name} has no such part; leave it out")


def recomputable(model: ModelSpec) -> dict[RecomputeOp, bool]:
    """Whether the model has what each operation of `Recipe.recompute_ops` does again."""
    layers = model.layer_counts()
    parts: dict[RecomputeOp, bool] = {
        "moe": model.is_moe,
        "mlp": not all(isinstance(layer.mlp, MoeMlp) for layer in layers),
        "latent_up": any(isinstance(layer.attention, LatentAttention) for layer in layers),
    }
    return {op: parts.get(op, True) for op in RECOMPUTE_OPS}


def require_length(recipe: Recipe, model: ModelSpec) -> None:
    """Reject sequences that are longer than the model is meant for."""
    if recipe.seq_len > model.max_positions:
        reject(
            "recipe.seq_len",
            recipe.seq_len,
            f"is beyond model.max_positions={model.max_positions}; shorten it or raise max_positions",
        )
    if model.learned_positions and recipe.seq_len > model.learned_positions:
        reject(
            "recipe.seq_len",
            recipe.seq_len,
            f"is beyond the table of model.learned_positions={model.learned_positions}; shorten it",
        )
