"""Collective matmuls (Wang et al., ASPLOS 2023, "Overlap Communication with Dependent Computation via
Decomposition"; PyTorch's asynchronous tensor parallelism): what a tensor-parallel block gathers and scatters goes
round in parts (`parallel/ring.py`), each beside the products of another part.

    in     Fprop   the products of a part of the positions, while the next part is on its way here
           Dgrad   the gradient of a part, while the sum of another is; and while the inputs come round once more
           Wgrad   behind it, of all inputs
    out    Fprop   the summands of a part, while the sum of another is on its way
           Dgrad   the gradient of a part, while that of the next output's part is on its way here
           Wgrad   behind it, of all outputs' gradients

Projections that read the same input share its way in. A weight gradient is one product of all positions, and not a
sum of parts: in bf16 each of these would be rounded. Where it is put off (`parallel/weight_gradients.py`) inputs
come round when it is made, beside nothing.

What is kept for backward is what the plain crossings keep (`parallel/crossing.py`). A product on the way out is
made when all that it keeps is kept, so that recomputation that ends with it makes none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import handle_torch_function, has_torch_function

from trainwright.train.model.linear import Linear
from trainwright.train.parallel.crossing import Crossing, Reader, Result
from trainwright.train.parallel.ring import Ring
from trainwright.train.precision.linear import Multiply

PutOff = Callable[[Sequence[GradientEdge], Sequence[torch.Tensor]], None]
"""Takes the places of products whose weight gradients are to be made later, and their outputs' gradients."""


@dataclass(frozen=True)
class CrossingInParts(Crossing):
    """A crossing of sequence-parallel ranks whose matmuls run beside it."""

    @property
    def ring(self) -> Ring:
        return Ring(self.group, self.clock, "tp")

    def around(
        self, readers: Sequence[Reader], block: Callable[..., Result], part_BSD: torch.Tensor, *others: Any
    ) -> Result:
        return block(Entering(self, readers, part_BSD), *others)

    def multiplied_out(self, linear: Linear, x_BSI: torch.Tensor, weight_DI: torch.Tensor) -> torch.Tensor:
        return scattered_product(x_BSI, weight_DI, self.ring)


class Entering:
    """A block's input that is outside yet. When the first of its readers asks, it comes in for all of them."""

    def __init__(self, crossing: CrossingInParts, readers: Sequence[Reader], part_BSD: torch.Tensor) -> None:
        self._crossing, self._readers, self._part_BSD = crossing, readers, part_BSD
        self._made: dict[Linear, torch.Tensor] = {}

    def product(self, reader: Reader) -> torch.Tensor:
        """What the reader makes of all positions."""
        if not self._made:
            here = [each.here() for each in self._readers]
            weights, biases = zip(*here, strict=True)
            keeps_whole = not self._crossing.gather_again
            made = gathered_products(self._part_BSD, weights, biases, self._crossing.ring, keeps_whole)
            self._made = {each.linear: y for each, y in zip(self._readers, made, strict=True)}
        return self._made.pop(reader.linear)


class _Way:
    """What the nodes of products that share an input, or an output, know of each other."""

    def __init__(self, ring: Ring, put_off: PutOff | None, *, keeps_whole: bool = False) -> None:
        self.ring, self.put_off, self.keeps_whole = ring, put_off, keeps_whole
        self.kept: torch.Tensor | None = None
        """What weight gradients that are put off will read,"""
        self.later: list[GradientEdge] = []
        """and where they begin."""

    def wait(self, gradients: Sequence[torch.Tensor]) -> None:
        """Put the weight gradients off, with the outputs' gradients, (B, S of all, O)."""
        assert self.put_off is not None
        later, self.later = self.later, []
        self.put_off(later, gradients)


