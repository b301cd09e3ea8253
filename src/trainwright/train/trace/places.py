"""Where a rank is in its program at any moment: phase, act, and module, in forward and in backward.

Backward doesn't run modules. But autograd numbers its nodes as forward makes them, and hooks around each module
note the numbers at its beginning and end: a node that backward runs belongs to the innermost module that was at
work when it was made. FSDP2 gathers a unit ahead of its use; it names the unit in the label that it gives the
profiler.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainwright.spec.schedule import Act
from trainwright.spec.traffic import Phase
from trainwright.train.model.experts import Experts
from trainwright.train.parallel.transfers import Transfer
from trainwright.train.parallelize import Trainer

ROOT = "ends"
"""FSDP's unit of a piece: what is in no layer, that is embedding, last norm and head."""
LOSS = "loss"
"""What runs in a forward act and in no module."""
UNIT_LABELS = ("FSDP::all_gather", "FSDP::post_backward_reduce")


class Places:
    """Knows where this rank is while `followed` lasts; `on_act` is told of each act, and of its end by None."""

    def __init__(self, trainer: Trainer, on_act: Callable[[str | None], None]) -> None:
        self._trainer, self._on_act = trainer, on_act
        self.outside: Phase = "after backward"
        self.act = ""
        self.unit = ""
        """FSDP's that gathers or reduces."""
        self._kind = ""
        self._modules: list[str] = []
        self._numbers: list[int] = [0]
        self._owners: list[str] = [""]
        self._parameters = {
            id(parameter): name for piece in trainer.pieces for name, parameter in piece.named_parameters()
        }

    @property
    def phase(self) -> Phase:
        if not self.act:
            return self.outside
        if self._kind == "F":
            return "forward"
        return "recompute" if self._modules else "backward"

    @property
    def module(self) -> str:
        """The innermost one that is at work, or whose backward is; of a finished gradient its parameter. The piece
        itself is at work when it ends with the loss."""
        if self._modules:
            return self._modules[-1] or LOSS
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return LOSS if self.act and self._kind == "F" else ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._parameters.get(id(variable), "")
        return self._owners[bisect_right(self._numbers, node._sequence_nr()) - 1]

    @contextmanager
    def followed(self) -> Iterator[None]:
        hooks = [
            hook
            for piece in self._trainer.pieces
            for name, module in piece.named_modules()
            for hook in self._hooks(name, module)
        ]
        experts = [
            (name, module)
            for piece in self._trainer.pieces
            for name, module in piece.named_modules()
            if isinstance(module, Experts)
        ]
        for name, module in experts:
            # Of what is recomputed of them no module's forward is run.
            module.matmul = self._inside(name, module.matmul)
        pipeline, label = self._trainer.pipeline, FSDPParamGroup._with_fqn
        program = pipeline._program
        pipeline._program = self._watched(program)  # pyright: ignore[reportAttributeAccessIssue]

        def with_unit(group: FSDPParamGroup, text: str) -> str:
            labelled = label(group, text)
            if text in UNIT_LABELS:
                self.unit = group._module_fqn or ROOT
            return labelled

        FSDPParamGroup._with_fqn = with_unit  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            FSDPParamGroup._with_fqn = label
            pipeline._program = program
            for hook in hooks:
                hook.remove()
            for _, module in experts:
                del module.matmul

    def _inside(self, name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*inputs: Any) -> torch.Tensor:
            self._enter(name)
            try:
                return function(*inputs)
            finally:
                self._leave()

        return run

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_pre_hook(lambda module, inputs: self._enter(name))
        # A recomputed layer stops, by an exception, at the last tensor that backward wants.
        yield module.register_forward_hook(lambda module, inputs, output: self._leave(), always_call=True)

    def _enter(self, name: str) -> None:
        self._modules.append(name)
        self._note()

    def _leave(self) -> None:
        self._modules.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._owners.append(self._modules[-1] if self._modules else "")

    def _watched(self, program: Any) -> Any:
        """The program, which says each time that it is gone through where it is."""
        places = self

        class Watched(tuple):
            def __iter__(self) -> Iterator[Any]:
                for step in tuple.__iter__(self):
                    places._kind, places.act = step.kind, act_text(step)
                    if isinstance(step, Act):
                        places._on_act(places.act)
                    yield step
                    places.act = ""
                    places._on_act(None)
                places._on_act(places.outside)

        return Watched(program)


def act_text(act: Act | Transfer) -> str:
    """`F3`, or with several chunks `F3 chunk 1`; of a transfer the act that made it, or that will use it."""
    return f"{act.kind}{act.microbatch}" + (f" chunk {act.chunk}" if act.chunk else "")
