"""What the lab of low precision has seen: losses beside bf16's, what rounding did to each tensor, and how far sums
of few bits are off. `train/precision/lab.py` makes it, `present/precision_lab.py` shows it."""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Literal

from trainwright.spec.base import Noun, Sequence
from trainwright.spec.precision import LOW_PRECISION

ModelKind = Literal["dense", "moe"]
MODELS: tuple[ModelKind, ...] = ("dense", "moe")
PLAIN = "bf16"
FACTORS = (1.0, 2.0**12, 2.0**18)
"""Of planted outliers: none; as large as trained models have (arXiv:2402.17762 s2); and 448 / 2^-9, E4M3's largest
value over its least one, beside which nothing else is left."""
LOSS_BOUND = 0.0025
"""Of a loss against bf16's: DeepSeek-V3's was below it at all times (arXiv:2412.19437 s3.3)."""
VISIBLE = 0.01
"""A loss that is worse by more than this share is visibly so: several times what layouts, seeds of rounding, or
recipes that hold all values make of it."""

ProductName = Literal["Fprop", "Dgrad", "Wgrad"]
PRODUCTS: tuple[ProductName, ...] = ("Fprop", "Dgrad", "Wgrad")
Kept = Literal["never", "512", "128", "32", "fp32", "operands"]
"""After how many products the sum of few bits is taken out into one of fp32; sums in fp32; and what rounding the
operands costs, their sums exact."""


class Curve(Noun):
    """One training."""

    model: ModelKind
    precision: str
    factor: float
    losses: Sequence[float]
    """Of each step, nats a token."""
    step_s: float
    """The median."""


class Rounding(Noun):
    """One tensor of one layer as a product reads it, in a training's last step."""

    model: ModelKind
    precision: str
    factor: float
    layer: str
    role: Literal["input", "weight", "gradient"]
    error: float
    """Of a channel: the norm of what rounding adds over the norm of its values. Over channels: the root mean
    square. So channels that became zero count 1 each, however small they are beside the others."""
    flushed: float
    """Share of values that weren't zero and became it."""
    saturated: float
    """Share beyond what the scale holds."""


class SumError(Noun):
    """Errors of one product's results, over the results' root mean square."""

    product: ProductName
    summed: int
    """Values that a result sums over: K."""
    kept: Kept
    worst: float
    typical: float
    """Root mean square."""


class PrecisionLab(Noun):
    """Everything, of trainings that began with the same weights and read the same text."""

    steps: int
    curves: Sequence[Curve]
    roundings: Sequence[Rounding]
    sums: Sequence[SumError]

    @property
    def averaged(self) -> int:
        """Last steps that losses are compared over: 50 of 300."""
        return averaged_of(self.steps)

    @property
    def factors(self) -> tuple[float, ...]:
        return tuple(sorted({each.factor for each in self.curves}))

    @property
    def precisions(self) -> tuple[str, ...]:
        """The low ones, in the order of the recipes."""
        found = {each.precision for each in self.curves}
        return tuple(name for name in LOW_PRECISION if name in found)

    def curve(self, model: ModelKind, precision: str, factor: float) -> Curve:
        key = (model, precision, factor)
        return next(each for each in self.curves if (each.model, each.precision, each.factor) == key)

    def distance(self, model: ModelKind, precision: str, factor: float) -> float:
        """Mean of |loss - loss of bf16| / loss of bf16 over the last steps; infinite of a run that diverged."""
        return distance(self.curve(model, precision, factor).losses, self.curve(model, PLAIN, factor).losses)

    def worse(self, model: ModelKind, precision: str, factor: float) -> float:
        """The same with its sign: by how much the loss is above bf16's."""
        return worse(self.curve(model, precision, factor).losses, self.curve(model, PLAIN, factor).losses)

    def of_tensors(
        self, model: ModelKind, precision: str, factor: float, role: str | None = None
    ) -> list[Rounding]:
        """What rounding did in one training."""
        key = (model, precision, factor)
        return [
            each
            for each in self.roundings
            if (each.model, each.precision, each.factor) == key and role in (None, each.role)
        ]

    def sum_error(self, product: ProductName, summed: int, kept: Kept) -> SumError:
        key = (product, summed, kept)
        return next(each for each in self.sums if (each.product, each.summed, each.kept) == key)


def averaged_of(steps: int) -> int:
    """Last steps of a training that are averaged over."""
    return max(1, steps // 6)


def distance(losses: Iterable[float], plain: Iterable[float]) -> float:
    """`PrecisionLab.distance` of two curves of equal length."""
    return _mean([abs(each) for each in _relative(losses, plain)])


def worse(losses: Iterable[float], plain: Iterable[float]) -> float:
    """`PrecisionLab.worse` of two curves of equal length."""
    return _mean(_relative(losses, plain))


def _relative(losses: Iterable[float], plain: Iterable[float]) -> list[float]:
    found = [(a - b) / b for a, b in zip(losses, plain, strict=True)]
    return found[-averaged_of(len(found)) :]


def _mean(values: list[float]) -> float:
    return fmean(values) if all(map(math.isfinite, values)) else math.inf
