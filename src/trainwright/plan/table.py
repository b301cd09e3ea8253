"""The table of candidates: one row per layout and recipe, one NumPy array per field, shape (candidates,).

Everything that the planner computes is an array expression over these columns. Predicting one run is the
table of length one; a search is the same code over a long one. Choices that all rows share (model, cluster,
the rest of the recipe) stand beside the columns. Names are kept as places in a tuple: the schedule's in SCHEDULE,
the axes' order in ORDER, what is recomputed in the table's own `policies`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.layout import ORDERS, Axis, Layout, aligned
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import RECOMPUTE_OPS, Recipe, Recompute, RecomputeOp, ScheduleName
from trainwright.spec.run import Run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = NDArray[np.intp] | NDArray[np.bool_] | slice

SCHEDULE: tuple[ScheduleName, ...] = get_args(ScheduleName)
ORDER = tuple(ORDERS)

DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
"""Columns that are numbers of the layout."""

FULL = 1 << len(RECOMPUTE_OPS)
"""The mark of full recompute beside those of single operations."""


def marks(*ops: RecomputeOp) -> int:
    """A set of recomputed operations as bits."""
    return sum(1 << RECOMPUTE_OPS.index(op) for op in set(ops))


def combined(*columns: Ints) -> Ints:
    """One number for each row, equal where all columns are equal."""
    if len(columns[0]) == 1:
        return np.zeros(1, dtype=np.int64)
    largest = [int(column.max(initial=0)) + 1 for column in columns]
    if prod(largest) >= 1 << 62:
        columns = tuple(np.unique(column, return_inverse=True)[1].ravel() for column in columns)
        largest = [int(column.max(initial=0)) + 1 for column in columns]
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column, count in zip(columns, largest, strict=True):
        key = key * count + column
    return key


def grouped(key: Ints) -> tuple[Ints, Ints]:
    """The rows in an order in which those of equal keys stand together, and where each of these groups begins."""
    order = key.argsort(kind="stable")
    ordered = key[order]
    return order, np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])


def distinct(key: Ints) -> tuple[Ints, Ints]:
    """Rows with different keys, the first of each, and for every row which of them its own is."""
    order, begins = grouped(key)
    which = np.zeros(len(key), dtype=np.int64)
    which[begins[1:]] = 1
    of_row = np.empty_like(which)
    of_row[order] = which.cumsum()
    return order[begins], of_row


class Policy(NamedTuple):
    """What is recomputed, as a recipe says it."""

    recompute: Recompute = "none"
    ops: tuple[RecomputeOp, ...] = ("attention",)
    layers: int | None = None
    """Of each stage, with full recompute; None: all."""

    @staticmethod
    def of_recipe(recipe: Recipe) -> "Policy":
        return Policy(recipe.recompute, recipe.recompute_ops, recipe.recompute_layers)

    @property
    def marks(self) -> int:
        """The operations of a recomputed layer that run again, as bits."""
        assert self.recompute != "budget", "`recompute_budget.resolved` says what that is"
        return {"none": 0, "selective": marks(*self.ops), "full": FULL}[self.recompute]


@dataclass(frozen=True)
class Columns:
    """The choices of each candidate."""

    tp: Ints
    cp: Ints
    pp: Ints
    vpp: Ints
    ep: Ints
    etp: Ints
    dp: Ints
    order: Ints
    micro_batch: Ints
    zero: Ints
    replicas: Ints
    """`Recipe.dp_replicate`."""
    reshard: Ints
    """1 for `Recipe.reshard_after_forward`."""
    policy: Ints
    schedule: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Rows) -> "Columns":
        return Columns(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Table:
    """Candidates with what they share."""

    model: ModelSpec
    cluster: ClusterSpec
    recipe: Recipe
    """Fields that are columns are read from the columns; the rest holds for every row."""
    columns: Columns
    policies: tuple[Policy, ...]
    stage_layers: tuple[int, ...] = ()
    """`Layout.stage_layers` of every row."""

    @staticmethod
    def of_run(run: Run) -> "Table":
        """The table of length one."""
        layout, recipe = run.layout, run.recipe
        choices = {name: getattr(layout, name) for name in DEGREES} | {
            "order": ORDER.index(layout.order),
            "micro_batch": recipe.micro_batch,
            "zero": recipe.zero,
            "replicas": recipe.dp_replicate,
            "reshard": recipe.reshard_after_forward,
            "policy": 0,
            "schedule": SCHEDULE.index(recipe.schedule),
        }
        columns = Columns(**{name: np.array([value], dtype=np.int64) for name, value in choices.items()})
        return Table(run.model, run.cluster, recipe, columns, (Policy.of_recipe(recipe),), layout.stage_layers)

    def take(self, rows: Rows) -> "Table":
        """Some rows as a table; this one where it has no other, with what is known of it."""
        columns = self.columns.take(rows)
        return self if len(columns) == len(self.columns) == 1 else replace(self, columns=columns)

    def layout(self, row: int) -> Layout:
        degrees = {name: int(getattr(self.columns, name)[row]) for name in DEGREES}
        return Layout(**degrees, order=ORDER[self.columns.order[row]], stage_layers=self.stage_layers)

    def recipe_of(self, row: int) -> Recipe:
        columns = self.columns
        policy = self.policies[columns.policy[row]]
        return self.recipe.changed(
            micro_batch=int(columns.micro_batch[row]),
            zero=int(columns.zero[row]),
            dp_replicate=int(columns.replicas[row]),
            reshard_after_forward=bool(columns.reshard[row]),
            recompute=policy.recompute,
            recompute_ops=policy.ops,
            recompute_layers=policy.layers,
            schedule=SCHEDULE[columns.schedule[row]],
        )

    @cached_property
    def world(self) -> Ints:
        c = self.columns
        return c.tp * c.cp * c.pp * c.dp

    @cached_property
    def at_work(self) -> Ints:
        """Ranks of each node."""
        return np.minimum(self.world, self.cluster.node.devices)

    @cached_property
    def num_microbatches(self) -> Ints:
        return self.recipe.global_batch // (self.columns.micro_batch * self.columns.dp)

    @cached_property
    def placements(self) -> tuple[Ints, Ints]:
        """Rows whose groups of ranks stand differently, the first of each, and for every row which of them its
        own is."""
        c = self.columns
        return distinct(combined(c.tp, c.cp, c.pp, c.dp, c.ep, c.etp, c.order, c.replicas))

    @cached_property
    def strides(self) -> dict[Axis, Ints]:
        """Distance between neighbours on each axis (`Layout.stride`)."""
        c = self.columns
        inner = c.tp * c.cp
        pp_outside = np.array([ORDERS[name][-1] == "pp" for name in ORDER])[c.order]
        return {
            "tp": np.ones(len(c), dtype=np.int64),
            "cp": c.tp,
            "pp": inner * np.where(pp_outside, c.dp, 1),
            "dp": inner * np.where(pp_outside, 1, c.pp),
        }

    @cached_property
    def per_domain(self) -> Ints:
        """Devices of every scale-up domain that hold ranks, so that all groups of an axis lie alike
        (`Layout.per_domain`)."""
        c, link_domain = self.columns, self.cluster.fabric.link_domain
        inner, experts, apart = c.tp * c.cp, c.etp * c.ep, self.strides["dp"]
        shared = np.where(experts <= inner, experts, np.maximum(experts // inner, 1) * apart)
        shards = apart * (c.dp // c.replicas)
        spans = (c.tp, inner, self.strides["pp"], apart, c.etp, shared, shards, self.world)
        most, fits = np.minimum(link_domain, self.world), np.ones(len(c), dtype=np.bool_)
        for span in spans:
            fits &= (most % span == 0) | (span % most == 0)
        if not fits.all():
            odd, place = np.unique([span[~fits] for span in spans], axis=1, return_inverse=True)
            found = np.array([aligned(link_domain, tuple(each.tolist())) for each in odd.T])
            most[~fits] = found[place.ravel()]
        return most

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of one microbatch on one rank inside attention and MLP."""
        return self.columns.micro_batch * (self.recipe.seq_len / self.columns.cp)

    @cached_property
    def residual_tokens(self) -> Floats:
        """The same between them, where sequence parallelism cuts norms and residuals over tp."""
        return self.tokens / self.columns.tp if self.recipe.sequence_parallel else self.tokens

    @cached_property
    def shards(self) -> Ints:
        """Ranks that a sharded tensor is cut over: dp and cp, less the replicas of HSDP."""
        return self.columns.dp * self.columns.cp // self.columns.replicas

    @cached_property
    def expert_replicas(self) -> Ints:
        """Ranks that hold the same experts."""
        c = self.columns
        return np.maximum(c.tp * c.cp * c.dp // (c.ep * c.etp), 1)

    @cached_property
    def expert_shards(self) -> Ints:
        """Ranks that a sharded tensor of the experts is cut over."""
        return np.maximum(self.expert_replicas // self.columns.replicas, 1)