def gathered_products(
    part_BSD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    ring: Ring,
    keeps_whole: bool,
    put_off: PutOff | None = None,
) -> tuple[torch.Tensor, ...]:
    """Of each weight (O, D) and bias (O) the product with all ranks' positions, (B, S of all, O). keeps_whole: for
    backward all positions, and not the part."""
    if has_torch_function((part_BSD, *weights)):
        operands = part_BSD, weights, biases, ring, keeps_whole
        return handle_torch_function(gathered_products, (part_BSD, *weights), *operands)
    if put_off is None or not _has_backward(part_BSD, *weights):
        way = _Way(ring, None, keeps_whole=keeps_whole)
        return _In.apply(part_BSD, way, *weights, *biases)  # pyright: ignore[reportReturnType]
    way = _Way(ring, put_off, keeps_whole=keeps_whole)
    operands = (each if each is None else each.detach() for each in (*weights, *biases))
    made: tuple[torch.Tensor, ...] = _In.apply(part_BSD, way, *operands)  # pyright: ignore[reportAssignmentType]
    kept, way.kept = way.kept, None
    later: tuple[torch.Tensor, ...] = _Later.apply(kept, ring, keeps_whole, *weights, *biases)  # pyright: ignore[reportAssignmentType]
    way.later = [get_gradient_edge(each) for each in later]
    return made


def scattered_product(
    x_BSI: torch.Tensor, weight_DI: torch.Tensor, ring: Ring, put_off: PutOff | None = None
) -> torch.Tensor:
    """Of this rank's positions, the sum over ranks of x w^T, (B, S of the rank, D)."""
    if has_torch_function((x_BSI, weight_DI)):
        return handle_torch_function(scattered_product, (x_BSI, weight_DI), x_BSI, weight_DI, ring)
    own = x_BSI.shape[1] // ring.size
    if put_off is None or not _has_backward(x_BSI, weight_DI):
        place = _Out.apply(x_BSI, weight_DI, _Way(ring, None))
    else:
        way = _Way(ring, put_off)
        place = _Out.apply(x_BSI, weight_DI.detach(), way)
        (later,) = _Later.apply(x_BSI.detach(), ring, True, weight_DI, None)  # pyright: ignore[reportGeneralTypeIssues]
        way.later = [get_gradient_edge(later)]

    def summand(place: int) -> torch.Tensor:
        y_BSD = x_BSI.new_empty((len(x_BSI), own, len(weight_DI)))
        _multiply(x_BSI[:, _positions(place, own)], weight_DI.T, y_BSD)
        return y_BSD

    return Multiply.apply(place, partial(ring.summed, summand))  # pyright: ignore[reportReturnType]


