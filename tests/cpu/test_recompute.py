"""What a layer keeps for backward under each selective recomputation is what the planner says it does."""

import gc
from typing import Any

import pytest
import torch
from example import example_run, plain_model
from torch.autograd.graph import saved_tensors_hooks

from trainwright.plan.pieces import layer_piece
from trainwright.plan.table import Policy, Table
from trainwright.train.instrument import LiveBytes, live_storages
from trainwright.train.model.dropout import Dropping, drop_branches, use_unfused_cores
from trainwright.train.model.rotary import Rotary
from trainwright.train.parallel.compiled import apply_compile
from trainwright.train.parallel.recompute import apply_recompute
from trainwright.train.parallelize import COMPUTE_DTYPE

SIZES: dict[str, Any] = {"seq_len": 64, "micro_batch": 2, "precision": "fp32"}


def kept_and_planned(
    *operations: str, gated: bool = True, attention: dict[str, Any] | None = None, **recipe: Any
) -> tuple[int, float]:
    """Bytes that come to live in a layer's forward, its output included and its input not; and the planner's."""
    policy: dict[str, Any] = {"recompute": "selective", "recompute_ops": operations} if operations else {}
    # The CPU's attention repeats grouped keys and values, so each head has its own.
    heads, mlp = attention or {"num_kv_heads": 4}, {"gated": gated, "activation": "silu"}
    run = example_run(attention=heads, mlp=mlp, recipe={**SIZES, **policy, **recipe}).check()
    model = plain_model(run, torch.float32)
    dropping = Dropping(run.recipe.dropout, 0, torch.arange(SIZES["micro_batch"])) if run.recipe.dropout else None
    if run.recipe.attention_kernel == "unfused":
        use_unfused_cores(model, dropping)
    apply_recompute(model, run.recipe)
    if dropping is not None:
        drop_branches(model, dropping)
    assert run.model.rope is not None
    rotary = Rotary(run.model.rope)
    x = torch.randn(SIZES["micro_batch"], SIZES["seq_len"], run.model.d_model, requires_grad=True)
    model.layers["0"](x, rotary)  # makes the rotary's tables
    gc.collect()
    with LiveBytes(live_storages()) as live:
        before = live.bytes
        output = model.layers["0"](x, rotary)
        torch.zeros(0)  # what is gone by now is seen gone at the next operation
        kept = live.bytes - before
    assert output.requires_grad
    piece = layer_piece(Table.of_run(run), run.model.layers[0])
    return kept, float(piece.kept_bytes(Policy.of_recipe(run.recipe).marks)[0])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "operations",
    [
        (),
        ("attention",),
        ("activation",),
        ("mlp",),
        ("norm",),
        ("norm", "activation"),
        ("attention", "norm", "mlp"),
    ],
    ids="+".join,
)
def test_a_layer_keeps_what_the_planner_counts(operations: tuple[str, ...], gated: bool) -> None:
    kept, planned = kept_and_planned(*operations, gated=gated)
    assert kept == planned


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("operations", [(), ("attention",), ("norm", "mlp")], ids="+".join)
def test_scores_in_memory_and_masks_are_kept_as_the_planner_counts(
    operations: tuple[str, ...], dropout: float
) -> None:
    kept, planned = kept_and_planned(*operations, attention_kernel="unfused", dropout=dropout)
    causal_mask = SIZES["seq_len"] ** 2 * ("attention" not in operations)  # one for all heads and sequences
    assert kept == planned + causal_mask


LATENT = {"kind": "mla", "q_lora_rank": 12, "kv_lora_rank": 10, "d_nope": 8, "d_rope": 4, "d_value": 12}
"""Values are as wide as keys, so that the CPU's kernel needs no wider copy of them."""


@pytest.mark.parametrize("queries_from_a_latent", [True, False])
@pytest.mark.parametrize(
    "operations", [("latent_up",), ("latent_up", "attention"), ("latent_up", "norm")], ids="+".join
)
def test_the_way_up_from_latents_gives_up_what_the_planner_counts(
    operations: tuple[str, ...], queries_from_a_latent: bool
) -> None:
    attention = {**LATENT, "q_lora_rank": 12 if queries_from_a_latent else None}
    others = tuple(operation for operation in operations if operation != "latent_up")
    with_it, planned_with_it = kept_and_planned(*operations, attention=attention)
    without, planned_without = kept_and_planned(*others, attention=attention)
    tokens, heads, size = SIZES["micro_batch"] * SIZES["seq_len"], 4, 4
    assert without - with_it == planned_without - planned_with_it
    width = (8 + 4) * (1 + queries_from_a_latent) + 12
    assert planned_without - planned_with_it == tokens * heads * width * size


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_compiled_layer_keeps_what_the_planner_counts(gated: bool, precision: str) -> None:
    recipe = {**SIZES, "precision": precision, "compile": True}
    activation = "silu" if gated else "gelu"
    run = example_run(attention={"num_kv_heads": 4}, mlp={"gated": gated, "activation": activation}, recipe=recipe)
    model = plain_model(run.check(), COMPUTE_DTYPE[run.recipe.precision])
    apply_compile(model, position_cut=1)
    assert run.model.rope is not None
    rotary = Rotary(run.model.rope)
    x = torch.randn(
        SIZES["micro_batch"], SIZES["seq_len"], run.model.d_model, dtype=COMPUTE_DTYPE[run.recipe.precision]
    )
    rotary.tables(SIZES["seq_len"], 8, x)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    own |= {each.untyped_storage().data_ptr() for tables in rotary._tables.values() for each in tables}
    kept: dict[int, torch.Tensor] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        output = model.layers["0"](x.requires_grad_(), rotary)
    assert "CompiledFunction" in type(output.grad_fn).__name__, "it was compiled at all"
    bytes_ = sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in own)
    piece = layer_piece(Table.of_run(run), run.model.layers[0])
    assert bytes_ == piece.kept_bytes(0)[0]


def test_a_layer_that_is_looked_at_closely_is_compiled_afterwards() -> None:
    """A dispatch mode, which counts live bytes in a run's first step, sees no operation of a graph; and a function
    that PyTorch's tracer has met under one would stay as it is for good."""
    run = example_run(recipe={"compile": True}).check()
    model = plain_model(run, torch.float64)
    apply_compile(model, position_cut=1)
    assert run.model.rope is not None
    rotary, x = Rotary(run.model.rope), torch.randn(1, 16, run.model.d_model, dtype=torch.float64)
    with LiveBytes(live_storages()) as live:
        before = live.bytes
        looked_at = model.layers["0"](x, rotary)
        assert live.bytes > before
    assert "CompiledFunction" not in type(looked_at.grad_fn).__name__
    compiled = model.layers["0"](x, rotary)
    assert "CompiledFunction" in type(compiled.grad_fn).__name__
    torch.testing.assert_close(compiled, looked_at, rtol=1e-12, atol=1e-12)
