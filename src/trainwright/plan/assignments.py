"""Many assignments of layers to the stages of one plan, as arrays: what each takes at least, without playing it.

An assignment is a row of layers per stage. What stands on a stage is a difference of running counts over the
layers, so thousands of assignments are a few array expressions. Seconds of a piece are those of `figures`.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from trainwright.plan.assembly import assembly
from trainwright.plan.bounds import bounds
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.figures import Figures
from trainwright.plan.pipeline import Pipe
from trainwright.plan.table import Floats, Ints, Table


def one_row(table: Table, row: int, stage_layers: tuple[int, ...] = ()) -> Table:
    """A row of a table as a table of its own, with its layers assigned otherwise where asked."""
    alone = table.take(np.array([row]))
    policy = table.policies[alone.columns.policy[0]]
    columns = replace(alone.columns, policy=np.zeros(1, dtype=np.int64))
    return replace(alone, columns=columns, policies=(policy,), stage_layers=stage_layers)


class Assignments:
    """The assignments that one plan may have. `sizes` are always (assignments, stages)."""

    def __init__(self, evaluation: Evaluation) -> None:
        """`evaluation` is of a table of one row."""
        self.evaluation = evaluation
        self.shape = evaluation.shape(0)
        self.pipe: Pipe = evaluation.pipe(0)
        self._made = assembly(self.shape)
        self._figures: Figures = evaluation.parts.figures()
        kinds = np.eye(self.shape.num_kinds)[list(self.shape.kinds)]
        self._before = np.concatenate([np.zeros((1, self.shape.num_kinds)), np.cumsum(kinds, axis=0)])
        """Layers of each kind before each layer, (layers + 1, kinds)."""
        self._evaluated: dict[tuple[int, ...], Evaluation] = {}

    @property
    def num_layers(self) -> int:
        return len(self.shape.kinds)

    @property
    def even(self) -> Ints:
        """The layers of each stage of the plan as it is, (stages,)."""
        return self._made.stages[:, : 2 * self.shape.num_kinds].sum(axis=1).round().astype(np.int64)

    def pieces(self, sizes: Ints) -> Floats:
        """What stands on the stages, (assignments, stages, pieces), as in `assembly`."""
        ends = np.cumsum(sizes, axis=1)
        return self._pieces(ends - sizes, ends, self._made.stages[:, 2 * self.shape.num_kinds :])

    def _pieces(self, starts: Ints, ends: Ints, around: Floats) -> Floats:
        again = self.shape.recompute_layers
        middle = ends if again is None else np.minimum(starts + again, ends)
        recomputed = self._before[middle] - self._before[starts]
        plain = self._before[ends] - self._before[middle]
        others = np.broadcast_to(around, (*starts.shape, around.shape[-1]))
        return np.concatenate([plain, recomputed, others], axis=-1)

    def ranges_s(self) -> tuple[Floats, Floats]:
        """Seconds of a microbatch, forward and backward, of the layers from each to each other, (layers + 1,
        layers + 1); and of what else stands on each stage, (stages,)."""
        starts, ends = np.indices((self.num_layers + 1, self.num_layers + 1))
        kinds = 2 * self.shape.num_kinds
        none = np.zeros(self._made.stages.shape[1] - kinds)
        layers = self._pieces(starts, np.maximum(starts, ends), none) @ self._work_s
        return layers, self._made.stages[:, kinds:] @ self._work_s[kinds:]

    @cached_property
    def _work_s(self) -> Floats:
        figures = self._figures
        return (figures.forward_s + figures.input_s + figures.weight_s).ravel()

    def stages_s(self, sizes: Ints) -> Floats:
        """Seconds of a microbatch on the ranks that hold the stages of one assignment, (stages,)."""
        ranks_s, stages_s = self.ranks_s(self.pieces(sizes[None]))[0], np.zeros(len(sizes))
        np.maximum.at(stages_s, self._made.stage_of, ranks_s[:, None])
        return stages_s

    def ranks_s(self, pieces: Floats) -> Floats:
        """Seconds of a microbatch, forward and backward, on each rank, (assignments, ranks)."""
        return (pieces @ self._work_s)[:, self._made.stage_of].sum(axis=2)

    def least_s(self, pieces: Floats) -> Floats:
        """A lower bound of the makespan, (assignments,)."""
        figures, pipe = self._figures, self.pipe
        overhead = self.evaluation.table.cluster.rates.microbatch_overhead_s
        return bounds(
            pipe.schedule,
            pipe.pp,
            pipe.vpp,
            pipe.num_microbatches,
            pieces @ figures.forward_s.ravel() + overhead,
            pieces @ figures.input_s.ravel() + overhead,
            pieces @ figures.weight_s.ravel(),
            np.full(len(pieces), pipe.send_s),
            forward_ep_s=pieces @ figures.forward_ep_s.ravel(),
            backward_ep_s=pieces @ figures.backward_ep_s.ravel(),
            pair_hides=pipe.pair_hides,
        )

    def around_s(self, pieces: Floats) -> Floats:
        """About the seconds of dp and the optimizer, (assignments,): those of the plan as it is, in proportion to
        the parameters of the fullest rank."""
        around = self.evaluation.around(0, 0.0, 0.0)
        params = (self._figures.params + self._figures.expert_params).ravel()
        fullest = (pieces @ params)[:, self._made.stage_of].sum(axis=2).max(axis=1)
        return (around["dp"] + around["optimizer"]) * fullest / (self._made.ranks @ params).max()

    def evaluated(self, sizes: Ints) -> Evaluation:
        """The plan with one assignment, (stages,), judged; a table of one row."""
        key = tuple(sizes.tolist())
        if key not in self._evaluated:
            self._evaluated[key] = Evaluation(one_row(self.evaluation.table, 0, key))
        return self._evaluated[key]

    def pipe_of(self, sizes: Ints) -> Pipe:
        """The plan's pipeline with one assignment, (stages,)."""
        figures, pieces = self._figures, self.pieces(sizes[None])[0]
        overhead = self.evaluation.table.cluster.rates.microbatch_overhead_s
        return replace(
            self.pipe,
            forward_s=(pieces @ figures.forward_s.ravel() + overhead).tolist(),
            input_s=(pieces @ figures.input_s.ravel() + overhead).tolist(),
            weight_s=(pieces @ figures.weight_s.ravel()).tolist(),
            forward_ep_s=(pieces @ figures.forward_ep_s.ravel()).tolist(),
            backward_ep_s=(pieces @ figures.backward_ep_s.ravel()).tolist(),
        )
