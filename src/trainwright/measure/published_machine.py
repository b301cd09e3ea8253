"""What a published run ran on: the catalogue's cluster for its GPU, what the source says of the network, and the
kind of software that its framework was at the time."""

import re
from typing import NamedTuple

from trainwright.measure.published_row import Row
from trainwright.spec.errors import nearest, reject

CLUSTERS = {
    "A100": "a100-80gb-sxm",
    "A800": "a800",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "H100": "h100-sxm",
    "H20": "h20",
    "H200": "h200",
    "H800": "h800",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
    "V100": "v100-32gb-sxm",
}
"""The catalogue's cluster of each GPU that a table may name, in its usual form."""

NAMES = ("A100-40GB", "A100-80GB", "A100-PCIe", "H100-PCIe", *CLUSTERS)
"""What is offered where a name is not known."""

DEVICES_PER_NODE = {"gb200-nvl72": 4, "gb300-nvl72": 4}
"""Of the catalogue's clusters; 8 where there is no entry."""

GBIT = 1e9 / 8
"""Bytes per second of 1 Gb/s."""

KNOWN_NETWORKS = {
    "a3 mega": 200 * GBIT,
    "a3 ultra": 400 * GBIT,
    "gcp a4": 400 * GBIT,
    "p4d": 50 * GBIT,
    "p5en": 400 * GBIT,
    "p5": 400 * GBIT,
    "hdr": 200 * GBIT,
    "ndr": 400 * GBIT,
    "edr": 100 * GBIT,
    "xdr": 800 * GBIT,
    "omnipath": 100 * GBIT,
    "omni-path": 100 * GBIT,
}
"""Bytes per second of one NIC, by a word of the interconnect's description: cloud machines (GCP A3 and A4, AWS P4
and P5: bandwidth of the node over 8 GPUs) and generations of InfiniBand (per port)."""


class Machine(NamedTuple):
    cluster: str
    overrides: dict[str, int | float]


def machine_of(row: Row) -> Machine:
    """Raises `InvalidSpec` where the GPU is not known."""
    cluster = _cluster(row)
    default = DEVICES_PER_NODE.get(cluster, 8)
    per_node = row.count("gpus_per_node", default)
    overrides: dict[str, int | float] = {}
    if per_node != default:
        overrides |= {"node.devices": per_node, "node.concurrent_devices": per_node}
        if cluster not in DEVICES_PER_NODE:
            overrides["fabric.link_domain"] = per_node
            overrides["fabric.nics_per_node"] = per_node
    overrides |= network_of(row.text("interconnect"), per_node)
    return Machine(cluster, overrides)


def _cluster(row: Row) -> str:
    """The cluster whose GPU's name is part of the text."""
    text = re.sub(r"[^A-Z0-9]+", " ", row.text("gpu").upper())
    name = next((each for each in sorted(CLUSTERS, key=len, reverse=True) if _is_in(each, text)), None)
    if name is None:
        reject("gpu", row.text("gpu"), f"is no GPU of the catalogue; {nearest(row.text('gpu'), NAMES)}")
    cluster = CLUSTERS[name]
    notes = row.lower("notes")
    if name == "A100" and re.search(r"\b40 ?G", text):
        return "a100-40gb-sxm"
    if name in ("A100", "H100") and ("PCI" in text or "NVL" in text):
        return "a100-80gb-pcie" if name == "A100" else "h100-pcie"
    if name == "B200" and row.says("source", "simumax"):
        return "b200-capped"  # SimuMax's kernels, measured on the machine of its runs
    is_96gb = "hbm2e" in notes or "500 w" in notes or "96GB" in text.replace(" ", "")
    if name == "H100" and (is_96gb or row.says("framework", "torchtitan")):
        return "h100-96gb-hbm2e"
    if name == "A100" and not re.search(r"\b80 ?G", text):
        row.assume("the source doesn't say which A100; 80 GB is assumed")
    return cluster


def _is_in(name: str, text: str) -> bool:
    """H20 isn't in H200, nor B200 in GB200; H100 is in 8xH100."""
    return re.search(rf"(?<![A-WYZ]){name}(?!\d)", text) is not None


