"""What the planner is asked: which layout and recipe train this model fastest on that many devices?"""

from typing import Annotated

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Natural, Noun, Sequence
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import nearest, reject
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import require_meaning
from trainwright.spec.stages import layers_of_stages

SEARCHED = (
    "tp",
    "cp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "dp",
    "order",
    "micro_batch",
    "zero",
    "dp_replicate",
    "reshard_after_forward",
    "recompute",
    "schedule",
)
"""Fields that the search chooses, unless the question fixes them."""


class Question(Noun):
    """A search. `recipe` gives what is not searched; of the fields in SEARCHED its values don't count, but those
    in `fixed` do."""

    model: ModelSpec
    cluster: ClusterSpec
    devices: Annotated[Count, Field(le=10_000_000)]
    recipe: Recipe
    tokens: Count | None = None
    fixed: dict[str, int | str | bool] = {}  # noqa: RUF012  (pydantic copies defaults)
    """Choices that are made already, by the names in SEARCHED."""
    stage_layers: Sequence[Natural] = ()
    """`Layout.stage_layers` of every candidate; empty: as even as they go."""
    top: Annotated[Count, Field(le=1000)] = 1
    """How many plans to return."""

    @model_validator(mode="after")
    def _check(self) -> "Question":
        for name in self.fixed:
            if name not in SEARCHED:
                reject("fixed", name, f"is not searched; {nearest(name, SEARCHED)}")
        if self.stage_layers:
            layers_of_stages(self.model.num_layers, len(self.stage_layers), self.stage_layers)
        require_meaning(self.recipe, self.model)
        return self
