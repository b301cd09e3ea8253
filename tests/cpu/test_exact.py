"""The planner's counts are those of the program, to the last integer; fake tensors count as real ones do.

`make test` compares one in six of the random runs, `make exact` all of them. The controls change one operation of
the planner, and leave one collective out of the trainer: what differs must be named.
"""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import exact_cases
import pytest
import torch
from exact_runs import EVERY, PAGE, differences, drawn, page_without_table
from example import example_run
from launching import run_ranks

from trainwright.cli.main import run as command
from trainwright.plan import pieces
from trainwright.plan.exact.counts import predicted_counts
from trainwright.plan.operations import Matmul
from trainwright.spec import precision, toml
from trainwright.spec.counts import Counts, unequal
from trainwright.spec.run import Run
from trainwright.train.dryrun.passes import extended
from trainwright.train.dryrun.record import dry_run
from trainwright.train.parallel.crossing import Crossing
from trainwright.train.precision.gathered import Agreement
from trainwright.train.precision.largest import Current

RUNS = tuple(drawn())


@pytest.mark.parametrize("each", RUNS, ids=[str(each.number) for each in RUNS])
def test_prediction_is_the_program(each: Any, request: pytest.FixtureRequest) -> None:
    if each.number % EVERY and not request.config.getoption("--all-cases"):
        pytest.skip("one in six; make exact runs all")
    assert differences(each) == [], each.text


def small(**fields: Any) -> Run:
    return example_run(**fields).check()


BESIDE: dict[str, Any] = {"overlap": {"tp": True}, "global_batch": 4}
AGAIN = {"recompute": "selective", "recompute_ops": ["norm", "activation", "attention"]}
MLA = exact_cases.MLA


@pytest.mark.parametrize(
    ("fields", "recipe"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4}, {"precision": "bf16", "micro_batch": 2, "recompute": "full"}),
        ({"tp": 4, "attention": {"qkv_bias": True, "out_bias": True}, "mlp": {"bias": True}}, AGAIN),
        ({"tp": 2, "pp": 2, "vpp": 2}, {"schedule": "zb_v", **AGAIN}),
        ({"tp": 2, "attention": {**MLA, "q_lora_rank": None}, "model": {"mtp_depth": 1}}, {"loss_chunks": 3}),
        ({"tp": 2, "dp": 2, "ep": 2, "mlp": exact_cases.MOE, "attention": MLA}, {"zero": 3}),
    ],
)
def test_what_goes_round_beside_matmuls_is_the_program(fields: dict[str, Any], recipe: dict[str, Any]) -> None:
    run = small(**fields, recipe={**BESIDE, **recipe})
    recorded = dry_run(run, 0)
    assert unequal(predicted_counts(run, 0), recorded) == []
    # Not what the same run has without.
    plain = predicted_counts(run.with_value("recipe.overlap.tp", value=False), 0)
    differ = {each.cause.split(" of ")[0] for each in unequal(plain, recorded)}
    assert differ >= {"tp send", "tp receive", "tp reduce_scatter"}


