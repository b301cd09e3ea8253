"""What the names in a trace mean: kernels and operators by kind, collectives by kind, groups by axis.

The table is data (`data/kernels.toml`), each rule with its source. The first rule whose pattern is found in a
name, whatever its case, holds; what no rule knows is elementwise."""

import re
from functools import cached_property
from typing import Literal

from pydantic import model_validator

from trainwright.spec.base import Noun, Sequence
from trainwright.spec.errors import reject

Kind = Literal["matmul", "attention", "elementwise", "optimizer", "copies", "communication"]
Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive", "broadcast", "other"
]
TraceAxis = Literal["tp", "cp", "ep", "pp", "dp"]


class KernelRule(Noun):
    """Names of kernels, or of operators on a CPU, and what they do."""

    pattern: str
    kind: Kind
    source: str


class CollectiveRule(Noun):
    """Names of communication kernels, or of collectives in their arguments."""

    pattern: str
    collective: Collective
    source: str


class GroupRule(Noun):
    """Descriptions of process groups."""

    pattern: str
    axis: TraceAxis
    source: str


class KernelTable(Noun):
    """All rules, each list in the order in which they are tried."""

    kernel: Sequence[KernelRule]
    collective: Sequence[CollectiveRule]
    group: Sequence[GroupRule]

    @model_validator(mode="after")
    def _check(self) -> "KernelTable":
        for rule in (*self.kernel, *self.collective, *self.group):
            try:
                re.compile(rule.pattern)
            except re.error as error:
                reject("pattern", rule.pattern, f"is no regular expression: {error}")
        return self

    def kind(self, name: str) -> Kind:
        """What a kernel or operator does."""
        return self.known_kind(name) or "elementwise"

    def known_kind(self, name: str) -> Kind | None:
        """The same; None where no rule knows it."""
        if name not in self._kinds:  # a trace has few names, many times
            self._kinds[name] = next((kind for pattern, kind in self._kernels if pattern.search(name)), None)
        return self._kinds[name]

    def collective_of(self, name: str) -> Collective:
        """Which collective a name is of."""
        for pattern, collective in self._collectives:
            if pattern.search(name):
                return collective
        return "other"

    def axis(self, description: str) -> TraceAxis | None:
        """The axis that a group's description names."""
        return next((axis for pattern, axis in self._groups if pattern.search(description)), None)

    @cached_property
    def _kinds(self) -> dict[str, Kind | None]:
        return {}

    @cached_property
    def _kernels(self) -> list[tuple[re.Pattern[str], Kind]]:
        return [(re.compile(rule.pattern, re.I), rule.kind) for rule in self.kernel]

    @cached_property
    def _collectives(self) -> list[tuple[re.Pattern[str], Collective]]:
        return [(re.compile(rule.pattern, re.I), rule.collective) for rule in self.collective]

    @cached_property
    def _groups(self) -> list[tuple[re.Pattern[str], TraceAxis]]:
        return [(re.compile(rule.pattern, re.I), rule.axis) for rule in self.group]
