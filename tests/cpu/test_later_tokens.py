"""Multi-token prediction against the equations of DeepSeek-V3 (arXiv:2412.19437 s2.2), which cut sequences shorter
for each module instead of shifting them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from example import example_run, plain_model

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.run import Run
from trainwright.train.data import IGNORED, Batch
from trainwright.train.head_loss import HeadLoss
from trainwright.train.model.later_tokens import LaterToken
from trainwright.train.model.transformer import Transformer

DEPTH, SEQ_LEN = 3, 16


def run() -> Run:
    return example_run(model={"mtp_depth": DEPTH})


def by_the_equations(model: Transformer, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> list[torch.Tensor]:
    """Summed cross-entropy of the next token and of each later one. `tokens_BS` are t_1 to t_T, and `targets_BS`
    t_2 to t_T+1."""
    assert model.embedding is not None
    assert model.norm is not None
    assert model.head is not None
    hidden_BSD = model.embedding(tokens_BS)
    for layer in model.layers.values():
        hidden_BSD = layer(hidden_BSD, model.rotary)
    losses = [
        F.cross_entropy(model.head(model.norm(hidden_BSD)).flatten(0, 1), targets_BS.flatten(), reduction="sum")
    ]
    for k, module in enumerate(model.later.values(), 1):
        assert isinstance(module, LaterToken)
        before_BSD = module.hidden_norm(hidden_BSD[:, : SEQ_LEN - k])
        token_BSD = module.token_norm(model.embedding(tokens_BS[:, k:]))
        hidden_BSD = module.layer(torch.cat((before_BSD, token_BSD), dim=-1) @ module.join.weight.T, model.rotary)
        logits_TV = model.head(module.norm(hidden_BSD)).flatten(0, 1)
        losses.append(F.cross_entropy(logits_TV, targets_BS[:, k:].flatten(), reduction="sum"))
    return losses


@pytest.mark.parametrize("ignored", [False, True])
def test_losses_are_those_of_the_equations(ignored: bool) -> None:
    model = plain_model(run(), torch.float64)
    tokens_BS = torch.randint(run().model.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    inputs_BS, targets_BS = tokens_BS[:, :-1], tokens_BS[:, 1:].clone()
    if ignored:
        targets_BS[0, 3:9] = IGNORED
    batch = Batch([inputs_BS], [targets_BS], 1)
    targets = [batch.targets(0, further) for further in range(DEPTH + 1)]
    head_loss = partial(HeadLoss(later_weight=0.1), targets_BS=targets, scale=1.0)
    later_BS = [batch.inputs(0, further) for further in range(1, DEPTH + 1)]
    loss, next_loss = model(inputs_BS, later_BS=later_BS, loss=head_loss)
    expected_next, *expected_later = by_the_equations(model, inputs_BS, targets_BS)
    parameters = list(model.parameters())
    expected = expected_next + 0.1 * sum(expected_later)
    assert float((next_loss - expected_next).abs().detach()) < 1e-9
    assert float((loss - expected).abs().detach()) < 1e-9
    found, wanted = (torch.autograd.grad(each, parameters) for each in (loss, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-10


def test_parameters_are_those_of_the_spec() -> None:
    spec = run().model
    assert sum(each.numel() for each in Transformer(spec).parameters()) == spec.params + spec.mtp_params


def test_the_last_piece_alone_has_the_modules() -> None:
    spec = run().model
    assert not Transformer(spec, range(2)).later
    last = Transformer(spec, range(2, 4))
    assert len(last.later) == DEPTH
    assert last.embedding is not None
    assert Transformer(spec.changed(mtp_depth=0), range(2, 4)).embedding is None


def test_a_weight_without_modules_is_refused() -> None:
    refused = r"recipe.mtp_loss_weight=0.1: is of multi-token prediction, and test has none; leave it out"
    with pytest.raises(InvalidSpec, match=refused):
        example_run(recipe={"mtp_loss_weight": 0.1}).check()


def test_positions_beyond_the_table_are_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"recipe.seq_len=16: is beyond the table of model.learned_positions=8"):
        example_run(model={"learned_positions": 8}).check()
