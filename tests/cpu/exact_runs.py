"""Runs drawn at random, whose counts the planner must predict to the last integer; and the table of them.

`python tests/cpu/exact_runs.py` compares all of them and writes docs/exactness.md. The draw is from a fixed seed:
number n is the same run wherever it is drawn. What is drawn and can't be a run (a schedule that doesn't take so
many microbatches, heads that tp doesn't divide, ...) is drawn again.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from example import example_run

from trainwright.plan.exact.counts import predicted_counts
from trainwright.spec.counts import Inequality, unequal
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.left_out import LEFT_OUT, NOT_YET
from trainwright.spec.model import MoeMlp
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.run import Run
from trainwright.train.door import require_trainable
from trainwright.train.dryrun.record import dry_run

SEED = 20260
PLAIN, NUMBER = 200, 260
"""Of runs with plain matmuls, and of those that are compared in all: behind them come low-precision ones."""
EVERY = 6
"""Of them one in so many is compared by `make test`."""
MOST_RANKS = 64
PRECISIONS = tuple(LOW_PRECISION)
PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"


class Drawn(NamedTuple):
    """A run, the rank that is compared, and in words what it is."""

    number: int
    run: Run
    rank: int
    text: str


def drawn() -> Iterator[Drawn]:
    """The runs in order."""
    for number in range(NUMBER):
        generator = random.Random(SEED + number)
        while True:
            fields = _fields(generator)
            if number >= PLAIN:
                precision = PRECISIONS[number % len(PRECISIONS)]
                fields = _in_low_precision(generator, fields, precision)
            try:
                run = example_run(**fields).check()
                require_trainable(run)
            except InvalidSpec:
                continue
            if run.layout.world <= MOST_RANKS and _is_even(run):
                break
        yield Drawn(number, run, generator.randrange(run.layout.world), text_of(run))


def differences(each: Drawn) -> list[Inequality]:
    """The causes in which prediction and recording differ."""
    return compared(each)[1]


def _is_even(run: Run) -> bool:
    """Whether every expert has as many of a rank's rows of each sequence as any other."""
    mlp = run.model.layers[0].mlp
    tokens = run.recipe.seq_len // (run.layout.cp * run.layout.tp)
    return not isinstance(mlp, MoeMlp) or tokens * mlp.top_k % mlp.num_experts == 0


def _fields(draw: random.Random) -> dict[str, Any]:
    layout = {
        axis: draw.choice(some) for axis, some in (("tp", (1, 1, 2, 4)), ("cp", (1, 1, 2)), ("pp", (1, 2, 4)))
    }
    layout["dp"] = draw.choice((1, 2, 2, 4))
    schedule = "1f1b"
    if layout["pp"] > 1:
        one_chunk = ("1f1b", "1f1b", "gpipe", "zb_h1")
        schedule = draw.choice((*one_chunk, "interleaved_1f1b", "breadth_first", "zb_v", "dualpipe", "dualpipe_v"))
    if schedule in ("interleaved_1f1b", "breadth_first", "zb_v", "dualpipe", "dualpipe_v"):
        layout["vpp"] = 2
    microbatches = 2 * layout["pp"] * (2 if schedule.startswith("dualpipe") else 1)
    micro_batch = draw.choice((1, 1, 2))
    model, attention, mlp = _model(draw, layout)
    ops = ["attention", "norm", "activation"]
    if mlp.get("kind") == "moe":
        layout["ep"] = draw.choice((1, 2, 4))
        layout["etp"] = draw.choice((1, 1, 2))
        ops.append("moe")
    else:
        ops.append("mlp")
    if attention.get("kind") == "mla":
        ops.append("latent_up")
    precision = draw.choice(("bf16", "fp32", "fp64"))
    recipe: dict[str, Any] = {
        "seq_len": draw.choice((16, 32)),
        "micro_batch": micro_batch,
        "global_batch": microbatches * micro_batch * layout["dp"],
        "precision": precision,
        "zero": draw.choice((0, 1, 2, 3)),
        "reshard_after_forward": draw.random() < 0.75,
        "dp_replicate": draw.choice((1, 1, 1, 2)),
        "sequence_parallel": draw.random() < 0.75,
        "schedule": schedule,
        "recompute": draw.choice(("none", "none", "selective", "full")),
        "cp_method": draw.choice(("all_gather", "ring", "all_to_all")) if layout["cp"] > 1 else "all_gather",
        "loss_kernel": draw.choice(("plain", "fused")),
        "loss_chunks": draw.choice((1, 1, 3)),
        "attention_kernel": draw.choice(("flash", "flash", "flash", "unfused")),
        "optimizer": {"moments": draw.choice(("fp32", "bf16")) if precision != "fp64" else "fp32", "beta2": 0.95},
    }
    if mlp.get("kind") == "moe":
        recipe["capacity_factor"] = draw.choice((None, None, 1.0, 1.5))
        recipe["balance_loss"] = draw.choice((0.0, 0.0, 0.01))
    if recipe["recompute"] == "selective":
        recipe["recompute_ops"] = draw.sample(ops, draw.randint(1, len(ops)))
    if recipe["recompute"] == "full":
        recipe["recompute_layers"] = draw.choice((None, 1))
    data = {"document_mask": draw.random() < 0.15}
    return {"model": model, "attention": attention, "mlp": mlp, "recipe": recipe, "data": data, **layout}