def network_of(text: str, per_node: int) -> dict[str, int | float]:
    """Fields of the cluster that an interconnect's description states: `4x100 Gb/s`, `1600 Gb/s per node`,
    `400 Gb/s per GPU`, `8x50 GB/s`, or a known word. Nothing where it states none."""
    lower = text.lower()
    counted = re.search(
        r"(\d+)\s*x\s*(?:nvidia |mellanox |cx\d |connectx-\d )?(\d+)\s*(gb/s|gbps|gbit/s|g\b)", lower
    )
    if counted:
        unit = 1e9 if "GB/s" in text[counted.start() : counted.end()] else GBIT
        return _nics(int(counted[1]), float(counted[2]) * unit)
    stated = re.search(r"(\d+(?:\.\d+)?)\s*(gb/s|gbps|gbit/s|tb/s|tbps)[^,;()]*per (node|gpu|host|server)", lower)
    if stated:
        rate = float(stated[1]) * (1000 if stated[2].startswith("t") else 1) * GBIT
        return _nics(per_node, rate if stated[3] == "gpu" else rate / per_node)
    word = next((each for each in KNOWN_NETWORKS if re.search(rf"\b{each}(?![a-z])", lower)), None)
    if word is None:
        return {}
    count = re.search(rf"(\d+)\s*x\s*{word}", lower)
    return _nics(int(count[1]) if count else per_node, KNOWN_NETWORKS[word])


def _nics(number: int, bytes_per_s: float) -> dict[str, int | float]:
    return {"fabric.nics_per_node": number, "fabric.nic_bytes_per_s": bytes_per_s}


def software_of(row: Row) -> str:
    """The part of `data/software.toml` for a framework at its time; `generic` where none is known, `untuned` where
    the source says so of itself."""
    if re.search(r"early \w* ?port|untuned|not tuned|support run|not optimi[sz]ed", row.lower("notes")):
        row.assume("the source calls the run an early port or untuned")
        return "untuned"
    framework, source, year = row.lower("framework"), row.lower("source"), row.count("year", 2024)
    both = f"{framework} {source}"
    named = {
        "llm-foundry-2023": ("foundry", "composer"),
        "internevo-2023": ("internevo",),
        "fms-2023": ("fms", "foundation-model-stack"),
        "torchtitan": ("torchtitan",),
        "automodel-2026": ("automodel",),
        "jax": ("jax", "maxtext", "paxml", "t5x", "levanter"),
        "simumax-2025": ("simumax",),
    }
    for software, words in named.items():
        if any(word in both for word in words):
            return software
    if "deepspeed" in framework and "megatron" not in framework:
        return "deepspeed-2020" if year <= 2021 else "generic"
    if "megatron-deepspeed" in framework or "neox" in framework:
        return "bloom-2022"
    if "megatron" in framework or "nemo" in framework:
        return _megatron(framework, source, year)
    return "generic-2023" if year <= 2023 else "generic"


def _megatron(framework: str, source: str, year: int) -> str:
    """Megatron-LM, Megatron-Core and what is built on it (NeMo, Megatron-Bridge) by time: the container's version
    where the source gives it, else the year."""
    if "atorch" in framework or "primus" in framework:
        return "generic-2023" if year <= 2023 else "generic"
    if year <= 2022:
        return "megatron-2021"
    version = re.search(r"(?<!\d)(2\d)\.(0\d|1[0-2])(?!\d)", source)
    at = (2000 + int(version[1]), int(version[2])) if version else None
    if "bridge" in framework:
        if at is None:  # verification cards are of mid-2026
            at = (year, 6)
        later = "megatron-bridge-2026" if at < (2026, 6) else "megatron-bridge-2026-06"
        return "megatron-bridge-2025" if at < (2026, 1) else later
    if "nemo" in framework or at is not None:
        at = at or (year, 6)
        return "nemo-2024" if at < (2025, 5) else "nemo-2025"
    return "nemo-2024" if year <= 2024 else "megatron-bridge-2025"
