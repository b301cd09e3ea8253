"""What one rank computes, keeps, holds and sends in one step, in whole numbers by cause.

The planner predicts a `Counts` and the dry run records one; `unequal` names the causes in which two differ. A
cause of FLOPs is a phase, a part of the model and a kind of operation; of communication its axis, operation,
format and bytes of one message.
"""

from typing import Literal, NamedTuple

from trainwright.spec.base import Natural, Noun, Sequence

CountPhase = Literal["forward", "recompute", "backward", "update"]

PARTS: dict[str, str] = {
    "attention": "attention",
    "attention.query": "query",
    "attention.key": "key",
    "attention.value": "value",
    "attention.query_down": "q_down",
    "attention.latent": "kv_down",
    "attention.key_value": "kv_up",
    "attention.out": "out",
    "mlp.up": "up",
    "mlp.gate": "gate",
    "mlp.down": "down",
    "mlp.router": "router",
    "mlp.experts": "experts",
    "mlp.shared.up": "shared up",
    "mlp.shared.gate": "shared gate",
    "mlp.shared.down": "shared down",
    "mlp.shared_gate": "shared experts' gate",
    "join": "mtp join",
    "head": "head",
    "loss": "head",
}
"""Of a module's name inside its layer (or piece) the planner's name of the operation."""


def part_of(module: str) -> str:
    """The part of the model that a module such as `layers.3.attention.query` is; its own name where there is
    none."""
    names = module.split(".")
    if names == [""]:
        return "head"
    if len(names) > 1 and names[0] in ("layers", "later"):
        names = names[2:]
        if names and names[0] == "layer":
            names = names[1:]
    inside = ".".join(names)
    return PARTS.get(inside, inside) or "residual"


class FlopsCount(Noun):
    """FLOPs of one part in one phase of a step."""

    phase: CountPhase
    part: str
    kind: Literal["matmul", "attention"]
    flops: int


Tensors = Literal[
    "residual stream",
    "normed",
    "latents",
    "attention's core",
    "up and gate",
    "product",
    "rows of experts",
    "shared experts",
    "quantized",
    "scores of experts",
    "logits",
    "gradients of the loss",
    "dropout's masks",
    "numbers of tokens",
    "gathered parameters",
    "other",
]
"""What is kept from forward to backward, as planner and program both name it. `normed` has the norm's statistics;
attention's core has queries and keys (before and behind norms of their own), values, the output and its
statistics; quantized is what weight gradients of low-precision matmuls read. Left out of comparison
(`spec/left_out.py`): numbers of tokens; and gathered parameters, which are no activations."""


class SavedCount(Noun):
    """Bytes that a part's forward has kept for backward, all microbatches of a step together."""

    tensors: Tensors
    part: str = ""
    operator: str = ""
    bytes: Natural


class CollectiveCount(Noun):
    """Collectives of a step that are alike."""

    axis: str
    operation: str
    dtype: str
    ranks: Natural
    """Of the group; 2 of a send."""
    bytes: Natural
    """Of one message on this rank (`spec.traffic`)."""
    count: Natural


class ActBytes(Noun):
    """Live bytes at the end of an act, and at most during it."""

    name: str
    end_bytes: Natural
    most_bytes: Natural


class Counts(Noun):
    """One rank's step."""

    rank: Natural
    pp_rank: Natural
    num_microbatches: Natural
    flops: Sequence[FlopsCount]
    collectives: Sequence[CollectiveCount]
    states: dict[str, int]
    """Bytes of parameters, gradients and optimizer states between the acts of a step."""
    saved: Sequence[SavedCount] = ()
    acts: Sequence[ActBytes] = ()
    peak_bytes: Natural = 0

    def flops_by_cause(self) -> dict[str, int]:
        return {f"FLOPs of {each.part}, {each.kind}, {each.phase}": each.flops for each in self.flops}

    def collectives_by_cause(self) -> dict[str, int]:
        return {
            f"{each.axis} {each.operation} of {each.bytes} bytes {each.dtype}, {each.ranks} ranks": each.count
            for each in self.collectives
        }

    def by_cause(self) -> dict[str, int]:
        """Everything that prediction and recording must agree on."""
        states = {f"bytes of {name}": value for name, value in self.states.items()}
        return {**self.flops_by_cause(), **self.collectives_by_cause(), **states}

    def saved_by_cause(self) -> dict[str, int]:
        """Of what is compared."""
        found: dict[str, int] = {}
        for each in self.saved:
            if each.tensors not in ("numbers of tokens", "gathered parameters"):
                cause = f"kept bytes of {each.tensors}"
                found[cause] = found.get(cause, 0) + each.bytes
        return found


class Inequality(NamedTuple):
    """A cause in which two counts differ."""

    cause: str
    predicted: int
    recorded: int


def unequal(predicted: Counts, recorded: Counts) -> list[Inequality]:
    """Where they differ; none where the prediction is exact."""
    ours, seen = ({**each.by_cause(), **each.saved_by_cause()} for each in (predicted, recorded))
    causes = dict.fromkeys((*ours, *seen))
    return [
        Inequality(cause, ours.get(cause, 0), seen.get(cause, 0))
        for cause in causes
        if ours.get(cause, 0) != seen.get(cause, 0)
    ]
