"""What the planner can't know from first principles nor from datasheets: free constants, each with its prior.

A constant belongs to parts of clusters (`device:h100-sxm`, `software:gpu`, `link:nvlink4`,
`network:infiniband-ndr`) and gives its value to some of their fields. `benchmarks/fit_published.py` moves the
values away from the priors, as far as published runs ask for it and the range allows.
"""

import math
from typing import Annotated

from pydantic import Field, model_validator

from trainwright.spec.base import Noun, Positive, Sequence
from trainwright.spec.errors import reject

KINDS = ("device", "software", "link", "network")


class Constant(Noun):
    """One number that is fitted."""

    name: str
    parts: Annotated[Sequence[str], Field(min_length=1)]
    """`kind:name` of the parts that it belongs to."""
    fields: Annotated[Sequence[str], Field(min_length=1)]
    """Dotted fields of ClusterSpec that have its value."""
    prior: Positive
    log_sd: Positive
    """Standard deviation of the logarithm of the prior."""
    low: Positive
    high: Positive
    """The physical range: a fit that ends at its border is a defect of the planner's model."""
    value: Positive
    """What the catalogue uses."""
    why: str
    """Source of prior and range."""

    @model_validator(mode="after")
    def _check(self) -> "Constant":
        for field in ("prior", "value"):
            if not self.low <= getattr(self, field) <= self.high:
                reject(field, getattr(self, field), f"must be from low={self.low} to high={self.high}")
        for part in self.parts:
            kind, colon, _ = part.partition(":")
            if not colon or kind not in KINDS:
                reject("parts", part, f"must be kind:name, with one of the kinds {', '.join(KINDS)}")
        return self

    @property
    def is_at_its_border(self) -> bool:
        """Whether the value has run into the end of the range, to within 1% of its logarithmic width."""
        width = math.log(self.high / self.low)
        return min(math.log(self.value / self.low), math.log(self.high / self.value)) < 0.01 * width


class Constants(Noun):
    """All of them, as `data/constants.toml` holds them."""

    constant: Sequence[Constant]

    @model_validator(mode="after")
    def _check(self) -> "Constants":
        names = [each.name for each in self.constant]
        for name in names:
            if names.count(name) > 1:
                reject("name", name, "two constants are called so; rename one")
        return self
