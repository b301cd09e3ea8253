"""A table's candidates judged: which fit, and which are fastest. The one code path of `predict` and `search`.

Memory and a lower bound of the step are known for all of them at once; a schedule is played only where somebody
asks for the step (`plan/race.py` asks where the bound leaves a candidate in the race). A step is the pipeline's
makespan plus what stands around it: exposed dp communication, the optimizer, waiting for cores, for the slowest
rank and for the host, and what the software takes beyond its operations.

Candidates are taken in groups of one shape (`assembly.Shape`), whose stages are cut alike, so that all is arrays
over (candidates, counts).
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import geometry, pipeline
from trainwright.plan.agreement import history_seconds
from trainwright.plan.assembly import (
    Moments,
    Shape,
    assembly,
    bounds,
    largest_moments,
    moments,
    rank_types,
    shape_of,
)
from trainwright.plan.collectives import line
from trainwright.plan.cores import Cores, shared_makespan
from trainwright.plan.figures import PAIRED, Parts, insides
from trainwright.plan.holding import ENOUGH_ROUNDS
from trainwright.plan.memory import moment_bytes
from trainwright.plan.pipeline import Pipe
from trainwright.plan.sharding import Ranks, Sharing, dp_seconds, optimizer_seconds, weight_cast_seconds
from trainwright.plan.table import SCHEDULE, Floats, Ints, Table, combined, grouped
from trainwright.plan.transients import Held
from trainwright.spec.ledger import BytesCause, SecondsCause
from trainwright.spec.schedule import SCHEDULES


class Evaluation:
    """Judgement of a table. Arrays have one entry per row of the table."""

    def __init__(self, table: Table) -> None:
        rows = len(table.columns)
        self.table = table
        firsts, self._inside = insides(table)
        self.parts = Parts.of(table.take(firsts))
        """Of every different inside, as `figures` has them."""
        self._figures = self.parts.figures()
        self._at = table.columns.policy * len(firsts) + self._inside
        """Where a row's figures stand among those of all policies."""
        firsts, self._placement = table.placements
        placed = table.take(firsts)
        self._dense = Sharing.of(placed)
        """Of every different placement."""
        self._experts = Sharing.of_experts(placed) if table.model.is_moe else None
        self.peak_bytes: Floats = np.zeros(rows)
        self.bound_s: Floats = np.full(rows, np.inf)
        self._dp_s: Floats = np.zeros(rows)
        self._optimizer_s: Floats = np.zeros(rows)
        self._cast_s: Floats = np.zeros(rows)
        self._send_s = self._sends(placed)
        self._judge_all()
        self.fits: NDArray[np.bool_] = self.peak_bytes <= table.cluster.device.memory_bytes
        self._step_s: dict[int, float] = {}
        self._makespans_s: dict[tuple[int | float, ...], float] = {}

    def inside_of(self, row: int) -> int:
        """Which of the insides a row has."""
        return int(self._inside[row])

    def shape(self, row: int) -> Shape:
        """The shape of a row."""
        c = self.table.columns
        layers = self.table.policies[c.policy[row]].layers
        return shape_of(self.table, SCHEDULE[c.schedule[row]], int(c.pp[row]), int(c.vpp[row]), layers)

    def rank_bytes(self, row: int) -> list[dict[BytesCause, float]]:
        """Bytes by cause of each pipeline rank at its peak."""
        every = moments(self.shape(row), self._enough(row))
        held = self._held(self._at[row : row + 1], np.zeros(1, dtype=np.int64))
        table = self.table.take(np.array([row]))
        by_cause: dict[BytesCause, Floats] = {
            cause: value[:, 0] for cause, value in moment_bytes(table, self.shape(row), every, held).items()
        }
        # Of each rank the first moment with most bytes.
        order = np.lexsort((-sum(by_cause.values(), np.zeros(1)), every.rank))
        peaks = order[np.flatnonzero(np.diff(every.rank[order], prepend=-1))]
        ranks = zip(*(value[peaks].tolist() for value in by_cause.values()), strict=True)
        return [dict(zip(by_cause, values, strict=True)) for values in ranks]

    def rank_params(self, row: int) -> tuple[float, float]:
        """Parameters of the row's fullest rank, and those of them that low-precision matmuls read."""
        figures, inside, counts = self._figures, self._inside[row], assembly(self.shape(row)).ranks
        every = counts @ (figures.params + figures.expert_params)[:, inside]
        low = counts @ (figures.low_params + figures.low_expert_params)[:, inside]
        return float(every.max()), float(low[int(every.argmax())])

    def pipe(self, row: int, *, sends: bool = True, pairs: bool = True) -> Pipe:
        """The row's pipeline, as it is played: without sends, or without what paired acts hide, where asked."""
        figures, at = self._figures, self._at[row]
        c, stages = self.table.columns, assembly(self.shape(row)).stages
        overhead = self.table.cluster.rates.microbatch_overhead_s

        def of_stages(values: Floats, more: float = 0.0) -> list[float]:
            return (stages @ values[:, at] + more).tolist()

        return Pipe(
            schedule=SCHEDULE[c.schedule[row]],
            pp=int(c.pp[row]),
            vpp=int(c.vpp[row]),
            num_microbatches=int(self.table.num_microbatches[row]),
            forward_s=of_stages(figures.forward_s, overhead),
            input_s=of_stages(figures.input_s, overhead),
            weight_s=of_stages(figures.weight_s),
            send_s=float(self._send_s[row]) if sends else 0.0,
            blocking_sends=not self.table.recipe.overlap.pp,
            forward_ep_s=of_stages(figures.forward_ep_s),
            backward_ep_s=of_stages(figures.backward_ep_s),
            pair_hides=self.table.cluster.rates.overlap.ep if pairs else 0.0,
        )

    def step_s(self, row: int) -> float:
        """Seconds of the row's step, its schedule played."""
        if row not in self._step_s:
            makespan_s = self._makespan_s(row)
            around = self.around(row, makespan_s, self.sharing_s(row, makespan_s))
            self._step_s[row] = makespan_s + sum(around.values())
        return self._step_s[row]

    def _makespan_s(self, row: int) -> float:
        """Of the row's pipeline: played once for all rows that differ in what stands around it alone."""
        c = self.table.columns
        shape = (c.schedule[row], c.pp[row], c.vpp[row], self.table.num_microbatches[row])
        key = (*map(int, shape), int(self._at[row]), float(self._send_s[row]))
        if key not in self._makespans_s:
            self._makespans_s[key] = pipeline.makespan(self.pipe(row))
        return self._makespans_s[key]

    def around(self, row: int, makespan_s: float, sharing_s: float) -> dict[SecondsCause, float]:
        """Seconds of the row's step beside the pipeline's makespan, of which `sharing_s` is waiting for cores."""
        at = np.array([row])
        arrays = self._around(at, np.array([makespan_s]), np.array([sharing_s]))
        return {cause: float(value[0]) for cause, value in arrays.items()}

    def sharing_s(self, row: int, makespan_s: float) -> float:
        """What waiting for cores adds to the row's makespan, its schedule played."""
        at = np.array([row])
        if self._ranks_per_core(at)[0] <= 1:
            return 0.0
        work, waiting = (float(each[0]) for each in self._work(at))
        node, c = self.table.cluster.node, self.table.columns
        cores = Cores(
            per_stage=min(float(self.table.world[row]), node.devices) / float(c.pp[row]),
            cores=node.concurrent_devices,
            compute_share=work / (work + waiting),
        )
        return max(shared_makespan(self.pipe(row), cores) - makespan_s, 0.0)

    def _enough(self, row: int) -> int:
        """Microbatches that a row's moments are read off: all, or as many as fill every pipe."""
        count, pp = int(self.table.num_microbatches[row]), int(self.table.columns.pp[row])
        all_count = SCHEDULES[SCHEDULE[self.table.columns.schedule[row]]].forwards_first
        return count if all_count else min(count, ENOUGH_ROUNDS * pp)

    def _judge_all(self) -> None:
        """Judge the rows in groups of one shape and number of microbatches to hold."""
        c, count = self.table.columns, self.table.num_microbatches
        all_count = np.array([SCHEDULES[name].forwards_first for name in SCHEDULE])[c.schedule]
        enough = np.where(all_count, count, np.minimum(count, ENOUGH_ROUNDS * c.pp))
        layers = np.array([-1 if policy.layers is None else policy.layers for policy in self.table.policies])[
            c.policy
        ]
        order, begins = grouped(combined(c.schedule, c.pp, c.vpp, layers + 1, enough))
        ordered = self.table.take(order)
        for begin, end in pairwise([*begins.tolist(), len(order)]):
            rows = order[begin:end]
            self._judge(self.shape(rows[0]), int(enough[rows[0]]), rows, ordered.take(slice(begin, end)))

    def _sends(self, placed: Table) -> Floats:
        table = self.table
        message = table.residual_tokens * table.model.d_model * table.recipe.compute_bytes
        ways = line(
            table.cluster, "send", geometry.degree(placed, "pp"), geometry.members(placed, "pp"), placed.at_work
        )
        return ways.take(self._placement).at(message)

    def _held(self, at: Ints, of_row: Ints) -> Held:
        """What figures at `at` say of bytes."""
        figures, inside = self._figures, at % len(self.parts.table.columns)
        return Held(
            kept_bytes=figures.kept_bytes[:, at],
            logits_bytes=figures.logits_bytes[:, inside],
            weight_bytes=figures.weight_bytes[:, inside],
            working_bytes=figures.working_bytes[:, at],
            experts_left_bytes=figures.experts_left_bytes[:, at],
            params=figures.params[:, inside],
            expert_params=figures.expert_params[:, inside],
            low_params=figures.low_params[:, inside],
            low_expert_params=figures.low_expert_params[:, inside],
            inside=of_row,
        )

    def _judge(self, shape: Shape, microbatches: int, places: Ints, table: Table) -> None:
        """Memory, what stands around the pipeline, and the bound of the rows of one shape, which are `table`."""
        figures = self._figures
        at, of_row = _among(self._at[places], figures.forward_s.shape[1])
        held = self._held(at, of_row)
        largest: Moments = largest_moments(shape, microbatches)
        self.peak_bytes[places] = sum(moment_bytes(table, shape, largest, held).values(), np.zeros(1)).max(axis=0)
        forward_s, input_s = figures.forward_s[:, at], figures.input_s[:, at]
        backward_s = input_s + figures.weight_s[:, at]
        counts, layers, placement = rank_types(shape), 2 * shape.num_kinds, self._placement[places]
        experts = self._experts and self._experts.take(placement)

        def of_kinds(values: Floats) -> Floats:
            # Of all rows, and not of insides: how such sums round depends on how many columns there are.
            rows = values.T.take(of_row, axis=0).T
            return np.array([each @ rows for each in counts])

        ranks = Ranks(
            params=held.of_rows(counts @ held.params),
            expert_params=held.of_rows(counts @ held.expert_params) if experts else np.zeros((1, 1)),
            low_params=held.of_rows(counts @ held.low_params),
            low_expert_params=held.of_rows(counts @ held.low_expert_params) if experts else np.zeros((1, 1)),
            around_params=held.of_rows(counts[:, layers:] @ held.params[layers:]),
            forward_s=of_kinds(forward_s),
            backward_s=of_kinds(backward_s),
        )
        dp_s = dp_seconds(table, ranks, self._dense.take(placement), experts)
        self._dp_s[places] = np.maximum(dp_s.max(axis=0), 0.0)
        self._optimizer_s[places] = optimizer_seconds(table, ranks).max(axis=0)
        agreed_s = history_seconds(table, float((counts @ self.parts.low_matmuls()).max()))
        self._cast_s[places] = weight_cast_seconds(table, ranks).max(axis=0) + agreed_s
        work_s = forward_s + backward_s
        if shape.schedule in PAIRED:
            hides = table.cluster.rates.overlap.ep
            work_s = work_s - hides * (figures.forward_ep_s[:, at] + figures.backward_ep_s[:, at])
        bound_s = self._bound(shape, table, held, forward_s, input_s, work_s, self._send_s[places])
        around = self._around(places, bound_s, self._least_sharing(places, bound_s))
        self.bound_s[places] = sum(around.values(), bound_s)

    def _bound(
        self,
        shape: Shape,
        table: Table,
        held: Held,
        forward_s: Floats,
        input_s: Floats,
        work_s: Floats,
        send_s: Floats,
    ) -> Floats:
        counts, overhead = bounds(shape), table.cluster.rates.microbatch_overhead_s
        work = table.num_microbatches * held.of_rows(counts.work @ work_s + overhead * counts.acts[:, None])
        ways = held.of_rows(counts.forward_before @ forward_s + counts.backward_after @ input_s)
        return (work + (ways + counts.sends[:, None] * send_s)).max(axis=0)

    def _around(self, places: NDArray[np.intp], makespan: Floats, sharing: Floats) -> dict[SecondsCause, Floats]:
        table, rates = self.table, self.table.cluster.rates
        dp = self._dp_s[places]
        turns = np.maximum(self._ranks_per_core(places), 1.0)
        optimizer, casts = self._optimizer_s[places] * turns, self._cast_s[places] * turns
        doublings = np.log2(np.maximum(table.world[places] / table.cluster.node.devices, 1.0))
        step = makespan + dp + optimizer + casts + sharing
        straggling = step * rates.straggling_per_doubling * doublings
        quantize: dict[SecondsCause, Floats] = {"quantize": casts} if table.recipe.is_low_precision else {}
        return {
            "dp": dp,
            **quantize,
            "optimizer": optimizer,
            "core_sharing": sharing,
            "straggling": straggling,
            "software": (step + straggling) * (rates.time_factor - 1),
            "host": np.full(len(makespan), rates.step_overhead_s),
        }

    def _ranks_per_core(self, places: Ints | NDArray[np.intp]) -> Floats:
        node = self.table.cluster.node
        return np.minimum(self.table.world[places], node.devices) / node.concurrent_devices

    def _work(self, places: NDArray[np.intp]) -> tuple[Floats, Floats]:
        """Seconds of a step that want a core, and that wait in collectives, averaged over pipeline ranks."""
        figures, total = self._figures, np.zeros((len(places), 2))
        seconds = figures.forward_s + figures.input_s + figures.weight_s
        for place, row in enumerate(places.tolist()):
            counts, at = assembly(self.shape(row)).stages.sum(axis=0), self._at[row]
            whole, work = counts @ seconds[:, at], counts @ figures.work_s[:, at]
            pp, count = self.table.columns.pp[row], self.table.num_microbatches[row]
            acts = 2 * self.table.columns.vpp[row] * self.table.cluster.rates.microbatch_overhead_s
            total[place] = (work / pp + acts) * count, (whole - work) / pp * count
        return total[:, 0], total[:, 1]

    def _least_sharing(self, places: NDArray[np.intp], makespan: Floats) -> Floats:
        """A lower bound of what waiting for cores adds to a makespan: all work of the node on all of its cores."""
        shared = self._ranks_per_core(places)
        if not np.any(shared > 1):
            return np.zeros(len(places))
        work, waiting = self._work(places)
        return np.where(shared > 1, np.maximum(work * shared + waiting - makespan, 0.0), 0.0)


def _among(values: Ints, count: int) -> tuple[Ints, Ints]:
    """The different ones of values below `count`, rising, and of each value its place among them."""
    occurs = np.zeros(count, dtype=np.int64)
    occurs[values] = 1
    return np.flatnonzero(occurs), (occurs.cumsum() - 1)[values]
