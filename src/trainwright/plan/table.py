"""The table of candidates: one row per layout and recipe, one NumPy array per field, shape (candidates,).

Everything that the planner computes is an array expression over these columns. Predicting one run is the
table of length one; a search is the same code over a long one. Choices that all rows share (model, cluster,
the rest of the recipe) stand beside the columns.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.layout import Layout
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RECOMPUTE = ("none", "selective", "full")
SCHEDULE = ("1f1b", "interleaved_1f1b", "gpipe")
"""Columns hold positions in these tuples."""

LAYOUT_COLUMNS = tuple(Layout.model_fields)


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
    micro_batch: Ints
    zero: Ints
    recompute: Ints
    schedule: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> "Columns":
        return Columns(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class Table:
    """Candidates with what they share."""

    model: ModelSpec
    cluster: ClusterSpec
    recipe: Recipe
    """Fields that are columns are read from the columns; the rest holds for every row."""
    columns: Columns

    @staticmethod
    def of_run(run: Run) -> "Table":
        """The table of length one."""
        layout, recipe = run.layout, run.recipe
        choices = {name: getattr(layout, name) for name in LAYOUT_COLUMNS} | {
            "micro_batch": recipe.micro_batch,
            "zero": recipe.zero,
            "recompute": RECOMPUTE.index(recipe.recompute),
            "schedule": SCHEDULE.index(recipe.schedule),
        }
        columns = Columns(**{name: np.array([value], dtype=np.int64) for name, value in choices.items()})
        return Table(run.model, run.cluster, recipe, columns)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> "Table":
        return Table(self.model, self.cluster, self.recipe, self.columns.take(rows))

    def layout(self, row: int) -> Layout:
        return Layout(**{name: int(getattr(self.columns, name)[row]) for name in LAYOUT_COLUMNS})

    def recipe_of(self, row: int) -> Recipe:
        columns = self.columns
        return self.recipe.changed(
            micro_batch=int(columns.micro_batch[row]),
            zero=int(columns.zero[row]),
            recompute=RECOMPUTE[columns.recompute[row]],
            schedule=SCHEDULE[columns.schedule[row]],
        )

    @property
    def world(self) -> Ints:
        c = self.columns
        return c.tp * c.cp * c.pp * c.dp

    @property
    def num_microbatches(self) -> Ints:
        return self.recipe.global_batch // (self.columns.micro_batch * self.columns.dp)

    @property
    def tokens(self) -> Floats:
        """Tokens of one microbatch on one rank inside attention and MLP."""
        return self.columns.micro_batch * (self.recipe.seq_len / self.columns.cp)

    @property
    def residual_tokens(self) -> Floats:
        """The same between them, where sequence parallelism cuts norms and residuals over tp."""
        return self.tokens / self.columns.tp if self.recipe.sequence_parallel else self.tokens

    @property
    def shards(self) -> Ints:
        """Ranks that a sharded tensor is cut over: dp and cp, less the replicas of HSDP."""
        return self.columns.dp * self.columns.cp // self.recipe.dp_replicate