class _In(torch.autograd.Function):
    """Of weights, and as many biases or None."""

    @staticmethod
    def forward(
        ctx: Any, part_BSD: torch.Tensor, way: _Way, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = _halves(operands)
        size, own, _ = part_BSD.shape
        made = tuple(part_BSD.new_empty((size, way.ring.size * own, len(weight))) for weight in weights)
        parts = _buffer(part_BSD, way.ring) if way.keeps_whole else None
        for place, piece_BSD in way.ring.parts(part_BSD, parts):
            for y_BSO, weight_OD, bias_O in zip(made, weights, biases, strict=True):
                _multiply(piece_BSD, weight_OD.T, y_BSO[:, _positions(place, own)], bias_O)
        kept = part_BSD if parts is None else _joined(parts)
        ctx.way, ctx.biased = way, [each is not None for each in biases]
        if way.put_off is None:
            ctx.save_for_backward(*weights, kept)
        else:
            way.kept = kept.detach()
            ctx.save_for_backward(*weights)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        way: _Way = ctx.way
        saved = ctx.saved_tensors
        weights, kept = saved[: len(gradients)], saved[len(gradients) :]
        own, parts, again = gradients[0].shape[1] // way.ring.size, None, None
        if kept and not way.keeps_whole:
            parts = _buffer(kept[0], way.ring)
            again = way.ring.parts(kept[0], parts)

        def summand(place: int) -> torch.Tensor:
            if again is not None:
                next(again)  # What it waits for was on its way beside the product before.
            d_part_BSD = weights[0].new_empty((len(gradients[0]), own, weights[0].shape[1]))
            for number, (gradient, weight_OD) in enumerate(zip(gradients, weights, strict=True)):
                _multiply(gradient[:, _positions(place, own)], weight_OD, d_part_BSD, adds=number > 0)
            return d_part_BSD

        d_part_BSD = way.ring.summed(summand)
        if way.put_off is not None:
            way.wait(gradients)
            return d_part_BSD, *(None,) * (1 + 2 * len(weights))
        whole_BSD = kept[0] if parts is None else _joined(parts)
        return d_part_BSD, None, *_weight_gradients(gradients, whole_BSD, ctx.biased)


class _Later(torch.autograd.Function):
    """Weight gradients by themselves, of outputs without values that have the shape of the products'."""

    @staticmethod
    def forward(
        ctx: Any, kept_BSD: torch.Tensor, ring: Ring, keeps_whole: bool, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = _halves(operands)
        ctx.save_for_backward(kept_BSD)
        ctx.ring, ctx.keeps_whole, ctx.biased = ring, keeps_whole, [each is not None for each in biases]
        size, positions, _ = kept_BSD.shape
        positions *= 1 if keeps_whole else ring.size
        return tuple(kept_BSD.new_empty(()).expand(size, positions, len(weight)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (whole_BSD,) = ctx.saved_tensors
        if not ctx.keeps_whole:
            parts = _buffer(whole_BSD, ctx.ring)
            for _ in ctx.ring.parts(whole_BSD, parts):
                pass
            whole_BSD = _joined(parts)
        return None, None, None, *_weight_gradients(gradients, whole_BSD, ctx.biased)


class _Out(torch.autograd.Function):
    """The backward of a product whose sums are scattered, and what it reads; of an output without values, in whose
    place the product is made (`Multiply`)."""

    @staticmethod
    def forward(ctx: Any, x_BSI: torch.Tensor, weight_DI: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        ctx.save_for_backward(weight_DI, *(() if way.put_off is not None else (x_BSI,)))
        size, positions, _ = x_BSI.shape
        return x_BSI.new_empty(()).expand(size, positions // way.ring.size, len(weight_DI))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        way: _Way = ctx.way
        (part_BSD,), (weight_DI, *x) = gradients, ctx.saved_tensors
        size, own, _ = part_BSD.shape
        parts = _buffer(part_BSD, way.ring)
        d_x_BSI = part_BSD.new_empty((size, way.ring.size * own, weight_DI.shape[1]))
        for place, piece_BSD in way.ring.parts(part_BSD, parts):
            _multiply(piece_BSD, weight_DI, d_x_BSI[:, _positions(place, own)])
        whole_BSD = _joined(parts)
        if way.put_off is not None:
            way.wait((whole_BSD,))
            return d_x_BSI, None, None
        return d_x_BSI, _weight_gradients((whole_BSD,), x[0], [False])[0], None


def _has_backward(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and all(each.requires_grad for each in tensors)


def _halves(
    operands: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
    """Weights, and their biases."""
    count = len(operands) // 2
    return [each for each in operands[:count] if each is not None], operands[count:]


def _buffer(part_BSD: torch.Tensor, ring: Ring) -> torch.Tensor:
    """For all ranks' parts, one after another."""
    return part_BSD.new_empty((ring.size, *part_BSD.shape))


def _joined(parts_RBSD: torch.Tensor) -> torch.Tensor:
    """Side by side in each sequence, (B, S of all, D)."""
    return parts_RBSD.transpose(0, 1).flatten(1, 2)


def _positions(place: int, own: int) -> slice:
    """Those of a rank."""
    return slice(place * own, (place + 1) * own)


def _multiply(
    x_BSI: torch.Tensor,
    weight_IO: torch.Tensor,
    into_BSO: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> None:
    """x w, or x w + b, written to `into_BSO`, some positions of a longer tensor, or added to what is there."""
    for x_SI, into_SO in zip(x_BSI, into_BSO, strict=True):
        if adds or bias_O is not None:
            torch.addmm(into_SO if bias_O is None else bias_O, x_SI, weight_IO, out=into_SO)
        else:
            torch.mm(x_SI, weight_IO, out=into_SO)


def _weight_gradients(
    gradients: Sequence[torch.Tensor], whole_BSD: torch.Tensor, biased: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Of weights and of their biases, from outputs' gradients (B, S, O) and the input."""
    whole_TD = whole_BSD.flatten(0, 1)
    weights = (gradient.flatten(0, 1).T @ whole_TD for gradient in gradients)
    biases = (each.sum((0, 1)) if has else None for each, has in zip(gradients, biased, strict=True))
    return *weights, *biases
