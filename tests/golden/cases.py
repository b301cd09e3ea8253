"""Predictions that may not change unnoticed: named cases, and the program that writes their golden file.

`python -m tests.golden.cases` writes `predictions.json` anew; say in CHANGELOG's "Numbers" what changed and why.
"""

import json
from pathlib import Path
from typing import Any

from trainwright.cli.catalogue import load_cluster, load_model
from trainwright.plan.predict import predict
from trainwright.spec.layout import Layout
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import DataSpec, Run

GOLDEN = Path(__file__).with_name("predictions.json")


def case(model: str, cluster: str, layout: dict[str, int | str], **recipe: object) -> Run:
    return Run(
        layout=Layout.parse(layout),
        recipe=Recipe.parse(recipe),
        data=DataSpec(vocab_size=300),
        model=load_model(model),
        cluster=load_cluster(cluster),
    )


CASES = {
    "llama-3.1-405b 16384 h100": case(
        "llama-3.1-405b",
        "h100-sxm",
        {"tp": 8, "pp": 16, "vpp": 4, "dp": 128},
        seq_len=8192,
        global_batch=2048,
        schedule="interleaved_1f1b",
    ),
    "llama-3.1-405b 16384 h100, 128K": case(
        "llama-3.1-405b",
        "h100-sxm",
        {"tp": 8, "cp": 16, "pp": 16, "dp": 8},
        seq_len=131072,
        global_batch=128,
        zero=2,
    ),
    "llama-3.1-70b 512 h100 fsdp": case(
        "llama-3.1-70b",
        "h100-sxm",
        {"tp": 8, "dp": 64},
        seq_len=8192,
        global_batch=512,
        zero=3,
        recompute="full",
    ),
    "llama-3.1-8b 8 h200 fp8": case(
        "llama-3.1-8b",
        "h200",
        {"dp": 8},
        seq_len=8192,
        global_batch=128,
        precision="fp8-current",
        zero=2,
    ),
    "gpt3-175b 1024 a100": case(
        "gpt3-175b",
        "a100-80gb-sxm",
        {"tp": 8, "pp": 8, "dp": 16},
        seq_len=2048,
        global_batch=1536,
        recompute="selective",
    ),
    "deepseek-v3 2048 h800": case(
        "deepseek-v3",
        "h800",
        {"pp": 16, "vpp": 2, "dp": 128, "ep": 64, "order": "tp-cp-dp-pp"},
        seq_len=4096,
        global_batch=15360,
        precision="fp8-block",
        schedule="dualpipe",
        dispatch="hierarchical",
        dispatch_fp8=True,
        recompute="selective",
        recompute_ops=["norm", "latent_up", "activation"],
    ),
    "qwen3-30b-a3b 64 b200": case(
        "qwen3-30b-a3b",
        "b200",
        {"tp": 2, "dp": 32, "ep": 16, "etp": 2},
        seq_len=4096,
        global_batch=512,
        precision="mxfp8",
        capacity_factor=1.0,
        cuda_graphs="partial",
    ),
    "gpt-oss-120b 64 mi355x": case(
        "gpt-oss-120b",
        "mi355x",
        {"pp": 4, "dp": 16, "ep": 8},
        seq_len=8192,
        global_batch=256,
        schedule="zb_h1",
        optimizer={"name": "muon", "moments": "bf16"},
        zero=2,
        dp_replicate=2,
    ),
    "llama-3.1-70b 64 h100, ring": case(
        "llama-3.1-70b",
        "h100-sxm",
        {"tp": 4, "cp": 4, "pp": 2, "vpp": 2, "dp": 2},
        seq_len=32768,
        global_batch=32,
        schedule="zb_v",
        cp_method="ring",
        recompute="full",
        recompute_layers=10,
        zero=3,
        reshard_after_forward=False,
        overlap={"tp": True},
    ),
    "llama-local-6m 4 cpu": case(
        "llama-local-6m",
        "local-cpu",
        {"tp": 2, "pp": 2},
        seq_len=256,
        global_batch=8,
        micro_batch=2,
        precision="fp32",
        zero=0,
    ),
}


def predictions() -> dict[str, Any]:
    """Every case's report, numbers to nine digits: enough to see a change, and not the last bit of a libm."""
    return {name: _rounded(predict(run).report()) for name, run in CASES.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) else value


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(predictions(), indent=1) + "\n")
