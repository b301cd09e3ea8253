"""What a data-parallel form has to do around the microbatches of a step: the interface of the two that exist."""

from collections.abc import Iterator
from typing import Protocol

from torch import nn


class DataParallel(Protocol):
    """Owner of the parameters that the optimizer moves, and of their gradients."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer moves, by name: of all pieces, each tensor once."""
        ...

    def copies(self, parameter: nn.Parameter) -> int:
        """Ranks of dp x cp (for experts, of their replicas) that hold the same part of a parameter of
        `parameters`."""
        ...

    def held_bytes(self) -> dict[str, float]:
        """Bytes of parameters (every copy) and of gradients that this rank holds between the acts of a step, when
        gradients have been accumulated."""
        ...

    def before_act(self) -> None:
        """Called before each act of the pipeline."""
        ...

    def before_backward(self, piece: int, *, is_last: bool, ends_round: bool) -> None:
        """Called before each backward pass of a piece; `is_last` for its last microbatch of the step."""
        ...

    def before_input_gradient(self, piece: int) -> None:
        """Called instead where a backward pass of a piece leaves its weight gradients for later."""
        ...

    def after_weight_gradient(self, piece: int, *, is_last: bool, ends_round: bool) -> None:
        """Called when such a pass's weight gradients are there too; the flags are as above."""
        ...

    def reduce(self) -> None:
        """Called after all backward passes: afterwards each gradient is the sum over all dp and cp ranks."""
        ...

    def after_update(self) -> None:
        """Called when the optimizer has moved the parameters: drops gradients, refreshes compute copies."""
        ...
