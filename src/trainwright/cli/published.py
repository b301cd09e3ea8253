"""Published runs as the planner sees them: each with its cluster from the catalogue, and what is predicted of it
under any values of the free constants."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.cli import catalogue, files
from trainwright.cli.planner import predicted
from trainwright.measure.published import read_table
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.table import Table
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.published import PublishedRun, RefusedRow
from trainwright.spec.run import DataSpec, Run
from trainwright.spec.validation import Judged

Floats = NDArray[np.float64]
TABLE = "published_runs.csv"
"""Of the catalogue."""


def read_runs(path: Path | None) -> tuple[list[PublishedRun], list[RefusedRow]]:
    """The runs of a table, by default the catalogue's, and the rows that are none. Raises `InvalidSpec`."""
    text = (catalogue.DATA / TABLE).read_text("utf-8") if path is None else files.read_text(path)
    runs, refused = read_table(text, TABLE if path is None else str(path))
    return completed(runs), refused


MORE_RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "selective", "recompute_ops": ("norm", "activation")},
    *({"recompute": "full", "recompute_layers": layers} for layers in (1, 2, 4, 8)),
    {"recompute": "full"},
)
"""From little to all."""


def completed(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs; of one that would not fit as it is described, what its source leaves open is chosen as it must
    have been: it ran. That is the least recompute where none is stated, and sharded parameters where whole ones
    don't fit."""
    predictor = Predictor(runs)
    return [_completed(published, predictor.run(row)) for row, published in enumerate(runs)]


def _completed(published: PublishedRun, run: Run) -> PublishedRun:
    if _fits(run):
        return published
    recomputes = () if published.recompute_known else MORE_RECOMPUTE
    sharded = {"zero": 3} if run.recipe.zero == 1 and run.layout.dp > 1 else {}
    for choices in (*recomputes, *([sharded] if sharded else []), *(sharded | more for more in recomputes)):
        recipe = published.recipe.changed(**choices)
        if _fits(run.changed(recipe=recipe)):
            said = ", ".join(f"{field}={value}" for field, value in choices.items())
            return published.changed(
                recipe=recipe, assumed=(*published.assumed, f"{said}, or it would not have fit")
            )
    return published


def _fits(run: Run) -> bool:
    """Whether the planner judges that it fits; what it refuses is refused later."""
    try:
        return bool(Evaluation(Table.of_run(run.check())).fits[0])
    except InvalidSpec:
        return True


class Judgements(NamedTuple):
    """Rows that the planner predicts, and rows that it refuses."""

    judged: list[Judged]
    refused: list[RefusedRow]


class Predictor:
    """Predicts published runs. Clusters are put together once for each set of values."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.runs = list(runs)
        self._values: dict[str, float] = {}
        self._clusters: dict[Any, ClusterSpec] = {}

    def run(self, row: int, values: Mapping[str, float] | None = None) -> Run:
        """A published run as the planner's `Run`."""
        published = self.runs[row]
        return Run(
            name=published.id,
            layout=published.layout,
            recipe=published.recipe,
            model=published.model,
            data=DataSpec(vocab_size=min(published.model.vocab_size, DataSpec().vocab_size)),
            cluster=self._cluster(published, values or {}),
        )

    def seconds(self, values: Mapping[str, float], rows: Sequence[int]) -> Floats:
        """Predicted step times of some rows, for values of the free constants by name."""
        return np.array([self._seconds(row, values) for row in rows])

    def touched(self) -> dict[str, list[int]]:
        """For each free constant the rows whose clusters have it."""
        parts = [set(catalogue.parts_of(each.cluster, each.software)) for each in self.runs]
        return {
            constant.name: [row for row, has in enumerate(parts) if has & set(constant.parts)]
            for constant in catalogue.constants()
        }

    def _seconds(self, row: int, values: Mapping[str, float]) -> float:
        with np.errstate(all="ignore"):
            evaluation = Evaluation(Table.of_run(self.run(row, values)))
            return evaluation.step_s(0) * self.runs[row].repeats

    def _cluster(self, published: PublishedRun, values: Mapping[str, float]) -> ClusterSpec:
        if values != self._values:
            self._values, self._clusters = dict(values), {}
        key = (published.cluster, published.software, tuple(sorted(published.overrides.items())))
        if key not in self._clusters:
            self._clusters[key] = catalogue.compose_cluster(
                published.cluster, published.software, values, published.overrides
            )
        return self._clusters[key]


def judge(runs: Sequence[PublishedRun]) -> Judgements:
    """What the planner predicts of each run with the catalogue's constants; why it refuses a run."""
    predictor = Predictor(runs)
    judged: list[Judged] = []
    refused: list[RefusedRow] = []
    for row, published in enumerate(runs):
        try:
            run = predictor.run(row)
            prediction = predicted(run)
        except InvalidSpec as error:
            refused.append(RefusedRow(id=published.id, line=published.line, reason=str(error)))
            continue
        judged.append(
            Judged(
                published=published,
                device=run.cluster.device.name,
                predicted_step_s=prediction.step_s * published.repeats,
                predicted_bytes=published.counted_bytes(prediction.ledger.bytes, run.cluster.framework_bytes),
                fits=prediction.fits,
            )
        )
    return Judgements(judged, refused)
