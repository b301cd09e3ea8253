"""Tensors that one operation keeps for its backward, made again from what is kept anyway: the queries, keys and
values of latent attention, which its core reads (DeepSeek-V3, arXiv:2412.19437 s3.2.3, recomputes the
up-projections of MLA).

The core isn't run again, as its output and statistics are kept; nor is the graph made again, as the up-projections
have theirs, which hold the latents. So what is wanted in backward are values alone: autograd's saved tensors are
replaced by a note of which they are, and at the first wish all are made again, without a graph. Weights are there
then, as the core's backward is inside the layer's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from trainwright.train.model.latent import Latent
from trainwright.train.model.rotary import Rotary


def attended_again(
    latent: Latent,
    read_BSR: torch.Tensor,
    latent_BSR: torch.Tensor,
    turning_BSH: torch.Tensor,
    rotary: Rotary | None,
    documents_BS: torch.Tensor | None,
) -> torch.Tensor:
    """`Latent.attended`, keeping none of its queries, keys and values that come from latents. Queries that come
    from the residual stream in one projection are kept."""
    query_BNSH = latent.queries(read_BSR, rotary)
    key_BNSH, wide_BNSH = latent.keys_and_values(latent_BSR, turning_BSH, rotary)
    if not torch.is_grad_enabled():
        return latent.mixed(query_BNSH, key_BNSH, wide_BNSH, documents_BS)
    latent_BSR, turning_BSH = latent_BSR.detach(), turning_BSH.detach()
    dropped = (key_BNSH, wide_BNSH)
    if latent.query_down is None:

        def make() -> Sequence[torch.Tensor]:
            return latent.keys_and_values(latent_BSR, turning_BSH, rotary)
    else:
        dropped, queries_from_BSR = (*dropped, query_BNSH), read_BSR.detach()

        def make() -> Sequence[torch.Tensor]:
            made = latent.keys_and_values(latent_BSR, turning_BSH, rotary)
            return *made, latent.queries(queries_from_BSR, rotary)

    again = MadeAgain(make, dropped)
    with saved_tensors_hooks(again.pack, again.unpack):
        return latent.mixed(query_BNSH, key_BNSH, wide_BNSH, documents_BS)


class View(NamedTuple):
    """What autograd keeps in place of a tensor: which of those that are made again it views, and where."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """From the tensor's own first value."""


class MadeAgain:
    """Stands in for `tensors`, which `make` gives again in the same order and with the same strides, among what
    autograd saves of one call."""

    def __init__(self, make: Callable[[], Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> None:
        self._make = make
        self._numbers = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)}
        self._offsets = [int(tensor.storage_offset()) for tensor in tensors]
        self._saved = self._taken = 0
        self._made: Sequence[torch.Tensor] | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | View:
        """Saved by an operation: kept as it is, or noted where it lies in what is made again."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            return tensor
        self._saved += 1
        return View(number, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - self._offsets[number])

    @torch.no_grad()
    def unpack(self, saved: torch.Tensor | View) -> torch.Tensor:
        """Wanted by a backward: made at the first wish and dropped at the last."""
        if isinstance(saved, torch.Tensor):
            return saved
        if self._made is None:
            self._made = self._make()
        whole = self._made[saved.number]
        self._taken += 1
        if self._taken == self._saved:
            self._made = None
        return whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)
