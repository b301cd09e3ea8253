"""Parity cases so that every two features of the trainer meet: sets of features, put together by `fields_of`.

The sets were drawn so as to cover the pairs that are in no other case; `composition.py` says whether any is left.
"""

from typing import Any

from parity_models import LATENT
from parity_moe import DEEPSEEK

FEATURES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp without sequence parallelism": {"tp": 2, "recipe": {"sequence_parallel": False}},
    "tp beside matmuls": {"tp": 2, "recipe": {"overlap": {"tp": True}}},
    **{
        f"cp {method}": {"cp": 2, "recipe": {"cp_method": method}}
        for method in ("all_gather", "ring", "all_to_all")
    },
    **{f"pp {name}": {"pp": 2, "recipe": {"schedule": name}} for name in ("1f1b", "gpipe", "zb_h1")},
    **{
        f"pp {name}": {"pp": 2, "vpp": 2, "recipe": {"schedule": name}}
        for name in ("interleaved_1f1b", "breadth_first", "zb_v", "dualpipe", "dualpipe_v")
    },
    **{f"dp zero {zero}": {"dp": 2, "recipe": {"zero": zero}} for zero in range(4)},
    "HSDP": {"dp": 4, "recipe": {"dp_replicate": 2}},
    "experts": {"mlp": "moe"},
    "ep": {"mlp": "moe", "ep": 2},
    "etp": {"mlp": "moe", "etp": 2},
    "ep beside shared experts": {"mlp": "moe", "ep": 2, "recipe": {"overlap": {"ep": True}}},
    "capacity of experts": {"mlp": "moe", "recipe": {"capacity_factor": 1.0}},
    "loss for balance": {"mlp": "moe", "recipe": {"balance_loss": 0.5}},
    "latent attention": {"attention": "mla"},
    "multi-token prediction": {"model": {"mtp_depth": 1}},
    "tied embeddings": {"model": {"tied_embeddings": True}},
    "sliding window": {"window": 5},
    "document mask": {"data": {"document_mask": True}},
    "selective recompute": {
        "recipe": {"recompute": "selective", "recompute_ops": ["norm", "activation", "attention"]}
    },
    "full recompute": {"recipe": {"recompute": "full"}},
    "loss in chunks": {"recipe": {"loss_chunks": 2}},
    "fused loss": {"recipe": {"loss_kernel": "fused"}},
    "dropout": {"recipe": {"dropout": 0.1, "attention_kernel": "unfused"}},
    "compiled layers": {"recipe": {"compile": True}},
    "low precision": {"recipe": {"precision": "fp8-current", "emulate_precision": True}},
    "weights gathered in fp8": {
        "dp": 2,
        "recipe": {"precision": "fp8-current", "emulate_precision": True, "gather_fp8": True},
    },
    "Muon": {"recipe": {"optimizer": {"name": "muon", "lr": 0.01, "warmup_steps": 0, "schedule": "constant"}}},
}
"""What each needs to be said; `mlp`, `attention` and `window` are of all layers."""


class Clash(Exception):
    """Two features say different things of one field."""


def fields_of(names: frozenset[str]) -> dict[str, Any]:
    """The arguments of `example_run` for a run with these features. Raises `Clash`."""
    merged: dict[str, Any] = {}
    for name in sorted(names):
        _merge(merged, FEATURES[name])
    latent, window, moe = (merged.pop(key, None) for key in ("attention", "window", "mlp"))
    attention: dict[str, Any] = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": 8}
    if latent:
        attention = {**LATENT, "num_heads": 4}
    if window:
        attention["sliding_window"] = window
    mlp: dict[str, Any] = {"kind": "dense", "d_ff": 48}
    if moe:
        mlp = {"kind": "moe", "num_experts": 8, "d_ff": 16, **DEEPSEEK}
    has_stage = any(name.startswith("dp zero") for name in names)
    zero = merged.get("recipe", {}).get("zero")
    if ("HSDP" in names and not zero) or ("weights gathered in fp8" in names and not has_stage):
        merged.setdefault("recipe", {})["zero"] = 1
    layers = [{"repeat": 4, "pattern": [{"attention": attention, "mlp": mlp}]}]
    merged.setdefault("model", {})["layer_groups"] = layers
    plane = merged.get("tp", 1) * merged.get("cp", 1) * merged.get("dp", 1)
    if plane % (merged.get("ep", 1) * merged.get("etp", 1)):
        merged["dp"] = merged.get("dp", 1) * 2
    merged.setdefault("recipe", {})["global_batch"] = 16
    return merged


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        elif key in ("tp", "cp", "pp", "vpp", "dp") and not isinstance(value, bool):
            if key == "vpp" and into.get(key, value) != value:
                raise Clash(key)
            into[key] = max(into.get(key, 1), value)
        elif into.get(key, value) != value:
            raise Clash(key)
        else:
            into[key] = value


