"""Who sees what under context parallelism, and that attention in blocks adds up to attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from example import example_run

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.recipe import Recipe
from trainwright.train.data import IGNORED, Batch
from trainwright.train.parallel import blocks as kernels
from trainwright.train.parallel.blocks import Merged, Seen, block_backward, block_forward
from trainwright.train.parallel.choices import cut_of, order_of, parts_of
from trainwright.train.parallel.positions import positions_of
from trainwright.train.parallel.travelling import blocks

SEQ_LEN = 32


def seen_by(rank: int, size: int, window: int | None) -> torch.Tensor:
    """(own positions, all positions): how many of the blocks of `rank` show each key to each query."""
    recipe = Recipe(seq_len=SEQ_LEN, global_batch=1)
    own = SEQ_LEN // size
    counts = torch.zeros(own, SEQ_LEN, dtype=torch.int64)
    for source in range(size):
        part = torch.zeros(own, own, dtype=torch.int64)
        for queries, keys, seen in blocks(rank, source, size, own, window):
            shape = part[queries, keys].shape
            mask = torch.ones(shape, dtype=torch.bool)
            if seen == "causal":
                mask = mask.tril()
            elif isinstance(seen, torch.Tensor):
                mask = seen
            part[queries, keys] += mask.long()
        counts[:, positions_of(recipe, size, source)] = part
    return counts


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_query_sees_each_key_of_its_window_once(size: int, window: int | None) -> None:
    distance = torch.arange(SEQ_LEN)[:, None] - torch.arange(SEQ_LEN)[None, :]
    expected = (distance >= 0) & (distance < (window or SEQ_LEN))
    recipe = Recipe(seq_len=SEQ_LEN, global_batch=1)
    for rank in range(size):
        mine = positions_of(recipe, size, rank)
        assert torch.equal(seen_by(rank, size, window), expected[mine].long())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_ranks_have_as_much_to_do(size: int) -> None:
    assert len({int(seen_by(rank, size, None).sum()) for rank in range(size)}) == 1


@pytest.mark.parametrize("method", ["all_gather", "ring", "all_to_all"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_out_the_positions(method: str, size: int) -> None:
    recipe = Recipe.parse({"seq_len": SEQ_LEN, "global_batch": 1, "cp_method": method})
    parts = [positions_of(recipe, size, rank) for rank in range(size)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(SEQ_LEN))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    for part in parts:
        batch = Batch([tokens], [tokens + 1], 2 * SEQ_LEN).at(part)
        assert torch.equal(batch.inputs(0), tokens[:, part])
        assert torch.equal(batch.targets(0), tokens[:, part] + 1)
        # Later tokens stand where others' positions may be; behind the sequence there are none.
        assert torch.equal(batch.inputs(0, 3), (tokens[:, part] + 3) * (part + 3 < SEQ_LEN))
        expected = (tokens[:, part] + 4).masked_fill(part + 3 >= SEQ_LEN, IGNORED)
        assert torch.equal(batch.targets(0, 3), expected)
        assert batch.global_tokens == 2 * SEQ_LEN


def example(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8), (2, 4, 8, 8))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor, cut: list
) -> tuple[torch.Tensor, ...]:
    """Output and gradients of attention, computed block by block."""
    merged, scale = Merged(query, value.shape[-1]), 1 / math.sqrt(query.shape[-1])
    for queries, keys, seen in cut:
        part = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        merged.add(queries, *block_forward(*part, seen, scale))
    out, lse = merged.result()
    gradients = [torch.zeros_like(each) for each in (query, key, value)]
    for queries, keys, seen in cut:
        part = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        mine = out[:, :, queries], lse[:, :, queries]
        found = block_backward(upstream[:, :, queries], *part, *mine, seen, scale)
        for total, place, each in zip(gradients, (queries, keys, keys), found, strict=True):
            total[:, :, place] += each
    return out, *gradients


def cut_in_two(middle: Seen) -> list[tuple[slice, slice, Seen]]:
    first, second = slice(4), slice(4, None)
    return [(first, first, middle), (second, second, middle), (second, first, "all")]


TRIANGLE = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("middle", ["causal", TRIANGLE], ids=["kernel", "mask"])
def test_blocks_add_up_to_the_whole(dtype: torch.dtype, bound: float, middle: Seen) -> None:
    query, key, value, upstream = example(dtype)
    precise = [each.detach().double().requires_grad_() for each in (query, key, value)]
    whole = F.scaled_dot_product_attention(*precise, is_causal=True, enable_gqa=True)
    expected = (whole.detach(), *torch.autograd.grad(whole, precise, upstream.double()))
    with torch.no_grad():
        seen = in_blocks(query, key, value, upstream, cut_in_two(middle))
    for mine, theirs in zip(seen, expected, strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < bound


def test_a_query_that_sees_nothing_of_a_block_takes_nothing_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask may hide all of a block from some queries; written out, the kernels' blocks give the same."""
    query, key, value, upstream = example(torch.float64)
    half = torch.ones(4, 4, dtype=torch.bool).tril()
    half[0] = False
    first, second = slice(4), slice(4, None)
    hidden: list = [(first, first, TRIANGLE), (second, second, TRIANGLE), (second, first, half)]
    seen_SS = torch.ones(8, 8, dtype=torch.bool).tril()
    seen_SS[4:, :4] = half
    inputs = [each.clone().requires_grad_() for each in (query, key, value)]
    whole = F.scaled_dot_product_attention(*inputs, attn_mask=seen_SS, enable_gqa=True)
    expected = (whole.detach(), *torch.autograd.grad(whole, inputs, upstream))
    for mine, theirs in zip(in_blocks(query, key, value, upstream, hidden), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)
    by_kernel = in_blocks(query, key, value, upstream, cut_in_two("causal"))
    monkeypatch.setattr(kernels, "_has_kernel", lambda *arguments: False)
    for mine, theirs in zip(in_blocks(query, key, value, upstream, cut_in_two("causal")), by_kernel, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    """Two chunks for each of two ranks, whose parts two tp ranks can halve."""
    with pytest.raises(InvalidSpec, match=r"recipe.seq_len=18: must be a multiple of 4, as cp=2"):
        example_run(cp=2, recipe={"seq_len": 18}).check()
    with pytest.raises(InvalidSpec, match=r"recipe.seq_len=12: must be a multiple of 8, as cp=4"):
        example_run(cp=4, recipe={"seq_len": 12}).check()
    example_run(tp=2, cp=2, recipe={"seq_len": 20}).check()
    example_run(cp=2, recipe={"seq_len": 18, "cp_method": "all_to_all"}).check()


@pytest.mark.parametrize("method", ["all_gather", "ring", "all_to_all"])
@pytest.mark.parametrize(
    ("tp", "cp", "seq_len"), [(1, 2, 24), (2, 2, 24), (3, 2, 24), (3, 4, 24), (4, 3, 24), (2, 1, 6)]
)
def test_choices_of_experts_are_counted_in_the_order_of_positions(
    method: str, tp: int, cp: int, seq_len: int
) -> None:
    """Also where tp cuts a part between its early and its late chunk, and where runs are of odd lengths."""
    recipe = Recipe.parse({"seq_len": seq_len, "global_batch": 1, "cp_method": method})
    parts = parts_of(recipe, tp, cp)
    order = order_of(parts)
    assert len(order) in (len(parts), 2 * len(parts))
    runs = [run for part in parts for run in part.tensor_split([cut_of(part)][: len(order) // len(parts) - 1])]
    assert torch.equal(torch.cat([runs[each] for each in order]), torch.arange(seq_len))
