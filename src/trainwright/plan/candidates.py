"""Every legal layout and recipe for a question, as one table.

The rules are those of `Run.check` (a test holds the two against each other), and some of taste: tp stays inside
the scale-up domain, since its collectives are on the critical path of every layer; nothing is sharded over one
rank; orders of the axes differ only where both pp and dp are above one, inside a scale-up domain; schedules that
others dominate are for those who ask for them. Planes (tp, cp, pp, dp) are walked one by one, and so are the ways
to run a pipeline (micro-batch, chunks, schedule); what any of them may have (experts, order, sharding, recompute)
is multiplied out as arrays.
"""

from collections.abc import Container, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.table import DEGREES, ORDER, SCHEDULE, Columns, Ints, Policy, Table
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.layout import ORDERS
from trainwright.spec.model import GroupedQueryAttention, LatentAttention, MoeMlp
from trainwright.spec.question import Question
from trainwright.spec.run import require_hardware
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import min_layers

MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_CHUNKS = 8
"""Largest vpp that is searched; beyond it the sends outgrow the smaller bubble."""

SEARCHED_SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
"""GPipe and breadth-first hold more than 1F1B and are no faster, DualPipe holds all parameters twice: they are
there for those who ask for them."""

REPLICAS = (1, 2, 4, 8, 16, 32, 64)
"""Copies of every shard (HSDP) that are searched."""

CPU_SCHEDULES = ("1f1b", "interleaved_1f1b")
CPU_OPS = ("attention",)
"""On CPUs the plain ones are searched: ranks share cores, so that a bubble of one is another one's turn."""

PARTIAL_LAYERS = (1, 2, 4, 8, 16, 32)
"""Layers of a stage that full recompute is searched for, besides all of them."""


