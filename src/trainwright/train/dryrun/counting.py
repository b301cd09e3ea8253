"""What a step computes, keeps and holds, counted operator by operator; on fake tensors and on real ones alike.

FLOPs        of every matmul and attention, two for a multiplication and an addition. Of attention's kernels those
             of the keys that a mask leaves, s (s + 1) / 2 of s^2 where it is causal, forward once and backward 2.5
             times (the scores are made again, arXiv:2205.14135 s3.1); of documents' masks, all keys
saved bytes  storages that a forward act made and that live on when it is over, by the module and the operator
             that made them; what a recomputed layer or a gathered input gives up is not among them, nor what
             gloo's threads still hold of a collective that is over
live bytes   of all storages, from the parameters on: the most in each act
"""

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves

from trainwright.train.dryrun.fabric import value_of
from trainwright.train.instrument import LiveBytes
from trainwright.train.model.transformer import Transformer
from trainwright.train.precision.arithmetic import Arithmetic
from trainwright.train.precision.largest import Delayed
from trainwright.train.precision.shared import HeldWeight
from trainwright.train.trace.places import Places

FORWARD_KERNELS = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
BACKWARD_KERNELS = tuple(f"{name}_backward" for name in FORWARD_KERNELS)


class FlopsKey(NamedTuple):
    """What FLOPs are counted by."""

    phase: str
    where: str
    """Module or, outside of modules, what stands in its place."""
    operation: str


class SavedKey(NamedTuple):
    where: str
    operator: str
    is_floating: bool
    is_number: bool = False
    """Of one value, or one for each row."""


GATHERED = "gathered"
"""In the place of an operator: what FSDP2 gathers, and keeps until it is given back."""


SCALE_BYTES = 4
HELD, QUANTIZED = "held", "quantized"
"""And in that of what rounds a weight for the whole step or looks at past ones, and of what rounds an input."""

DOES: tuple[tuple[type, str, str], ...] = (
    (FSDPParamGroup, "lazy_init", GATHERED),
    (FSDPParamGroup, "unshard", GATHERED),
    (FSDPParamGroup, "wait_for_unshard", GATHERED),
    (HeldWeight, "of", HELD),
    (Delayed, "of", HELD),
    (Arithmetic, "rounded", QUANTIZED),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached", "plans"),
)
"""Where those are done; before FSDP2 gathers any, it pads its shards at the first step. And where DTensor tries an
operator out, without numbers."""

INPUT = SavedKey("", "input", True)
"""What came from the stage before."""


