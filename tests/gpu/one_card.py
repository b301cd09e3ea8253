"""A dense model of a billion parameters and a small mixture of experts, 50 steps each in bf16 on one GPU:
tokens/s, MFU and peak memory beside what was predicted. Under six minutes on one card. Of the dense one, what
`trainwright explain` sees of a step in the run's telemetry and in a trace of its last two steps is there too.

Each model is a run file that `trainwright train` carries out and `trainwright compare` judges, as a user would:
attention by flash kernels through SDPA, blocks compiled, AdamW fused. The text is random words, some far more
frequent than others, which a model learns in a few steps.

    python tests/gpu/one_card.py [--cluster NAME|FILE] [--steps 50] [--json]
    python tests/gpu/one_card.py --tiny      # the same with models of a million parameters, on this machine's CPU
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.cli.catalogue import load_cluster, load_model
from trainwright.spec import toml
from trainwright.spec.run import Run
from trainwright.train.shards import write_shards

CLUSTERS = {"H200": "h200", "H100 PCIe": "h100-pcie", "H100": "h100-sxm", "H800": "h800", "B200": "b200"} | {
    "A100-SXM4-80GB": "a100-80gb-sxm",
    "A100-SXM4-40GB": "a100-40gb-sxm",
    "A100 80GB PCIe": "a100-80gb-pcie",
}
"""Catalogue names by what is in a GPU's name, the more special first."""

VOCAB = 32_768
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 3, "schedule": "constant"}


def experts(d_model: int, layers: int, num_experts: int, d_ff: int) -> dict[str, Any]:
    """A mixture of experts, 4 of which take each token, and one shared."""
    attention = {"kind": "gqa", "num_heads": d_model // 64, "num_kv_heads": d_model // 256, "d_head": 64}
    mlp = {"kind": "moe", "num_experts": num_experts, "top_k": 4, "d_ff": d_ff, "d_ff_shared": d_ff}
    return {
        "name": f"moe-{num_experts}",
        "d_model": d_model,
        "vocab_size": VOCAB,
        "rope": {"theta": 10000.0},
        "layer_groups": [{"repeat": layers, "pattern": [{"attention": attention, "mlp": mlp}]}],
    }


def runs(cluster: str, tiny: bool) -> dict[str, Run]:
    """The dense run and the one of experts."""
    sizes = {"seq_len": 256, "global_batch": 4, "micro_batch": 2} if tiny else {"seq_len": 4096, "global_batch": 8}
    recipe = {
        "precision": "fp32" if tiny else "bf16",
        "zero": 0,
        "micro_batch": 2,
        "optimizer": OPTIMIZER,
        **sizes,
    }
    dense = load_model("llama-local-1m" if tiny else "llama-3.2-1b")
    mixture = experts(256, 2, 8, 128) if tiny else experts(1024, 12, 32, 1024)
    parts: dict[str, tuple[object, dict[str, Any]]] = {
        "dense": (dense, {"compile": not tiny}),
        "experts": (mixture, {}),
    }
    return {
        name: Run.parse(
            {
                "name": name,
                "layout": {},
                "recipe": {**recipe, **more},
                "model": model,
                "data": {"vocab_size": 4096},
                "cluster": load_cluster(cluster),
            }
        ).check()
        for name, (model, more) in parts.items()
    }


def measured(run: Run, directory: Path, steps: int, recorded: bool) -> dict[str, Any]:
    """What a run of so many steps was, beside what was predicted; with `recorded`, its last two steps are."""
    directory.mkdir()
    shards = directory / "shards"
    shards.mkdir()
    vocab = min(run.model.vocab_size, 4096)
    count = (steps + 1) * run.recipe.tokens_per_step + 1
    words = (np.random.default_rng(0).random(count) ** 4 * vocab).astype(np.uint32)
    write_shards(shards, [words], vocab, "random")
    run = run.changed(data=run.data.changed(source="shards", path=str(shards), vocab_size=vocab))
    file, out = directory / "run.toml", directory / "out"
    file.write_text(toml.write(run))
    start_s = time.perf_counter()
    window = f"{steps - 1}:{steps}"
    recording = ["--profile", window] if recorded else []
    recording += ["--memory-snapshot", window] if recorded and run.cluster.device.kind == "cuda" else []
    said = trainwright("train", str(file), "--steps", str(steps), "--out", str(out), "--json", *recording)
    took_s = time.perf_counter() - start_s
    explained = {}
    if recorded:
        for source, path in {"telemetry": out, "trace": next((out / "profile").iterdir())}.items():
            explained[source] = trainwright("explain", str(path), "--json")
    compared = trainwright("compare", str(out), "--tolerance", "100", "--json")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    peak = compared["ranks"]["0"]["peak_bytes"]
    return {
        "steps": said["steps"],
        "first_loss": records[0]["loss"],
        "last_loss": records[-1]["loss"],
        "took_s": took_s,
        **{name: pair(compared["quantities"][name]) for name in ("step_s", "tokens_per_s", "mfu")},
        "peak_bytes": pair(peak),
        "snapshots": len(list((out / "memory").glob("*.pickle"))),
        "explained": {
            source: {"step_s": each["step_s"]["seen"]}
            | {cause["cause"]: cause["seen_s"] for cause in each["causes"] if cause["seen_s"]}
            for source, each in explained.items()
        },
    }


def pair(compared: dict[str, float]) -> dict[str, float]:
    return {name: compared[name] for name in ("predicted", "seen")}


def trainwright(*arguments: str) -> dict[str, Any]:
    """The JSON that a verb answers."""
    done = subprocess.run([sys.executable, "-m", "trainwright", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"trainwright {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def cluster_here() -> str:
    """The catalogue's name of the GPU in this machine."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU is seen here; name a --cluster, or try --tiny on the CPU")
    name = torch.cuda.get_device_name()
    found = next((cluster for part, cluster in CLUSTERS.items() if part in name), None)
    if found is None:
        raise SystemExit(f"{name} is not in the catalogue by that name; say which cluster with --cluster")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cluster = options.cluster or ("local-cpu" if options.tiny else cluster_here())
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, run in runs(cluster, options.tiny).items():
            found[name] = measured(run, Path(directory) / name, options.steps, name == "dense")
    if options.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(f"{name}: loss {row['first_loss']:.3f} to {row['last_loss']:.3f}, {row['took_s']:.0f} s in all")
        for quantity in ("step_s", "tokens_per_s", "mfu", "peak_bytes"):
            seen, predicted = row[quantity]["seen"], row[quantity]["predicted"]
            print(f"  {quantity:<13} predicted {predicted:,.4g}, seen {seen:,.4g} ({seen / predicted - 1:+.1%})")


if __name__ == "__main__":
    main()
