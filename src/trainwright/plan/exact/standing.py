"""Which pieces stand on a rank, how often microbatches go through them, and what of them is recomputed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from trainwright.plan.operations import AttentionCore, Collective, Matmul, Piece
from trainwright.plan.pieces import embedding_piece, head_piece, layer_piece, mtp_piece
from trainwright.plan.table import Table
from trainwright.spec.layout import Coordinate
from trainwright.spec.model import LayerSpec, MoeMlp
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES, Placement, Row, Rows
from trainwright.spec.stages import layers_of_stages


@dataclass(frozen=True)
class Chunk:
    """One of a rank's chunks of the model."""

    number: int
    layers: range
    is_first: bool
    is_last: bool
    passes: int
    """Microbatches of a step that go through it."""


@dataclass(frozen=True)
class Standing:
    """A rank's place in a run."""

    run: Run
    rank: int

    @cached_property
    def table(self) -> Table:
        """As on a CPU, whose kernels the dry run calls; and with rows that are never padded: under even choices a
        capacity of 1 and more drops none."""
        table, cluster = Table.of_run(self.run), self.run.cluster
        device = cluster.device.model_copy(update={"kind": "cpu"})
        recipe = self.run.recipe.model_copy(update={"capacity_factor": None, "expert_imbalance": 1.0})
        return replace(table, recipe=recipe, cluster=cluster.model_copy(update={"device": device}))

    @property
    def most_vocabulary(self) -> int:
        """Tokens of the vocabulary on the rank that has most, which the planner takes for all."""
        return -(-self.run.model.vocab_size // self.run.layout.tp)

    @property
    def own_vocabulary(self) -> int:
        """On this one."""
        left = self.run.model.vocab_size - self.at.tp * self.most_vocabulary
        return max(0, min(left, self.most_vocabulary))

    @property
    def at(self) -> Coordinate:
        return self.run.layout.coordinate(self.rank)

    @cached_property
    def rows(self) -> Rows:
        layout = self.run.layout
        return SCHEDULES[self.run.recipe.schedule].rows(layout.pp, layout.vpp, self.run.num_microbatches)

    @property
    def row(self) -> Row:
        return self.rows[self.at.pp]

    @cached_property
    def placement(self) -> Placement:
        return SCHEDULES[self.run.recipe.schedule].stages(self.run.layout.pp, self.run.layout.vpp)

    @property
    def num_stages(self) -> int:
        return SCHEDULES[self.run.recipe.schedule].num_stages(self.run.layout.pp, self.run.layout.vpp)

    @property
    def makes_graph_anew(self) -> bool:
        """Recomputation runs a whole function again, and doesn't end at the last tensor that it saves: where
        schedules split backward (`train/parallel/recompute.py`)."""
        return SCHEDULES[self.run.recipe.schedule].splits_backward

    def before_the_last_expert(self, flops: int) -> int:
        """Of FLOPs of a rank's experts, those of all but the last one where they are multiplied one by one."""
        mlp = next(layer.mlp for layer in self.run.model.layers if isinstance(layer.mlp, MoeMlp))
        if not multiplied_in_turn(self.run, mlp):
            return 0
        experts = mlp.num_experts // self.run.layout.ep
        return flops * (experts - 1) // experts

    def times_again(self, each: Matmul | AttentionCore | Collective, marks: int) -> int:
        """How often the operations of `marks` being recomputed makes this one run again: once or not at all."""
        if isinstance(each, AttentionCore):
            return int(bool(each.again & marks))
        if self.makes_graph_anew:
            return int(bool((each.again | each.again_anew) & marks))
        return int(bool(each.again & marks & ~each.ends_under))

    def casts_again(self, each: Matmul, marks: int) -> int:
        """How often it makes a low-precision matmul cast its input again: what is kept for backward is made before
        the product, and so where recomputation ends at it too."""
        return int(bool((each.again | each.again_anew) & marks))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        layout, model = self.run.layout, self.run.model
        passes = Counter(act.chunk for act in self.row if act.kind == "F")
        stages = layers_of_stages(model.num_layers, self.num_stages, layout.stage_layers)
        return tuple(
            Chunk(number, stages[stage], stage == 0, stage == self.num_stages - 1, passes[number])
            for number, stage in enumerate(self.placement[self.at.pp])
        )

    def pieces(self) -> Iterator[tuple[Piece, int, int]]:
        """Each piece with the marks of what of it is recomputed, and its microbatches."""
        policy = self.table.policies[0]
        for chunk in self.chunks:
            if chunk.is_first:
                yield embedding_piece(self.table), 0, chunk.passes
            for place, number in enumerate(chunk.layers):
                again = policy.layers is None or place < policy.layers
                marks = policy.marks if again or policy.recompute != "full" else 0
                yield self.piece_of(self.run.model.layers[number]), marks, chunk.passes
            if chunk.is_last:
                yield head_piece(self.table), 0, chunk.passes
                for _ in range(self.run.model.mtp_depth):
                    yield mtp_piece(self.table), 0, chunk.passes

    def piece_of(self, layer: LayerSpec) -> Piece:
        if layer not in self._pieces:
            self._pieces[layer] = layer_piece(self.table, layer)
        return self._pieces[layer]

    @cached_property
    def _pieces(self) -> dict[LayerSpec, Piece]:
        return {}


def multiplied_in_turn(run: Run, mlp: MoeMlp) -> bool:
    """Whether experts are plain matmuls one after the other: where the recipe says so, or PyTorch has no grouped
    one for the format and the widths (`train/model/experts.py`). Low-precision ones are one operation together."""
    if run.recipe.is_low_precision:
        return False
    size = int(run.recipe.compute_bytes)
    aligned = all(width * size % 16 == 0 for width in (run.model.d_model, mlp.d_ff // run.layout.etp))
    return run.recipe.expert_matmuls == "sequential" or size == 8 or not aligned


def whole(value: object) -> int:
    """A figure of the planner that is a whole number, as one."""
    number = float(value.item() if hasattr(value, "item") else value)  # type: ignore[union-attr]
    assert number == int(number), f"{number} is no whole number"
    return int(number)
