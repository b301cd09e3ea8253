"""What several linear layers read, quantized once; and a weight, quantized once a step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import torch

from trainwright.train.precision.arithmetic import Arithmetic
from trainwright.train.precision.formats import NumberFormat
from trainwright.train.precision.quantized import Quantized, Scaling

Made = TypeVar("Made")


class SharedInput(Generic[Made]):
    """Of linears that read the same tensor one after another (query, key and value; gate and up), the first makes
    and the others take. What was made is held until the last has asked, or another tensor comes."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._left = 0
        self._x: torch.Tensor | None = None
        self._key: Any = None
        self._made: Made | None = None

    def of(self, x: torch.Tensor, kind: str, make: Callable[[torch.Tensor], Made]) -> Made:
        """What `make` gives of x; `kind` tells apart what is made of the same x."""
        # A view that autograd was told of, or was not, is another tensor of the same memory.
        place = (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride())
        key = (kind, place, None if x.is_inference() else x._version)
        if self._made is None or self._key != key:
            self._key, self._x, self._made, self._left = key, x, make(x), self._readers
        made = self._made
        self._left -= 1
        if self._left == 0:
            self._key = self._x = self._made = None
        return made


class HeldWeight:
    """A weight as Fprop and Dgrad read it, the same until `forget` is called; made at each use where `holds` is
    false, as where the weight itself is given back after it. Where it comes from other ranks as its codes, those
    are `gathered`, and serve both."""

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds
        self._made: dict[str, Quantized] = {}
        self.gathered: Quantized | None = None
        self.num_bytes = 0
        """Of what is held between the acts of a step: as it was when it was made last."""

    def of(self, weight: torch.Tensor, product: Literal["Fprop", "Dgrad"], arithmetic: Arithmetic) -> Quantized:
        """What a product reads of the weight (..., O, I)."""
        codes = self.gathered
        if not self._holds:
            if codes is not None:
                return codes if product == "Fprop" else codes.transposed()
            return (arithmetic.along if product == "Fprop" else arithmetic.across)("weight", weight)
        if not self._made:
            both = arithmetic.both("weight", weight) if codes is None else (codes, codes.transposed())
            along, across = both
            # Matmuls in hardware want what is summed side by side in memory.
            across = replace(across, values=across.values.contiguous(), scale=across.scale.contiguous())
            self._made = {"Fprop": along, "Dgrad": across}
            self.num_bytes = sum(part.nbytes for made in self._made.values() for part in parts_of(made))
        return self._made[product]

    def forget(self) -> None:
        """The weight has changed."""
        self._made.clear()


def parts_of(quantized: Quantized) -> list[torch.Tensor]:
    """Its tensors, for autograd to keep; `put_together` is the way back."""
    parts = [quantized.values, quantized.scale]
    return parts if quantized.tensor_scale is None else [*parts, quantized.tensor_scale]


Form = tuple[NumberFormat, Scaling, int]
"""Of a quantized matrix without its tensors."""


def form_of(quantized: Quantized) -> Form:
    return quantized.format, quantized.scaling, quantized.columns


def put_together(form: Form, parts: Sequence[torch.Tensor]) -> Quantized:
    """The quantized matrix of a form and `parts_of` it."""
    values, scale, *more = parts
    return Quantized(values, scale, *form, tensor_scale=more[0] if more else None)