def _in_low_precision(draw: random.Random, fields: dict[str, Any], precision: str) -> dict[str, Any]:
    """Emulated, or in hardware where the example's devices have it; of whole blocks, or not."""
    recipe = {**fields["recipe"], "precision": precision, "seq_len": draw.choice((32, 64, 256))}
    recipe["emulate_precision"] = precision in ("mxfp8", "nvfp4") or draw.random() < 0.5
    model = {**fields["model"], "d_model": draw.choice((32, 128, 160))}
    return {**fields, "recipe": recipe, "model": model}


def _model(draw: random.Random, layout: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    stages = layout["pp"] * layout.get("vpp", 1)
    layer_count = max(4, stages)
    model = {
        "norm": draw.choice(("rmsnorm", "rmsnorm", "layernorm")),
        "norm_placement": draw.choice(("pre", "pre", "post", "sandwich")),
        "tied_embeddings": draw.random() < 0.3,
        "parallel_residual": False,
        "mtp_depth": draw.choice((0, 0, 0, 1)),
        "scaled_embedding": draw.random() < 0.2,
        "logit_softcap": draw.choice((None, None, None, 30.0)),
    }
    attention: dict[str, Any] = {
        "num_heads": draw.choice((4, 8)),
        "num_kv_heads": draw.choice((1, 2, 4)),
        "d_head": 8,
        "qkv_bias": draw.random() < 0.3,
        "out_bias": draw.random() < 0.2,
        "qk_norm": draw.choice(("none", "none", "per_head", "all_heads")),
    }
    if draw.random() < 0.25:
        ranks = {"kv_lora_rank": 16, "d_nope": 8, "d_rope": 8, "d_value": draw.choice((8, 8, 16, 24))}
        attention = {"kind": "mla", "num_heads": 4, "q_lora_rank": draw.choice((None, 24)), **ranks}
    elif draw.random() < 0.3:
        attention["sinks"] = draw.random() < 0.5
        attention["logit_softcap"] = draw.choice((None, 20.0))
    if draw.random() < 0.25:
        attention["sliding_window"] = draw.choice((5, 8))
    mlp: dict[str, Any] = {"d_ff": 48, "gated": draw.random() < 0.7, "bias": draw.random() < 0.2}
    if draw.random() < 0.35:
        mlp = {
            "kind": "moe",
            "num_experts": 8,
            "top_k": 2,
            "d_ff": 16,
            "d_ff_shared": draw.choice((0, 32)),
            "balance_bias": draw.random() < 0.5,
            "router": draw.choice(("softmax", "sigmoid")),
            "bias": draw.random() < 0.2,
        }
        mlp["shared_gate"] = mlp["d_ff_shared"] > 0 and draw.random() < 0.5
    if mlp.get("gated", True) and draw.random() < 0.2:
        mlp["activation"] = "swiglu_clamped"
    layer = {"attention": dict(attention), "mlp": {"kind": "dense", **mlp}}
    layer["attention"].setdefault("kind", "gqa")
    model["layer_groups"] = [{"repeat": layer_count, "pattern": [layer]}]
    return model, attention, mlp


def text_of(run: Run) -> str:
    """What was drawn, in a line."""
    layout, recipe, layer = run.layout, run.recipe, run.model.layers[0]
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "vpp", "ep", "dp")]
    parts = [each for each in degrees if not each.endswith(" 1")] or ["one rank"]
    attention = layer.attention
    parts += [attention.kind, layer.mlp.kind]
    parts += ["window"] * (attention.sliding_window is not None) + ["sinks"] * getattr(attention, "sinks", False)
    parts += ["caps"] * (getattr(attention, "logit_softcap", None) is not None)
    parts += ["documents"] * run.data.document_mask
    parts += [f"zero {recipe.zero}", recipe.precision, recipe.schedule]
    if recipe.emulate_precision:
        parts.append("emulated")
    if recipe.recompute != "none":
        parts.append(recipe.recompute)
    return ", ".join(parts)


