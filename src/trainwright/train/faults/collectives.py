"""The last collective of each group that this rank entered, as PyTorch's flight recorder has them: the one file
that reads it. It records where TORCH_FR_BUFFER_SIZE is set (`train/launch.py`)."""

import json
from collections.abc import Callable
from typing import Any

from torch._C import _distributed_c10d

from trainwright.train.mesh import Mesh

AXES = ("tp", "cp", "pp", "dp", "ep")
"""Whose names people know."""


def last_entered(mesh: Mesh) -> Callable[[], list[dict[str, Any]]]:
    """A function that gives `group`, its `axis`, `name` and `number` of each, the newest last."""
    # One group serves several axes where they divide the ranks alike.
    axes: dict[str, str] = {}
    for axis in sorted(mesh.groups, key=lambda each: each not in AXES):
        axes.setdefault(mesh.groups[axis].group_name, axis)

    def entered() -> list[dict[str, Any]]:
        text = _distributed_c10d._dump_fr_trace_json()  # pyright: ignore[reportAttributeAccessIssue]
        entries = json.loads(text).get("entries", [])
        entries = [each for each in entries if not each["is_p2p"]]
        found: dict[str, dict[str, Any]] = {}
        for entry in sorted(entries, key=lambda each: each["record_id"]):
            group = entry["process_group"][0]
            name, number = entry["profiling_name"].partition(":")[2], entry["collective_seq_id"]
            found.pop(group, None)  # so that the newest is last
            axis = axes.get(group, "all ranks")
            found[group] = {"group": group, "axis": axis, "name": name, "number": number}
        return list(found.values())

    return entered
