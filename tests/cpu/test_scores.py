"""Attention with caps, sinks, windows and documents, some queries at a time, against the textbook's formula."""

import math
from typing import Any

import pytest
import torch

from trainwright.spec.model import QUERIES_AT_A_TIME
from trainwright.train.model.layers import attention_core
from trainwright.train.model.scores import attention_with_sinks

SEQ_LEN = 2 * QUERIES_AT_A_TIME + 37


def textbook(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks_N: torch.Tensor | None,
    documents_BS: torch.Tensor | None,
) -> torch.Tensor:
    repeats = query_BNSH.shape[1] // key_BKSH.shape[1]
    key_BNSH, value_BNSH = (each.repeat_interleave(repeats, dim=1) for each in (key_BKSH, value_BKSH))
    score_BNSS = query_BNSH @ key_BNSH.transpose(-1, -2) / math.sqrt(query_BNSH.shape[-1])
    if softcap is not None:
        score_BNSS = softcap * torch.tanh(score_BNSS / softcap)
    position = torch.arange(SEQ_LEN)
    distance_SS = position[:, None] - position[None, :]
    hidden_SS = (distance_SS < 0) | (distance_SS >= (window or SEQ_LEN))
    if documents_BS is not None:
        hidden_SS = hidden_SS | (documents_BS[0][:, None] != documents_BS[0][None, :])
    weight_BNSS = torch.exp(score_BNSS).masked_fill(hidden_SS, 0.0)
    total_BNS1 = weight_BNSS.sum(-1, keepdim=True)
    if sinks_N is not None:
        total_BNS1 = total_BNS1 + torch.exp(sinks_N).view(1, -1, 1, 1)
    return weight_BNSS / total_BNS1 @ value_BNSH


def as_on_a_gpu(*arguments: Any) -> torch.Tensor:
    *others, softcap, sinks_N = arguments
    assert softcap is None
    return attention_with_sinks(*others, sinks_N)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [None, 5, QUERIES_AT_A_TIME + 1])
@pytest.mark.parametrize(
    ("softcap", "has_sinks", "core"),
    [
        (2.0, False, attention_core),
        (2.0, True, attention_core),
        (None, True, attention_core),
        (None, False, attention_core),
        (None, True, as_on_a_gpu),
    ],
)
def test_outputs_and_gradients(
    softcap: float | None, has_sinks: bool, core: Any, window: int | None, has_documents: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = random(1, 4, SEQ_LEN, 8), random(1, 2, SEQ_LEN, 8), random(1, 2, SEQ_LEN, 8)
    sinks = random(4) if has_sinks else None
    upstream = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    inputs = [each for each in (query, key, value, sinks) if each is not None]
    documents = (torch.arange(SEQ_LEN) // 100).unsqueeze(0) if has_documents else None
    seen = core(query, key, value, window, None, documents, softcap, sinks)
    expected = textbook(query, key, value, window, softcap, sinks, documents)
    found = [seen, *torch.autograd.grad(seen, inputs, upstream)]
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, inputs, upstream)], strict=True):
        assert float(((ours - theirs).norm() / theirs.norm()).detach()) < 1e-12


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, 2.0, False), (40, None, True), (40, 2.0, True)]
)
def test_neither_scores_nor_masks_are_kept(window: int | None, softcap: float | None, has_sinks: bool) -> None:
    """Flash attention keeps what grows with the length, and so does this; scores grow with its square."""
    query = torch.randn(1, 2, SEQ_LEN, 8, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sinks = torch.zeros(2, requires_grad=True) if has_sinks else None
        attention_core(query, query, query, window, None, None, softcap, sinks)
    # A mask has a byte for each two positions.
    assert sum(kept.values()) < SEQ_LEN * SEQ_LEN