class Counting(LiveBytes):
    """Counts while it is on, knowing from `places` where the rank is. fake: the mode of the tensors that count;
    None: real ones do."""

    def __init__(
        self, storages: Iterable[torch.UntypedStorage], places: Places, fake: FakeTensorMode | None = None
    ) -> None:
        self._fake, self._places = fake, places
        self._act: str | None = None
        self._born: dict[int, SavedKey] = {}
        """In the forward act that is under way."""
        self._operator = ""
        self.flops: Counter[FlopsKey] = Counter()
        self._saved: list[tuple[SavedKey, int, weakref.ref[torch.UntypedStorage]]] = []
        self._thread = threading.get_ident()
        self._let_go_by_others: list[weakref.ref[torch.UntypedStorage]] = []
        """What a thread of gloo held last."""
        self._sent_later: list[weakref.ref[torch.UntypedStorage]] = []
        """What collectives took after the act that made it: it was kept until then."""
        self.acts: list[tuple[str, int, int]] = []
        """Of each act, transfer or what is outside of them: name, bytes at its end, and at most."""
        self._most = 0
        self._input_key: int | None = None
        self._output_key: int | None = None
        self._is_floating, self._is_number = True, False
        self._does: Counter[str] = Counter()
        """How deep the program is in what is listed in `DOES`."""
        self._pieces: tuple[Transformer, ...] = ()
        super().__init__(storages)

    def _tables(self) -> set[int]:
        """Storages of rotary tables, which are made once and stay."""
        rotaries = (
            each for piece in self._pieces for each in (piece.rotary, piece.local_rotary) if each is not None
        )
        pairs = (pair for rotary in rotaries for pair in rotary._tables.values())
        return {table.untyped_storage()._cdata for pair in pairs for table in pair}

    @contextmanager
    def watching(self, pieces: Iterable[Transformer]) -> Iterator[None]:
        """While it lasts it knows what comes into a piece and what leaves it, and what FSDP2 gathers."""

        def passed(piece: nn.Module, inputs: Any, output: Any) -> None:
            assert isinstance(piece, Transformer)
            self._input_key = None if piece.is_first else inputs[0].untyped_storage()._cdata
            self._output_key = None if piece.is_last else output.untyped_storage()._cdata

        self._pieces = tuple(pieces)
        hooks = [piece.register_forward_hook(passed) for piece in pieces]
        plain = [(owner, name, does, getattr(owner, name)) for owner, name, does in DOES]

        def known(does: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **keywords: Any) -> Any:
                self._does[does] += 1
                try:
                    return function(*arguments, **keywords)
                finally:
                    self._does[does] -= 1

            return wrapped

        for owner, name, does, function in plain:
            setattr(owner, name, known(does, function))
        try:
            yield
        finally:
            for owner, name, _, function in plain:
                setattr(owner, name, function)
            for hook in hooks:
                hook.remove()

    def on_act(self, name: str | None) -> None:
        """An act begins; or, with None, is over."""
        self._reap()
        if self._act is not None:
            self.acts.append((self._act, self.bytes, self._most))
            if self._act.startswith("F"):
                tables = self._tables()
                for key, maker in self._born.items():
                    # What leaves for the next stage is kept by no operation; what came from the last one is.
                    if key in self._bytes_of and key != self._output_key and key not in tables:
                        self._save(maker, key)
                if self._input_key in self._bytes_of:
                    self._save(INPUT, self._input_key)
        self._born.clear()
        self._input_key = self._output_key = None
        self._act, self._most = name, self.bytes

    def _save(self, maker: SavedKey, key: int) -> None:
        if self._bytes_of[key] <= SCALE_BYTES:
            return  # A scale of a whole tensor, or another scalar (`spec.left_out`).
        self._saved.append((maker, self._bytes_of[key], self._references[key]))

    def _let_go(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        super()._let_go(key, reference)
        if threading.get_ident() != self._thread:
            self._let_go_by_others.append(reference)

    def saved_bytes(self) -> Counter[SavedKey]:
        """Of all forward acts; known when the step is over, since backward lets go of what it was kept for."""
        by_others = set(map(id, self._let_go_by_others)) - set(map(id, self._sent_later))
        found: Counter[SavedKey] = Counter()
        for maker, size, reference in self._saved:
            if id(reference) not in by_others:
                found[maker] += size
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._does["plans"]:
            return func(*args, **(kwargs or {}))
        self._operator = self._stands_in_for(func._opname)
        if self._fake is None and "c10d" in func.namespace:
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            keys = {each.untyped_storage()._cdata for each in tensors} - self._born.keys()
            self._sent_later += [self._references[key] for key in keys & self._references.keys()]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and func.namespace == "aten":
            count = flops_of(func._opname, args, kwargs or {})
            if count:
                self.flops[self._flops_key(func._opname)] += count
        return result

    def _flops_key(self, name: str) -> FlopsKey:
        phase: str = self._places.phase
        is_forward = name in FORWARD_KERNELS
        # Backward of an operation runs without gradients of its own; what is computed again has a graph.
        if phase == "backward" and (is_forward or torch.is_grad_enabled()):
            phase = "recompute"
        is_attention = is_forward or name in BACKWARD_KERNELS
        where = self._places.module
        if not where and (is_attention or name in ("bmm", "baddbmm")):
            # A core that was recomputed outside of its module, in the middle of a backward.
            where = "attention"
        return FlopsKey(phase, where, "attention" if is_attention else "matmul")

    def _counts(self, tensor: torch.Tensor) -> bool:
        self._is_floating, self._is_number = (
            tensor.dtype.is_floating_point,
            tensor.ndim < 2 or tensor.shape[-1] == 1,
        )
        if self._fake is None:
            return super()._counts(tensor)
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._fake

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._reap()
        is_new = key not in self._bytes_of
        super()._watch(storage)
        self._most = max(self._most, self.bytes)
        if is_new and self._act is not None:
            operator = self._stands_in_for(self._operator)
            self._born[key] = SavedKey(self._places.module, operator, self._is_floating, self._is_number)

    def _stands_in_for(self, operator: str) -> str:
        return next((does for does in (GATHERED, HELD, QUANTIZED) if self._does[does]), operator)


def flops_of(name: str, args: Any, kwargs: Any) -> int:
    """Of one operator; 0 for those that multiply no matrices."""
    if name in ("mm", "bmm"):
        return 2 * args[0].numel() * args[1].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if name == "_grouped_mm":
        return 2 * args[0].numel() * args[1].shape[-1] if args[0].ndim == 2 else 0
    if name in FORWARD_KERNELS:
        is_causal = _argument(args, kwargs, 4, "is_causal")
        query, key, value, *_ = args
        return attention_flops(query, key, value, is_causal, kwargs.get("attn_mask"))
    if name in BACKWARD_KERNELS:
        # On a GPU the lengths and the randomness stand between.
        place = 7 if name == BACKWARD_KERNELS[0] else 11
        is_causal = _argument(args, kwargs, place, "is_causal")
        _, query, key, value, *_ = args
        return attention_flops(query, key, value, is_causal, kwargs.get("attn_mask")) * 5 // 2
    return 0


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else False


def attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None
) -> int:
    """Of scores and values, (B, N, S, H) each."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
    numbers = None if mask is None else value_of(mask)
    if numbers is not None:
        with unset_fake_temporarily():
            seen = numbers if numbers.dtype == torch.bool else numbers == 0
            pairs = int(seen.sum()) // math.prod(seen.shape[:-2])
    return 2 * batch * heads * pairs * (width + value.shape[-1])