CORE: tuple[str, ...] = ("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "vpp", "schedule", "num_layers")
"""What a candidate is without what is multiplied out; the last are the layers of its fullest stage."""


Plane = tuple[int, int, int, int]
"""Degrees of tp, cp, pp and dp."""


def candidates(question: Question, planes: Container[Plane] | None = None) -> Table:
    """All candidates (of some planes, where they are given), or `InvalidSpec` naming the rule that leaves none."""
    cluster, devices = question.cluster, question.devices
    if devices > cluster.max_devices:
        reject("devices", devices, f"cluster {cluster.name} has no network and holds {cluster.max_devices:.0f}")
    require_hardware(question.recipe, cluster)
    made = policies(question)
    columns = _multiplied(question, _cores(question, planes), made)
    if not len(columns):
        _explain_none(question)
    return Table(question.model, cluster, question.recipe, columns, made, question.stage_layers)


def has_planes(question: Question) -> bool:
    """Whether any degrees of tp, cp, pp and dp multiply to the devices and split the batch."""
    return next(_planes(question), None) is not None


def policies(question: Question) -> tuple[Policy, ...]:
    """What is searched of recompute: nothing, some operations, everything, everything of some layers."""
    recipe, fixed = question.recipe, question.fixed.get("recompute")
    if fixed not in (None, "none", "selective", "full"):
        why = (
            "is what a search does by itself, within the device's memory; leave it out"
            if fixed == "budget"
            else ""
        )
        reject("recipe.recompute", fixed, why or "may be none, selective, full")
    chosen = [Policy()]
    default = type(recipe).model_fields["recompute_ops"].default
    own = [recipe.recompute_ops] if fixed == "selective" or recipe.recompute_ops != default else []
    chosen += [Policy("selective", ops) for ops in own or _worthwhile_ops(question)]
    partial = [recipe.recompute_layers] if recipe.recompute_layers is not None else [None, *PARTIAL_LAYERS]
    chosen += [Policy("full", recipe.recompute_ops, layers) for layers in partial]
    return tuple(policy for policy in chosen if fixed in (None, policy.recompute))


def schedules_of(question: Question) -> tuple[str, ...]:
    """Schedules that are searched where the question fixes none."""
    return CPU_SCHEDULES if question.cluster.device.kind == "cpu" else SEARCHED_SCHEDULES


def _worthwhile_ops(question: Question) -> list:
    """Sets of operations that give memory for little time: scores where they are kept; norms and activations; the
    up-projections of latent attention."""
    if question.cluster.device.kind == "cpu":
        return [CPU_OPS]
    layers = question.model.layer_counts()
    cheap: tuple = ("norm", "activation")
    sets: list = [("attention",)] if question.recipe.attention_kernel == "unfused" else []
    sets.append(cheap)
    if any(isinstance(layer.attention, LatentAttention) for layer in layers):
        sets.append((*cheap, "latent_up"))
    return sets


def _multiplied(question: Question, core: Ints, made: tuple[Policy, ...]) -> Columns:
    """Every core with every order, sharding and policy that it may have."""
    fields = dict(zip(CORE, core.T, strict=True))
    orders = [ORDER.index(name) for name in ORDERS if question.fixed.get("order", name) == name]
    shardings = np.array(_shardings(question), dtype=np.int64).reshape(-1, 3)
    order, sharding, policy = (
        places.ravel()
        for places in np.meshgrid(orders, np.arange(len(shardings)), np.arange(len(made)), indexing="ij")
    )
    zero, replicas, reshard = shardings[sharding].T
    kept = _differs(fields, shardings)[:, sharding] & _orders_differ(question, fields, order, orders)
    if "recompute" not in question.fixed or question.recipe.recompute_layers is None:
        layers = np.array([-1 if each.layers is None else each.layers for each in made])
        kept &= layers[policy] < fields["num_layers"][:, None]
    at, chosen = np.nonzero(kept)
    degrees = {name: fields[name][at] for name in (*DEGREES, "micro_batch", "schedule")}
    choices = {"order": order, "zero": zero, "replicas": replicas, "reshard": reshard, "policy": policy}
    return Columns(**degrees, **{name: each.astype(np.int64)[chosen] for name, each in choices.items()})


def _shardings(question: Question) -> list[tuple[int, int, int]]:
    """zero, replicas of HSDP, and whether zero 3 reshards after forward, in every combination with a meaning."""
    fixed = question.fixed
    wanted = fixed.get("dp_replicate")
    replicas = replicas_of(question) if wanted is None else [wanted]
    return [
        (zero, int(copies), int(reshard))
        for zero in (0, 1, 2, 3)
        for copies in replicas
        for reshard in (True, False)
        if fixed.get("zero", zero) == zero
        and fixed.get("reshard_after_forward", reshard) == reshard
        and (copies == 1 or zero > 0)
        and (reshard or zero == 3)
    ]


def replicas_of(question: Question) -> tuple[int, ...]:
    """Experts have their own replicas already, by ep: copies of shards are searched for dense models."""
    return (1,) if question.model.is_moe else REPLICAS


def _differs(fields: dict[str, Ints], shardings: Ints) -> NDArray[np.bool_]:
    """Of every core and sharding, whether it is possible and not the same as another: nothing is sharded over one
    rank, and HSDP's replicas hold all experts."""
    zero, replicas, _ = shardings.T
    copies = fields["tp"] * fields["cp"] * fields["dp"] // (fields["ep"] * fields["etp"])
    shards = (fields["dp"] * fields["cp"])[:, None] // replicas
    possible = (fields["dp"][:, None] % replicas == 0) & (copies[:, None] % replicas == 0)
    return possible & ((shards > 1) | (zero == 0))


def _orders_differ(
    question: Question, fields: dict[str, Ints], order: Ints, orders: list[int]
) -> NDArray[np.bool_]:
    """One order where a second one changes nothing: without pp or dp, and where tp and cp fill the scale-up
    domain, so that what lies beyond them crosses the network in either order."""
    two_orders = (fields["pp"] > 1) & (fields["dp"] > 1)
    two_orders &= fields["tp"] * fields["cp"] < question.cluster.fabric.link_domain
    return two_orders[:, None] | (order == orders[0])


def _cores(question: Question, planes: Container[Plane] | None) -> Ints:
    """All of them, (cores, CORE): every plane with all degrees of its experts and all ways to run it."""
    ways: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    blocks = []
    for plane in _planes(question):
        if planes is not None and plane not in planes:
            continue
        tp, cp, pp, dp = plane
        experts = list(_expert_degrees(question, tp, cp, dp))
        if (pp, dp) not in ways:
            ways[pp, dp] = list(_ways(question, pp, dp))
        if experts and ways[pp, dp]:
            block = np.empty((len(experts), len(ways[pp, dp]), len(CORE)), dtype=np.int64)
            block[:, :, :4] = plane
            block[:, :, 4:6] = np.array(experts)[:, None]
            block[:, :, 6:] = np.array(ways[pp, dp])[None, :]
            blocks.append(block.reshape(-1, len(CORE)))
    return np.concatenate([np.empty((0, len(CORE)), dtype=np.int64), *blocks])


def _planes(question: Question) -> Iterator[Plane]:
    """Degrees of tp, cp, pp and dp whose product is the number of devices."""
    recipe, model = question.recipe, question.model
    for tp in _allowed(question, "tp", _tp_degrees(question)):
        if (model.is_moe or recipe.overlap.tp) and tp > 1 and not recipe.sequence_parallel:
            continue
        for cp in _allowed(question, "cp", _divisors(question.devices // tp)):
            cut = recipe.sequence_cut(tp, cp)
            if recipe.seq_len % cut or not _is_power_of_two(cp) or not _may_exchange_heads(question, tp, cp):
                continue
            for pp in _allowed(question, "pp", _divisors(question.devices // (tp * cp))):
                dp = question.devices // (tp * cp * pp)
                if min_layers(pp) > model.num_layers or pp > 512 or recipe.global_batch % dp:
                    continue
                if dp in _allowed(question, "dp", [dp]):
                    yield tp, cp, pp, dp


def _may_exchange_heads(question: Question, tp: int, cp: int) -> bool:
    """cp by all_to_all deals out the heads that tp has left."""
    if question.recipe.cp_method != "all_to_all":
        return True
    return all(layer.attention.num_heads % (tp * cp) == 0 for layer in question.model.layer_counts())


def _expert_degrees(question: Question, tp: int, cp: int, dp: int) -> Iterator[tuple[int, int]]:
    """ep and etp: experts are whole on a rank, or cut as attention is."""
    mlps = [layer.mlp for layer in question.model.layer_counts() if isinstance(layer.mlp, MoeMlp)]
    if not mlps:
        if question.fixed.get("ep", 1) == 1 and question.fixed.get("etp", 1) == 1:
            yield 1, 1
        return
    plane = tp * cp * dp
    for etp in _allowed(question, "etp", sorted({1, tp})):
        for ep in _allowed(question, "ep", _divisors(plane // etp) if plane % etp == 0 else []):
            if all(mlp.num_experts % ep == 0 and mlp.d_ff % etp == 0 for mlp in mlps):
                yield ep, etp


def _ways(question: Question, pp: int, dp: int) -> Iterator[tuple[int, int, int, int]]:
    """Micro-batch, vpp, schedule and the layers of the fullest stage that pp and dp may run with."""
    per_rank = question.recipe.global_batch // dp
    for micro_batch in _allowed(question, "micro_batch", _micro_batches(question, per_rank)):
        for vpp, schedule in _schedules(question, pp, per_rank // micro_batch):
            num_layers = -(-question.model.num_layers // _num_stages(schedule, pp, vpp))
            yield micro_batch, vpp, SCHEDULE.index(schedule), num_layers


def _schedules(question: Question, pp: int, num_microbatches: int) -> Iterator[tuple[int, str]]:
    names = _allowed_names(
        question, "schedule", SCHEDULE if "schedule" in question.fixed else schedules_of(question)
    )
    for name in names:
        if pp == 1:
            # Without stages every schedule is the same.
            wanted = name in ("1f1b", question.fixed.get("schedule")) and 1 in _allowed(question, "vpp", [1])
            if wanted and len(question.stage_layers) <= 1 and _runs(name, 1, 1, num_microbatches):
                yield 1, name
            continue
        for vpp in _allowed(question, "vpp", _chunks(question, pp)):
            if not _runs(name, pp, vpp, num_microbatches):
                continue
            count = _num_stages(name, pp, vpp)
            chosen = len(question.stage_layers) or count
            if min_layers(count) <= question.model.num_layers and count == chosen:
                yield vpp, name


@lru_cache(maxsize=4096)
def _num_stages(schedule: str, pp: int, vpp: int) -> int:
    """`Schedule.num_stages`, kept."""
    return SCHEDULES[schedule].num_stages(pp, vpp)


def _chunks(question: Question, pp: int) -> list[int]:
    most = max(min(MOST_CHUNKS, (question.model.num_layers + 2) // pp), 2)
    wanted = question.fixed.get("vpp")
    return [*range(1, most + 1), *([wanted] if isinstance(wanted, int) and wanted > most else [])]


@lru_cache(maxsize=1 << 16)
def _runs(schedule: str, pp: int, vpp: int, num_microbatches: int) -> bool:
    try:
        SCHEDULES[schedule].check(pp, vpp, num_microbatches)
    except InvalidSpec:
        return False
    return True


def _tp_degrees(question: Question) -> list[int]:
    layers = question.model.layer_counts()
    limit = question.devices if "tp" in question.fixed else question.cluster.fabric.link_domain

    def divides(tp: int) -> bool:
        for layer in layers:
            attention = layer.attention
            width = layer.mlp.d_ff_shared if isinstance(layer.mlp, MoeMlp) else layer.mlp.d_ff
            if attention.num_heads % tp or width % tp:
                return False
            if isinstance(attention, GroupedQueryAttention):
                kv_heads = attention.num_kv_heads
                if kv_heads % tp and tp % kv_heads:
                    return False
        return True

    return [tp for tp in _divisors(question.devices) if tp <= limit and divides(tp)]


def _micro_batches(question: Question, per_rank: int) -> list[int]:
    wanted = question.fixed.get("micro_batch")
    options = MICRO_BATCHES if wanted is None else (wanted,)
    return [size for size in options if isinstance(size, int) and size >= 1 and per_rank % size == 0]


def _allowed(question: Question, name: str, degrees: "list[int] | range") -> list[int]:
    """`degrees`, or of them only what the question fixes."""
    if name not in question.fixed:
        return list(degrees)
    return [degree for degree in degrees if degree == question.fixed[name]]


def _allowed_names(question: Question, name: str, options: tuple[str, ...]) -> list[str]:
    if name not in question.fixed:
        return list(options)
    if question.fixed[name] not in options:
        reject(f"recipe.{name}", question.fixed[name], f"may be {', '.join(options)}")
    return [str(question.fixed[name])]


def _divisors(number: int) -> list[int]:
    return (
        [divisor for divisor in range(1, number + 1) if number % divisor == 0]
        if number < 4096
        else sorted(
            {each for low in range(1, int(number**0.5) + 1) if number % low == 0 for each in (low, number // low)}
        )
    )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _explain_none(question: Question) -> None:
    """Name what leaves no candidate: the choices that are fixed, or the batch, or the sequence."""
    if question.fixed or question.stage_layers:
        fixed = ", ".join(
            f"{'layout' if name in (*DEGREES, 'order') else 'recipe'}.{name}={value}"
            for name, value in question.fixed.items()
        )
        if question.stage_layers:
            fixed += f"{fixed and ', '}layout.stage_layers of {len(question.stage_layers)} stages"
        reject(
            "--set", fixed, f"no legal layout of {question.devices} devices has it; free a field or change --gpus"
        )
    reject(
        "recipe.global_batch",
        question.recipe.global_batch,
        f"no layout of {question.devices} devices splits it: dp = devices / (tp*cp*pp) must divide it, with "
        f"tp up to {question.cluster.fabric.link_domain} and pp up to {question.model.num_layers}",
    )
