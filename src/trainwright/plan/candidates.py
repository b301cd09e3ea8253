"""Every legal layout and recipe for a question, as one table.

The rules are those of `Run.check` (a test holds the two against each other), and two of taste: tp stays inside
the scale-up domain, since its collectives are on the critical path of every layer, and nothing is sharded
over one rank.
"""

from collections.abc import Iterator

import numpy as np

from trainwright.plan.table import LAYOUT_COLUMNS, RECOMPUTE, SCHEDULE, Columns, Table
from trainwright.spec.errors import reject
from trainwright.spec.model import GroupedQueryAttention
from trainwright.spec.question import Question

MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_CHUNKS = 8
"""Largest vpp that is searched; beyond it the sends outgrow the smaller bubble."""

Choice = dict[str, int]


def candidates(question: Question) -> Table:
    """All candidates, or `InvalidSpec` naming the rule that leaves none."""
    cluster, devices = question.cluster, question.devices
    if devices > cluster.max_devices:
        reject("devices", devices, f"cluster {cluster.name} has no network and holds {cluster.max_devices:.0f}")
    rows = [choice for layout in _layouts(question) for choice in _recipes(question, layout)]
    if not rows:
        _explain_none(question)
    names = (*LAYOUT_COLUMNS, "micro_batch", "zero", "recompute", "schedule")
    columns = Columns(**{name: np.array([row[name] for row in rows], dtype=np.int64) for name in names})
    return Table(question.model, cluster, question.recipe, columns)


def _layouts(question: Question) -> Iterator[Choice]:
    """Degrees of tp, cp, pp and dp whose product is the number of devices."""
    seq_len, global_batch = question.recipe.seq_len, question.recipe.global_batch
    for tp in _allowed(question, "tp", _tp_degrees(question)):
        for cp in _allowed(question, "cp", _divisors(question.devices // tp)):
            cut = cp * (tp if question.recipe.sequence_parallel else 1)
            if seq_len % cut or not _is_power_of_two(cp):
                continue
            for pp in _allowed(question, "pp", _divisors(question.devices // (tp * cp))):
                dp = question.devices // (tp * cp * pp)
                if pp > question.model.num_layers or global_batch % dp or dp % question.recipe.dp_replicate:
                    continue
                if dp in _allowed(question, "dp", [dp]):
                    yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp}


def _recipes(question: Question, layout: Choice) -> Iterator[Choice]:
    """Everything else for one layout."""
    if question.fixed.get("ep", 1) != 1 or question.fixed.get("etp", 1) != 1:
        return
    per_rank = question.recipe.global_batch // layout["dp"]
    zeros = [0] if layout["dp"] * layout["cp"] == 1 else [0, 1, 2, 3]
    if question.recipe.dp_replicate > 1:
        zeros = [zero for zero in zeros if zero > 0]
    for micro_batch in _allowed(question, "micro_batch", _micro_batches(question, per_rank)):
        for vpp, schedule in _schedules(question, layout["pp"], per_rank // micro_batch):
            for zero in _allowed(question, "zero", zeros):
                for recompute in _allowed_names(question, "recompute", RECOMPUTE):
                    yield layout | {
                        "vpp": vpp,
                        "ep": 1,
                        "etp": 1,
                        "micro_batch": micro_batch,
                        "zero": zero,
                        "recompute": RECOMPUTE.index(recompute),
                        "schedule": SCHEDULE.index(schedule),
                    }


def _schedules(question: Question, pp: int, num_microbatches: int) -> Iterator[tuple[int, str]]:
    # GPipe takes as long as 1F1B and holds more: it is there for those who ask for it.
    names = _allowed_names(question, "schedule", SCHEDULE if "schedule" in question.fixed else SCHEDULE[:2])
    for name in names:
        if name != "interleaved_1f1b":
            yield from ((vpp, name) for vpp in _allowed(question, "vpp", [1]))
        elif pp > 1 and num_microbatches % pp == 0:
            chunks = range(2, min(MOST_CHUNKS, question.model.num_layers // pp) + 1)
            wanted = question.fixed.get("vpp")
            if isinstance(wanted, int) and wanted > MOST_CHUNKS and wanted * pp <= question.model.num_layers:
                chunks = [wanted]
            yield from ((vpp, name) for vpp in _allowed(question, "vpp", chunks))


def _tp_degrees(question: Question) -> list[int]:
    layers = question.model.layer_counts()
    limit = question.devices if "tp" in question.fixed else question.cluster.fabric.link_domain

    def divides(tp: int) -> bool:
        for layer in layers:
            attention = layer.attention
            if attention.num_heads % tp or layer.mlp.d_ff % tp:
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
    if question.fixed:
        fixed = ", ".join(
            f"{'layout' if name in LAYOUT_COLUMNS else 'recipe'}.{name}={value}"
            for name, value in question.fixed.items()
        )
        reject(
            "--set", fixed, f"no legal layout of {question.devices} devices has it; free a field or change --gpus"
        )
    reject(
        "recipe.global_batch",
        question.recipe.global_batch,
        f"no layout of {question.devices} devices splits it: dp = devices / (tp*cp*pp) must divide it, with "
        f"tp up to {question.cluster.fabric.link_domain} and pp up to {question.model.num_layers}",
    )
