"""A planner's predictions of published runs held against what was measured: errors by row, and summaries of rows.

An error is predicted / published - 1, signed. Medians, means and 90th percentiles are of its absolute value, the
bias is the median of the signed error, the coverage the share of measured step times inside the band.
"""

from typing import Any

from trainwright.spec.base import Count, NonNegative, Noun, Positive, Sequence
from trainwright.spec.published import Bands, PublishedRun, RefusedRow
from trainwright.spec.units import GIB


class Judged(Noun):
    """One published run and what was predicted of it."""

    published: PublishedRun
    device: str
    predicted_step_s: Positive
    predicted_bytes: NonNegative
    fits: bool

    @property
    def error(self) -> float:
        return self.predicted_step_s / self.published.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the peak memory; None where the source prints none."""
        seen = self.published.memory_bytes
        return None if seen is None else self.predicted_bytes / seen - 1

    def band(self, bands: Bands) -> tuple[float, float]:
        """Seconds that the measured step time is expected between."""
        low, high = bands.class_of(
            is_moe=self.published.model.is_moe,
            software=self.published.software,
            device=self.device,
            is_doubtful=self.published.is_doubtful,
        )
        return self.predicted_step_s * low, self.predicted_step_s * high

    def is_inside(self, bands: Bands) -> bool:
        low, high = self.band(bands)
        return low <= self.published.step_s <= high


class Summary(Noun):
    """Errors of several rows."""

    name: str
    n: Count
    median_abs: float
    mean_abs: float
    p90_abs: float
    bias: float
    band_coverage: float | None = None
    """None without bands."""


class Validation(Noun):
    """All rows, and their summaries."""

    judged: Sequence[Judged]
    refused: Sequence[RefusedRow]
    whole: Summary | None = None
    """None where every row was refused."""
    groups: dict[str, Sequence[Summary]]
    """Summaries by architecture, GPU, precision and so on, the largest group first."""
    memory: Summary | None = None
    """Of the rows whose source prints memory."""
    folds: str | None = None
    """source or publisher: rows were predicted with constants fitted without theirs."""

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys; rows in the table's order, the refused ones last."""
        rows = [_row(each) for each in self.judged] + [_refused_row(each) for each in self.refused]
        summary = {"n": len(self.judged), "refused": len(self.refused)}
        names = ("median_abs", "mean_abs", "p90_abs", "bias", "band_coverage")
        summary |= {name: None if self.whole is None else getattr(self.whole, name) for name in names}
        values: dict[str, Any] = {"rows": rows, "summary": summary}
        values["groups"] = {
            by: {each.name: each.model_dump(exclude={"name"}) for each in group}
            for by, group in self.groups.items()
        }
        values["memory"] = (
            None if self.memory is None else self.memory.model_dump(exclude={"name", "band_coverage"})
        )
        return values | ({"cv": self.folds} if self.folds else {})


def _row(each: Judged) -> dict[str, Any]:
    seen = each.published.memory_bytes
    return {
        "id": each.published.id,
        "predicted_step_s": each.predicted_step_s,
        "published_step_s": each.published.step_s,
        "error": each.error,
        "fits": each.fits,
        "predicted_gib": each.predicted_bytes / GIB,
        "published_gib": None if seen is None else seen / GIB,
        "refused": None,
    }


def _refused_row(row: RefusedRow) -> dict[str, Any]:
    unknown = ("predicted_step_s", "published_step_s", "error", "fits", "predicted_gib", "published_gib")
    return {"id": row.id, **dict.fromkeys(unknown), "refused": row.reason}
