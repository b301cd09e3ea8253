"""Which layers of a piece multiply in the recipe's low precision, and what they keep from step to step.

    query, key, value, out of attention; the latents' projections of MLA
    gate, up, down of MLPs, shared experts and routed experts; what joins a later token to the hidden state

and nothing else: embedding, head, router, gates, norms and attention's core stay in the activation format
(arXiv:2412.19437 s3.3.1). `spec/modules.py` lists the same for whoever asks.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainwright.spec.recipe import Recipe
from trainwright.spec.record import PrecisionRecord
from trainwright.train.clock import Clock
from trainwright.train.mesh import Mesh
from trainwright.train.model.experts import Experts, MixtureOfExperts
from trainwright.train.model.latent import Latent
from trainwright.train.model.later_tokens import LaterToken
from trainwright.train.model.layers import Layer, Mlp
from trainwright.train.model.linear import Linear
from trainwright.train.model.transformer import Transformer
from trainwright.train.precision.arithmetic import Arithmetic, Kernels, UnderWay
from trainwright.train.precision.experts import LowPrecisionExperts
from trainwright.train.precision.gathered import Agreement, GatheredWeight
from trainwright.train.precision.health import Health, alarms_of
from trainwright.train.precision.largest import Current, Delayed, Largest, Role, without_parts
from trainwright.train.precision.linear import LowPrecision
from trainwright.train.precision.product import by_emulation
from trainwright.train.precision.shared import HeldWeight, SharedInput

AXES = ("tp", "cp", "dp")
"""Whose ranks see other parts of what one layer reads in a step; those of `twins` too, where a stage is held
twice."""
BLOCKS = frozenset({"attention", "mlp"})
CUT_ALONG_OUTPUT: Mapping[Role, Sequence[str]] = {"input": ["cp"], "weight": ["tp"], "gradient": ["cp", "tp"]}
CUT_ALONG_INPUT: Mapping[Role, Sequence[str]] = {"input": ["cp", "tp"], "weight": ["tp"], "gradient": ["cp"]}
"""Axes whose ranks have parts of one tensor of a linear layer."""
TOKENS = ("cp", "tp")
"""Axes whose ranks route different tokens of a microbatch."""


class LowPrecisionLayers:
    """Those of this rank's pieces, in a run with a low-precision recipe."""

    def __init__(self, recipe: Recipe, mesh: Mesh, clock: Clock, *, has_twin: bool = False) -> None:
        low = recipe.low_precision
        assert low is not None
        self._recipe, self._low, self._mesh, self._clock = recipe, low, mesh, clock
        self._axes = (*AXES, "twins") if has_twin else AXES
        self.under_way = UnderWay()
        self.kernels = Kernels(product=by_emulation) if recipe.emulate_precision else Kernels()
        self.health = Health()
        self._layers: dict[str, Callable[[bool], None]] = {}
        """By name what lets a layer multiply in few bits, or not."""
        self.fallen: dict[str, torch.Tensor] = {}
        """By name, where the recipe says that layers may fall: 1 where this one has."""
        self._weights: list[HeldWeight] = []
        self.gathered: dict[tuple[nn.Module, str], GatheredWeight] = {}
        """By module and parameter, where the recipe says that weights are gathered in few bits."""
        of_experts = ("edp_shard", "etp", "ep") if low.amax_history else ("edp_shard", "etp")
        self._agreement = Agreement(self._groups(("dp_shard", "tp")), clock)
        self._experts_agreement = Agreement(self._groups(of_experts), clock)
        self.delayed: dict[str, Delayed] = {}
        """By the layer's name, with recipes that keep a history."""
        self._remakes_norms = recipe.recompute == "selective" and "norm" in recipe.recompute_ops
        self._gathers = recipe.sequence_parallel and mesh.layout.tp > 1

    def apply(self, piece: Transformer, recomputed: Set[str]) -> None:
        """Let the layers of a piece, of which some blocks (such as `3.mlp`) are recomputed whole, multiply so, in
        place."""
        for number, layer in piece.layers.items():
            assert isinstance(layer, Layer)
            again = self._gathers or (self._remakes_norms and layer.attention_norm is not None)
            whole = {each for each in BLOCKS if f"{number}.{each}" in recomputed}
            self._apply(layer, f"layers.{number}", BLOCKS - whole if again else frozenset())
        for number, module in piece.later.items():
            assert isinstance(module, LaterToken)
            # Each rank of tp has the weight whole and, where sequences are cut, other positions of what is joined.
            tokens = TOKENS if self._gathers else ["cp"]
            self._set(module, f"later.{number}", ["join"], over={"input": tokens, "gradient": tokens})
            self._apply(module.layer, f"later.{number}.layer", BLOCKS if self._gathers else frozenset())
        if self._recipe.precision_fallback:
            self.fallen = {name: torch.zeros(1, device=self._mesh.device) for name in self._layers}

    def _apply(self, layer: Layer, name: str, again: Set[str]) -> None:
        """again: blocks whose input is there in backward without being kept: gathered again from this rank's part,
        or made again by the norm that gave it."""
        attention, mlp, keeps = layer.attention, layer.mlp, "attention" in again
        prefix = f"{name}.attention"
        if isinstance(attention, Latent):
            reads = ["query"] if attention.query_down is None else ["query_down"]
            self._set(attention, prefix, [*reads, "latent"], keeps=keeps, whole=("query_down", "latent"))
            if attention.query_down is not None:
                self._set(attention, prefix, ["query"])
            self._set(attention, prefix, ["key_value"])
        else:
            self._set(attention, prefix, ["query", "key", "value"], keeps=keeps)
        self._set(attention, prefix, ["out"], over=CUT_ALONG_INPUT)
        if isinstance(mlp, MixtureOfExperts):
            self._set_experts(mlp.experts, f"{name}.mlp.experts")
            mlp, name = mlp.shared, f"{name}.mlp.shared"
        else:
            name = f"{name}.mlp"
        if mlp is not None:
            assert isinstance(mlp, Mlp)
            self._set(mlp, name, ["up"] if mlp.gate is None else ["up", "gate"], keeps="mlp" in again)
            self._set(mlp, name, ["down"], over=CUT_ALONG_INPUT)

    def _set(
        self,
        block: nn.Module,
        prefix: str,
        names: Sequence[str],
        *,
        keeps: bool = False,
        over: Mapping[Role, Sequence[str]] = CUT_ALONG_OUTPUT,
        whole: Sequence[str] = (),
    ) -> None:
        """Of linears that read the same; over: axes whose ranks have parts of one tensor; whole: those of them
        whose weight every rank has."""
        inputs: SharedInput[Any] = SharedInput(len(names))
        for name in names:
            linear = block.get_submodule(name)
            assert isinstance(linear, Linear)
            parts: Mapping[Role, Sequence[str]] = {**over, "weight": ()} if name in whole else over
            arithmetic = self._arithmetic(f"{prefix}.{name}", parts)
            layer = LowPrecision(arithmetic, inputs, self._held(self._mesh.dp_shard), keeps_input=keeps)
            self._layers[arithmetic.name] = partial(_set_product, linear, layer)
            self._gather(linear, "weight", GatheredWeight(arithmetic, layer.weights, self._agreement))
            linear.product = layer

    def _set_experts(self, experts: Experts, prefix: str) -> None:
        """Rows of a microbatch lie on all ranks that route its tokens; the width of experts is cut over etp."""
        inputs: SharedInput[Any] = SharedInput(1 if experts.gate is None else 2)
        shards = self._mesh.layout.expert_dp // self._mesh.dp_replicate
        for name in ("up", "gate", "down"):
            if getattr(experts, name) is None:
                continue
            cut: Role = "input" if name == "down" else "gradient"
            over: dict[Role, list[str]] = {"input": [*TOKENS], "weight": ["etp"], "gradient": [*TOKENS]}
            over[cut].append("etp")
            if self._low.amax_history:
                over["weight"].append("ep")  # All experts have one.
            arithmetic = self._arithmetic(f"{prefix}.{name}", over)
            read = SharedInput(1) if name == "down" else inputs
            layer = LowPrecisionExperts(arithmetic, read, self._held(shards))
            self._layers[arithmetic.name] = partial(_set_experts_product, experts, name, layer)
            self._gather(experts, name, GatheredWeight(arithmetic, layer.weights, self._experts_agreement))
            experts.products[name] = layer

    def _arithmetic(self, name: str, over: Mapping[Role, Sequence[str]]) -> Arithmetic:
        here: dict[Role, list[dist.ProcessGroup]] = {role: self._groups(axes) for role, axes in over.items()}
        largest: Largest = Current(here, self._clock)
        if self._low.amax_history:
            steps = self._recipe.amax_history_steps
            largest = self.delayed[name] = Delayed(steps, largest, self._mesh.device)
        at = self._mesh.coordinate
        return Arithmetic(
            name,
            self._recipe.precision,
            largest,
            self.under_way,
            self._recipe.seed,
            (at.tp, at.cp),
            kernels=self.kernels,
            health=self.health,
        )

    def _groups(self, axes: Sequence[str]) -> list[dist.ProcessGroup]:
        """Those of some axes that say something."""
        groups = self._mesh.groups
        return without_parts([groups[axis] for axis in axes if axis in groups])

    def _gather(self, module: nn.Module, parameter: str, weight: GatheredWeight) -> None:
        if self._recipe.gather_fp8:
            self.gathered[module, parameter] = weight

    def _held(self, shards: int) -> HeldWeight:
        """Of a weight that is sharded over so many ranks: zero 3 gives back what it has gathered."""
        weight = HeldWeight(holds=self._recipe.zero < 3 or shards == 1)
        self._weights.append(weight)
        return weight

    def held_bytes(self) -> int:
        """Of the weights' casts that are held between the acts of a step, all layers together."""
        return sum(weight.num_bytes for weight in self._weights)

    def watch(self, step: int) -> bool:
        """Whether the step that begins, counted from 1, is one that layers are looked at in."""
        every = self._recipe.precision_report_steps
        self.health.is_on = bool(every) and step % every == 0
        return self.health.is_on

    def report(self, step: int) -> PrecisionRecord:
        """Of the step that is over and was watched: this rank's layers, over all ranks that have them. Those whose
        scales have saturated fall, if the recipe says so."""
        self.health.is_on = False
        seen = self.health.taken([*self._layers], self._mesh, self._axes)
        alarms = alarms_of(seen)
        for alarm in alarms:
            if alarm.layer in self.fallen:
                self.fallen[alarm.layer].fill_(1)
                self._layers[alarm.layer](False)
        return PrecisionRecord(
            step=step,
            layers={name: dict(roles) for name, roles in seen.items()},
            alarms=tuple(alarm.text for alarm in alarms),
            fallen=tuple(name for name, has in self.fallen.items() if bool(has)),
        )

    def restored(self) -> None:
        """Weights, histories and what has fallen have been given other values."""
        for name, has in self.fallen.items():
            self._layers[name](not bool(has))
        self._forget()
        for layer in self.delayed.values():
            layer.restored()

    def begin_anew(self) -> None:
        """Forget what the step has seen, which is to leave no trace."""
        self._forget()
        for layer in self.delayed.values():
            layer.seen_R.zero_()

    def after_update(self) -> None:
        """The weights have moved, and a step's largest values are known."""
        self._forget()
        if not self.delayed:
            return
        # Twins have their chunks in opposite order, so names decide.
        layers = [layer for _, layer in sorted(self.delayed.items())]
        seen_LR = torch.stack([layer.seen_R for layer in layers])
        for axis in self._axes:
            if axis in self._mesh.groups:
                dist.all_reduce(seen_LR, dist.ReduceOp.MAX, group=self._mesh.groups[axis])
        for layer, seen_R in zip(layers, seen_LR, strict=True):
            layer.seen_R.copy_(seen_R)
            layer.advance()

    def _forget(self) -> None:
        """Let what weights were rounded to go."""
        for weight in self._weights:
            weight.forget()
        self._agreement.forget()
        self._experts_agreement.forget()


def _set_product(linear: Linear, layer: LowPrecision, is_low: bool) -> None:
    linear.product = layer if is_low else F.linear


def _set_experts_product(experts: Experts, name: str, layer: LowPrecisionExperts, is_low: bool) -> None:
    if is_low:
        experts.products[name] = layer
    else:
        experts.products.pop(name, None)