DROPOUT = {"attention_kernel": "unfused", "dropout": 0.1, "global_batch": 4}
LATENT_UP = {"recompute": "selective", "recompute_ops": ["norm", "latent_up", "activation"]}
ROUTED = {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": 32, "d_ff_shared": 32}
KEPT: dict[str, dict[str, Any]] = {
    "dropout, recomputed": {
        "tp": 2,
        "recipe": {**DROPOUT, "recompute": "selective", "recompute_ops": ["attention"]},
    },
    "parallel branches": {"tp": 2, "model": {"parallel_residual": True, "norm": "layernorm"}, "recipe": DROPOUT},
    "plain attention, heads dealt out": {
        "cp": 2,
        "recipe": {"attention_kernel": "unfused", "cp_method": "all_to_all", "global_batch": 4},
    },
    "as DeepSeek-V3": {
        **{"pp": 2, "vpp": 2, "dp": 2, "ep": 2, "attention": MLA, "mlp": ROUTED, "model": {"mtp_depth": 1}},
        "recipe": {
            **{"precision": "fp8-block", "emulate_precision": True, "gather_fp8": True, "seq_len": 32, "zero": 1},
            **{"schedule": "dualpipe", "global_batch": 16, **LATENT_UP},
        },
    },
    "moments in int8": {
        **{"tp": 2, "dp": 2, "mlp": ROUTED},
        "recipe": {"optimizer": {"moments": "int8"}, "zero": 3, "global_batch": 4},
    },
    "as Gemma 2": {
        **{"tp": 2, "attention": {"logit_softcap": 50.0, "sliding_window": 8}},
        "model": {
            "logit_softcap": 30.0,
            "scaled_embedding": True,
            "norm_placement": "sandwich",
            "zero_centered_norm": True,
        },
        "recipe": {"precision": "bf16", "recompute": "selective", "recompute_ops": ["attention"]},
    },
    "caps of long sequences, split backward": {
        **{"pp": 2, "vpp": 2, "attention": {"logit_softcap": 50.0, "sliding_window": 100}},
        "recipe": {**{"schedule": "zb_v", "seq_len": 600, "global_batch": 4}, **AGAIN},
    },
    "as gpt-oss": {
        **{"ep": 2, "dp": 2, "attention": {"sinks": True, "sliding_window": 8, "qkv_bias": True}},
        "mlp": {**ROUTED, "d_ff_shared": 0, "bias": True, "activation": "swiglu_clamped", "router_bias": True},
        "recipe": {"precision": "bf16"},
    },
    "latent attention, wide values, one head of a rank": {
        **{"tp": 4, "attention": {**MLA, "d_value": MLA["d_nope"] + MLA["d_rope"]}},
        "recipe": {"precision": "bf16"},
    },
    "a window and documents on ranks of a sequence": {
        **{"cp": 2, "attention": {"sliding_window": 5}, "data": {"document_mask": True}},
        "recipe": {"seq_len": 64, "cp_method": "ring", "global_batch": 4},
    },
    "post-norm stages in few bits": {
        **{"pp": 2, "model": {"norm_placement": "post"}},
        "recipe": {"precision": "fp8-block", "emulate_precision": True, "seq_len": 32, "global_batch": 4},
    },
    "latent attention, a window": {"tp": 4, "attention": {**MLA, "sliding_window": 8}},
    "sequential experts, split backward": {
        **{"pp": 2, "vpp": 2, "mlp": ROUTED},
        "recipe": {
            **{"precision": "bf16", "schedule": "zb_v", "expert_matmuls": "sequential", "global_batch": 4},
            **{"recompute": "selective", "recompute_ops": ["activation"]},
        },
    },
}
"""What the draw does not have."""


@pytest.mark.parametrize("name", KEPT)
def test_kept_bytes_are_the_programs(name: str) -> None:
    run = small(**KEPT[name])
    for rank in {0, run.layout.world - 1}:
        predicted = predicted_counts(run, rank)
        assert unequal(predicted, dry_run(run, rank)) == [], rank
        assert predicted.saved


def test_a_changed_coefficient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pieces.dense_operations

    def changed(*arguments: Any, **keywords: Any) -> Any:
        return tuple(
            replace(each, k=each.k + 1) if isinstance(each, Matmul) and each.name == "up" else each
            for each in plain(*arguments, **keywords)
        )

    run = small(tp=2, recipe={"global_batch": 2})
    recorded = dry_run(run, 0)
    assert unequal(predicted_counts(run, 0), recorded) == []
    monkeypatch.setattr(pieces, "dense_operations", changed)
    causes = {each.cause for each in unequal(predicted_counts(run, 0), recorded)}
    assert causes == {"FLOPs of up, matmul, forward", "FLOPs of up, matmul, backward"}


FEW_BITS = {"global_batch": 8, "seq_len": 32, "emulate_precision": True, "gather_fp8": True}
EXPERTS = {"kind": "moe", "num_experts": 8, "top_k": 2, "d_ff": 16, "d_ff_shared": 32}
GATHERED = {
    "whole tensors": {"dp": 2, "tp": 2, "recipe": {**FEW_BITS, "precision": "fp8-current", "zero": 3}},
    "blocks, HSDP": {
        "dp": 4,
        "recipe": {**FEW_BITS, "precision": "fp8-block", "zero": 3, "dp_replicate": 2, "recompute": "full"},
    },
    "experts, a history": {
        **{"mlp": EXPERTS, "dp": 4, "ep": 2},
        "recipe": {**FEW_BITS, "precision": "fp8-delayed", "zero": 3},
    },
    "experts' widths, once": {
        **{"mlp": EXPERTS, "dp": 2, "tp": 2, "etp": 2},
        "recipe": {**FEW_BITS, "precision": "fp8-current", "zero": 3, "reshard_after_forward": False},
    },
    "for a step, split backward": {
        **{"pp": 2, "vpp": 2, "dp": 2},
        "recipe": {**FEW_BITS, "precision": "fp8-block", "zero": 2, "schedule": "zb_v"},
    },
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_in_few_bits_is_counted(name: str) -> None:
    run = small(**GATHERED[name])
    rank = run.layout.world - 1
    predicted, recorded = predicted_counts(run, rank), dry_run(run, rank)
    assert unequal(predicted, recorded) == []
    gathered = {each.dtype for each in recorded.collectives if each.operation == "all_gather"}
    assert "uint8" in gathered


def test_blocks_that_are_not_agreed_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: Agreement) -> None:
        for weight in self.weights:
            weight.agreed(weight.own_amax())

    run = small(**GATHERED["whole tensors"])
    recorded = dry_run(run, 0)
    monkeypatch.setattr(Agreement, "reach", alone)
    found = {each.cause: each.recorded for each in unequal(recorded, dry_run(run, 0))}
    numbers = 4 * 7 * 4
    assert found == {f"{axis} all_reduce of {numbers} bytes float32, 2 ranks": 0 for axis in ("dp", "tp")}


def test_a_dropped_collective_names_its_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(self: Crossing, summand_BSD: torch.Tensor) -> torch.Tensor:
        ranks, (size, positions, *rest) = self.group.size(), summand_BSD.shape
        return summand_BSD.new_empty((size, positions // ranks, *rest))

    run = small(tp=2, recipe={"global_batch": 2})
    monkeypatch.setattr(Crossing, "scattered_sum", dropped)
    found = unequal(predicted_counts(run, 0), dry_run(run, 0))
    assert [(each.cause.split()[:2], each.recorded) for each in found] == [(["tp", "reduce_scatter"], 0)]


def test_a_changed_scale_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a scale, twice as many."""
    run = small(recipe={"global_batch": 2, "precision": "fp8-block", "emulate_precision": True})
    recorded = dry_run(run, 0)
    assert unequal(predicted_counts(run, 0), recorded) == []
    monkeypatch.setitem(precision.SCALE_BYTES, "fp32", 8)
    assert [each.cause for each in unequal(predicted_counts(run, 0), recorded)] == ["kept bytes of quantized"]


def test_a_question_that_is_not_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"global_batch": 2, "precision": "fp8-current", "emulate_precision": True}
    run = small(tp=2, recipe=recipe)
    monkeypatch.setattr(Current, "of", lambda self, role, x: x.new_zeros((*x.shape[:-2], 1, 1)))
    found = unequal(predicted_counts(run, 0), dry_run(run, 0))
    # Of seven weights a layer once a step; of what out and down read, and of the gradients of the other five, once
    # a microbatch.
    questions = 4 * (7 + 2 * (2 + 5))
    assert found == [("tp all_reduce of 4 bytes float32, 2 ranks", questions, 0)]


def test_a_step_is_extended_from_a_few_microbatches() -> None:
    run = small(pp=2, dp=2, recipe={"global_batch": 24, "zero": 3, "precision": "bf16"})
    for rank in (0, 2):
        whole, short = dry_run(run, rank), dry_run(run, rank, passes=2)
        assert short.by_cause() == whole.by_cause()
        assert short.saved_by_cause() == whole.saved_by_cause()


def test_equal_steps_extend_to_themselves() -> None:
    counts = dry_run(small(recipe={"global_batch": 2}), 0)
    assert extended(counts, counts, 3).by_cause() == counts.by_cause()  # pyright: ignore[reportArgumentType]


@functools.cache
def seen(world: int) -> list[dict[str, Counts]]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        run_ranks("exact_cases.py", world, str(world), str(output))
        return [
            {name: Counts.parse(each) for name, each in rank.items()} for rank in json.loads(output.read_text())
        ]


@pytest.mark.parametrize("name", exact_cases.CASES[4])
def test_real_processes_count_the_same(name: str) -> None:
    _assert_same(4, name)


@pytest.mark.parametrize("name", exact_cases.CASES[8])
def test_eight_real_processes_count_the_same(name: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--all-cases"):
        pytest.skip("make exact starts eight processes")
    _assert_same(8, name)


def _assert_same(world: int, name: str) -> None:
    run = exact_cases.run_of(world, name)
    for rank in range(world):
        real, fake = seen(world)[rank][name], dry_run(run, rank)
        assert real.by_cause() == fake.by_cause(), rank
        assert real.saved_by_cause() == fake.saved_by_cause(), rank


def test_the_verb_says_equal_and_refuses_a_rank_beyond_the_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml.write(small(pp=2, recipe={"global_batch": 4})))
    assert command(["dryrun", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in said["ranks"]] == [0, 1]
    assert all(each["unequal"] == [] for each in said["ranks"])
    assert command(["dryrun", str(path), "--rank", "2"]) == 2
    assert "--rank=2: is beyond the run's 2 ranks; the last is 1" in capsys.readouterr().err
    uneven = example_run(mlp=EXPERTS, dp=2).changed(name="uneven")
    path.write_text(toml.write(uneven.with_value("recipe.seq_len", 17)))
    assert command(["dryrun", str(path)]) == 2
    assert "recipe.seq_len=17: 17 tokens of a rank choose 2 of 8 experts, " in capsys.readouterr().err


def test_the_page_says_what_is_left_out() -> None:
    assert PAGE.read_text("utf-8").startswith(page_without_table()), "run python tests/cpu/exact_runs.py"