def page_without_table() -> str:
    """The head of docs/exactness.md."""
    left_out = "\n".join(f"| {each.what} | {each.bound} |" for each in LEFT_OUT)
    not_yet = "\n".join(f"- {each}" for each in NOT_YET)
    return f"""# Predicted counts are those of the program

Written by `python tests/cpu/exact_runs.py` (`make exact`). The planner's counts of one rank
(`src/trainwright/plan/exact/`, from the same lists of operations that seconds come from) are held against the
trainer's own program, run on fake tensors with fake groups of the run's full world (`trainwright dryrun`): FLOPs
of every matmul and of attention by part and phase, every collective and transfer by axis, operation, format, ranks
and bytes, the bytes of parameters, gradients and optimizer states, and bytes kept for backward. Equal is equal to
the last integer. `tests/cpu/test_exact.py` holds the fake program to real processes, and has negative controls.

FLOPs are two for a multiplication and an addition. Attention's are of the keys that a mask leaves, s (s + 1) / 2
of s^2 under a causal one; its fused backward is 2.5 times its forward. Kernels are those of a CPU, which pads
heads of latent attention to one width, and has none for capped scores: these are multiplied in blocks of 256
queries and the keys that they reach, masked ones too, and once more in backward. Choices of experts are even:
token t takes experts (t * top_k + c) mod X. Samples are of one document.

## Left out on purpose

| what | bound |
|---|---|
{left_out}

## Not equal, or not compared, yet

{not_yet}

## {NUMBER} runs drawn at random (seed {SEED}), from {PLAIN} on with low-precision matmuls

"""


HEAD = "| run | what | rank | FLOPs | messages | all counts |\n|---|---|---|---|---|---|\n"


def compared(each: Drawn) -> tuple[str, list[Inequality]]:
    """A run's line of the table, and in what its counts differ."""
    predicted, recorded = predicted_counts(each.run, each.rank), dry_run(each.run, each.rank)
    found = unequal(predicted, recorded)
    flops, sent = sum(one.flops for one in recorded.flops), sum(one.count for one in recorded.collectives)
    verdict = "equal" if not found else f"{len(found)} causes differ"
    return f"| {each.number} | {each.text} | {each.rank} | {flops:,} | {sent:,} | {verdict} |", found


def main(first: int, last: int) -> int:
    """Compare, say what differs, and write the page where all runs were compared; how many differ."""
    rows, wrong = [], 0
    for each in drawn():
        if not first <= each.number < last:
            continue
        try:
            row, found = compared(each)
        except Exception as error:
            wrong += 1
            print("ERROR", each.number, each.text, type(error).__name__, str(error)[:300], flush=True)
            continue
        rows.append(row)
        if found:
            wrong += 1
            print("UNEQUAL", each.number, "rank", each.rank, each.text, flush=True)
            for one in found[:8]:
                print("    ", *one, flush=True)
    if first == 0 and last == NUMBER:
        PAGE.write_text(page_without_table() + HEAD + "\n".join(rows) + "\n", "utf-8")
    print(f"{wrong} differ")
    return wrong


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(bool(main(*(int(each) for each in (sys.argv[1:3] or (0, NUMBER))))))
