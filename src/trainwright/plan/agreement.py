"""Which ranks ask one another for the largest magnitude of a tensor that they share out, before they quantize it.

Recipes whose scale is the whole tensor's ask each time (fp8-current; nvfp4, whose transform gives the weight
gradient's operands values of their own, so that there are two questions); fp8-delayed asks once a step for all
layers together. Each question is an all-reduce of one number, a number for each expert of weights, over the axes
that cut the tensor: nothing for a link, and all latency. Of weights that are gathered in few bits all blocks'
largest values are agreed on once a step, and no question is left at a use.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import geometry
from trainwright.plan.collectives import Line, line
from trainwright.plan.operations import Agreement, Matmul
from trainwright.plan.table import SCHEDULE, Floats, Ints, Table, marks
from trainwright.spec.layout import Axis
from trainwright.spec.schedule import SCHEDULES

NUMBER_BYTES = 4
"""Of a largest magnitude, fp32."""

STEP_AXES: tuple[Axis, ...] = ("tp", "cp", "dp")
"""Whose ranks see other parts of what a layer reads in a step."""


class Cut(NamedTuple):
    """Axes whose ranks have parts of the tensors of a linear layer; `etp` of those that share an expert."""

    input: tuple[str, ...]
    weight: tuple[str, ...]
    gradient: tuple[str, ...]


ALONG_OUTPUT = Cut(("cp",), ("tp",), ("cp", "tp"))
ALONG_INPUT = Cut(("cp", "tp"), ("tp",), ("cp",))
OF_LATENTS = Cut(("cp",), (), ("cp", "tp"))
"""Down-projections of latent attention, whose weight every tp rank has."""
OF_EXPERTS = Cut(("cp", "tp"), ("etp",), ("cp", "tp", "etp"))
OUT_OF_EXPERTS = Cut(("cp", "tp", "etp"), ("etp",), ("cp", "tp"))


class Again(NamedTuple):
    """Where backward has a matmul's input without its being kept: rows, marks, and marks under which it hasn't."""

    rows: NDArray[np.bool_] | bool = False
    under: int = 0
    not_under: int = 0


def asks(table: Table) -> bool:
    """Whether ranks agree on largest values at each use."""
    low = table.recipe.low_precision
    return low is not None and (low.tensor_scale or (low.activation.is_per_tensor and not low.amax_history))


def agreements(
    table: Table, matmul: Matmul, cut: Cut, *, is_first: bool = True, there: Again | None = None
) -> tuple[Agreement, ...]:
    """Questions of one matmul, axis by axis. is_first: it is the first to read its input."""
    low = table.recipe.low_precision
    if low is None or not asks(table):
        return ()
    there = there or Again()
    split = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE])[table.columns.schedule]
    found = []
    for name in ("tp", "cp", "etp"):
        if name not in {*cut.input, *cut.weight, *cut.gradient} or not np.any(getattr(table.columns, name) > 1):
            continue
        over_experts = name == "etp"
        found.append(
            Agreement(
                matmul,
                "cp" if name == "cp" else "tp",
                over_experts,
                input=_asked(table, name, cut.input) * is_first,
                gradient=_asked(table, name, cut.gradient),
                weight=_asked(table, name, cut.weight) * ~gathers_codes(table),
                ways=1 + bool(low.hadamard),
                is_there=np.broadcast_to(np.asarray(there.rows, dtype=np.bool_), (len(table.columns),)),
                there_under=there.under,
                not_under=there.not_under,
                # Experts' weight gradients are never put off.
                in_two_acts=split & (matmul.groups is None),
                without_graph=marks("latent_up") & matmul.again,
            )
        )
    return tuple(found)


def _asked(table: Table, name: str, names: tuple[str, ...]) -> Ints:
    """1 where an axis is among `names` and its ranks aren't all among another's; ranks of one expert stand side by
    side in the plane of tp, cp and dp, tp innermost."""
    c = table.columns
    if name not in names:
        return np.zeros_like(c.tp)
    is_inside = np.zeros(len(c), dtype=np.bool_)
    if name == "etp":
        is_inside |= ("tp" in names) & (c.tp % c.etp == 0)
        is_inside |= ("cp" in names) & (c.tp == 1) & (c.cp % c.etp == 0)
    elif "etp" in names:
        plane = c.tp if name == "tp" else c.tp * c.cp
        is_inside |= (c.etp % plane == 0) & (c.etp > getattr(c, name))
    return np.where(is_inside, 0, 1)


def gathers_codes(table: Table) -> NDArray[np.bool_]:
    """Rows whose sharded weights are gathered in few bits."""
    return (table.columns.zero >= 1) & (table.shards > 1) & table.recipe.gather_fp8


def is_cast_by_use(table: Table, of_experts: bool) -> Ints:
    """Rows in which weights are cast at each use, as zero 3 gives back what it has gathered, 0 or 1."""
    shards = table.expert_shards if of_experts else table.shards
    return ((table.columns.zero == 3) & (shards > 1)).astype(np.int64)


def seconds_of(table: Table, each: Agreement, one_s: Floats, marks: int) -> tuple[Floats, Floats, Floats]:
    """Exposed seconds of an agreement, of which a question takes one_s: forward, backward, weight gradient's act.
    What is asked once a step is spread over its microbatches."""
    again = int(bool(each.matmul.again & marks))
    tensors, weights = each.tensors(marks, again), each.weights(again)
    by_use = is_cast_by_use(table, each.matmul.groups is not None)
    once = (1 - by_use) * each.weight / table.num_microbatches
    forward = tensors.forward + by_use * weights.forward + once
    return forward * one_s, (tensors.input + by_use * weights.input) * one_s, tensors.weight * one_s


def history_seconds(table: Table, matmuls: float) -> Floats:
    """Seconds in which all ranks agree on a step's largest values, of so many matmuls of a rank, three numbers
    each; with recipes that keep a history."""
    low = table.recipe.low_precision
    if low is None or not low.amax_history:
        return np.zeros(len(table.columns))
    message = np.full(len(table.columns), 3 * NUMBER_BYTES * matmuls)
    return sum((_line(table, axis).at(message) for axis in STEP_AXES), np.zeros(len(table.columns)))


def blocks_seconds(
    table: Table, low: Floats, low_experts: Floats, shards: Line, expert_shards: Line | None
) -> Floats:
    """Seconds in which ranks agree on the blocks' largest values of so many parameters that are gathered in few
    bits, (kinds, rows): over the ranks that share them out, and those of tp or etp, which have other parts."""
    recipe, c = table.recipe, table.columns
    if not recipe.gather_fp8:
        return np.zeros(len(c))
    a_weight = NUMBER_BYTES * recipe.blocks_per_weight
    seconds = shards.at(low * a_weight) + _line(table, "tp").at(low * a_weight)
    if expert_shards is not None:
        near = geometry.expert_members(table, np.ones_like(c.etp), c.etp)
        etp = line(table.cluster, "all_reduce", c.etp, near, table.at_work)
        seconds = seconds + expert_shards.at(low_experts * a_weight) + etp.at(low_experts * a_weight)
    return np.where(gathers_codes(table), seconds, 0.0)


def _line(table: Table, axis: Axis) -> Line:
    size, near = geometry.degree(table, axis), geometry.members(table, axis)
    return line(table.cluster, "all_reduce", size, near, table.at_work)
