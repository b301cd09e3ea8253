"""Capped attention, made some queries at a time, and attention with sinks, against the textbook's formula."""

import math

import pytest
import torch

from trainwright.train.model.layers import attention_core
from trainwright.train.model.scores import QUERIES_AT_A_TIME

SEQ_LEN = 2 * QUERIES_AT_A_TIME + 37


def textbook(
    query_BNSH: torch.Tensor,
    key_BKSH: torch.Tensor,
    value_BKSH: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    repeats = query_BNSH.shape[1] // key_BKSH.shape[1]
    key_BNSH, value_BNSH = (each.repeat_interleave(repeats, dim=1) for each in (key_BKSH, value_BKSH))
    score_BNSS = query_BNSH @ key_BNSH.transpose(-1, -2) / math.sqrt(query_BNSH.shape[-1])
    if softcap is not None:
        score_BNSS = softcap * torch.tanh(score_BNSS / softcap)
    position = torch.arange(SEQ_LEN)
    distance_SS = position[:, None] - position[None, :]
    hidden_SS = (distance_SS < 0) | (distance_SS >= (window or SEQ_LEN))
    weight_BNSS = torch.exp(score_BNSS).masked_fill(hidden_SS, 0.0)
    total_BNS1 = weight_BNSS.sum(-1, keepdim=True)
    if sinks_N is not None:
        total_BNS1 = total_BNS1 + torch.exp(sinks_N).view(1, -1, 1, 1)
    return weight_BNSS / total_BNS1 @ value_BNSH


@pytest.mark.parametrize("window", [None, 5, QUERIES_AT_A_TIME + 1])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(2.0, False), (2.0, True), (None, True)])
def test_outputs_and_gradients(softcap: float | None, has_sinks: bool, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = random(1, 4, SEQ_LEN, 8), random(1, 2, SEQ_LEN, 8), random(1, 2, SEQ_LEN, 8)
    sinks = random(4) if has_sinks else None
    upstream = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    inputs = [each for each in (query, key, value, sinks) if each is not None]
    seen = attention_core(query, key, value, window, None, None, softcap, sinks)
    expected = textbook(query, key, value, window, softcap, sinks)
    found = [seen, *torch.autograd.grad(seen, inputs, upstream)]
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, inputs, upstream)], strict=True):
        assert float(((ours - theirs).norm() / theirs.norm()).detach()) < 1e-12


def test_scores_are_not_kept() -> None:
    """Flash attention keeps what grows with the length, and so does this; scores grow with its square."""
    query = torch.randn(1, 2, SEQ_LEN, 8, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention_core(query, query, query, None, None, None, 2.0)
    assert sum(kept.values()) < 4 * SEQ_LEN * SEQ_LEN