SETS: tuple[tuple[str, ...], ...] = (
    (
        "dp zero 1",
        "etp",
        "multi-token prediction",
        "tied embeddings",
        "sliding window",
        "document mask",
        "full recompute",
    ),
    (
        "pp zb_h1",
        "latent attention",
        "multi-token prediction",
        "selective recompute",
        "loss in chunks",
        "fused loss",
        "Muon",
    ),
    ("cp all_to_all", "experts", "etp", "latent attention", "selective recompute", "loss in chunks", "fused loss"),
    ("pp breadth_first", "etp", "full recompute", "loss in chunks", "fused loss", "dropout", "Muon"),
    ("pp breadth_first", "HSDP", "ep", "tied embeddings", "document mask", "loss in chunks", "fused loss"),
    ("cp ring", "pp dualpipe", "etp", "sliding window", "document mask", "fused loss", "Muon"),
    (
        "pp gpipe",
        "dp zero 3",
        "HSDP",
        "latent attention",
        "sliding window",
        "document mask",
        "selective recompute",
    ),
    (
        "tp without sequence parallelism",
        "pp gpipe",
        "dp zero 0",
        "tied embeddings",
        "full recompute",
        "dropout",
        "Muon",
    ),
    (
        "tp without sequence parallelism",
        "pp zb_v",
        "dp zero 2",
        "document mask",
        "selective recompute",
        "fused loss",
        "dropout",
    ),
    ("cp all_to_all", "pp dualpipe_v", "etp", "document mask", "loss in chunks", "fused loss", "Muon"),
    (
        "pp breadth_first",
        "dp zero 3",
        "ep",
        "latent attention",
        "multi-token prediction",
        "sliding window",
        "selective recompute",
    ),
    ("cp all_to_all", "pp gpipe", "dp zero 1", "ep", "etp", "loss in chunks", "dropout"),
    ("pp zb_h1", "dp zero 0", "etp", "sliding window", "document mask"),
    ("cp all_gather", "pp zb_v", "etp", "Muon"),
    ("tp", "tp without sequence parallelism", "cp ring", "pp breadth_first", "loss in chunks"),
    ("pp gpipe", "dp zero 2", "HSDP", "multi-token prediction"),
    ("tp without sequence parallelism", "pp dualpipe", "dp zero 3", "loss in chunks"),
    ("pp interleaved_1f1b", "etp", "Muon"),
    ("pp 1f1b", "fused loss"),
    ("tp without sequence parallelism", "HSDP", "dropout"),
    ("cp ring", "pp gpipe"),
    ("cp all_gather", "pp gpipe"),
    ("tp without sequence parallelism", "pp zb_h1"),
    ("cp all_to_all", "pp breadth_first"),
    ("tp without sequence parallelism", "pp interleaved_1f1b"),
    ("cp all_gather", "pp breadth_first"),
    ("pp dualpipe_v", "HSDP"),
    ("ep beside shared experts", "cp all_gather", "pp gpipe", "tied embeddings", "sliding window"),
    ("ep beside shared experts", "cp all_to_all", "pp interleaved_1f1b", "loss in chunks", "fused loss"),
    ("ep beside shared experts", "pp breadth_first", "document mask"),
    ("ep beside shared experts", "HSDP", "Muon"),
    (
        "capacity of experts",
        "loss for balance",
        "ep",
        "pp gpipe",
        "dp zero 2",
        "tied embeddings",
        "document mask",
    ),
    (
        "capacity of experts",
        "loss for balance",
        "pp interleaved_1f1b",
        "sliding window",
        "selective recompute",
        "fused loss",
    ),
    ("capacity of experts", "loss for balance", "pp breadth_first", "loss in chunks", "Muon"),
    ("capacity of experts", "loss for balance", "HSDP"),
    ("compiled layers", "pp gpipe", "dp zero 1", "etp", "fused loss"),
    ("compiled layers", "dp zero 2", "HSDP", "document mask", "sliding window", "loss in chunks", "Muon"),
    ("compiled layers", "pp breadth_first", "multi-token prediction", "latent attention"),
    ("compiled layers", "tp without sequence parallelism", "dropout"),
    ("compiled layers", "ep beside shared experts"),
    ("compiled layers", "capacity of experts", "loss for balance", "ep"),
    (
        "low precision",
        "tp",
        "pp interleaved_1f1b",
        "dp zero 1",
        "tied embeddings",
        "sliding window",
        "selective recompute",
        "fused loss",
    ),
    (
        "low precision",
        "tp without sequence parallelism",
        "pp gpipe",
        "dp zero 2",
        "multi-token prediction",
        "document mask",
        "full recompute",
        "loss in chunks",
    ),
    ("low precision", "cp all_gather", "pp breadth_first", "dp zero 3", "Muon"),
    ("low precision", "cp ring", "pp zb_h1", "dp zero 0", "latent attention"),
    ("low precision", "cp all_to_all", "pp zb_v", "dropout"),
    ("low precision", "pp dualpipe", "HSDP"),
    ("low precision", "pp dualpipe_v", "experts", "capacity of experts", "loss for balance"),
    ("low precision", "pp 1f1b", "tp", "etp"),
    ("low precision", "tp", "ep beside shared experts"),
)

CASES: dict[int, dict[str, dict[str, Any]]] = {}
for _names in SETS:
    _fields = fields_of(frozenset(_names))
    _world = 1
    for _axis in ("tp", "cp", "pp", "dp"):
        _world *= _fields.get(_axis, 1)
    CASES.setdefault(_world, {})[", ".join(_names)] = _fields
