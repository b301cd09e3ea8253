"""Whether a commit is of this run: what may not differ, and what is wrong where it does. Nothing here loads
PyTorch.

Layout, cluster, budget, batch and the way of computing may change, as may the rates of learning: the state means
the same. Model, data, seed, the length of samples and what the optimizer keeps may not.
"""

import numpy as np

from trainwright.spec.errors import reject
from trainwright.spec.run import Run
from trainwright.train.checkpoint.files import digest_of
from trainwright.train.checkpoint.manifest import DataMark, Manifest
from trainwright.train.shards import Shards

SAME = (
    "model",
    "data.source",
    "data.vocab_size",
    "data.document_mask",
    "recipe.seq_len",
    "recipe.seed",
    "recipe.optimizer.name",
    "recipe.optimizer.moments",
)
"""Fields of a run, or tables of them, that a resume needs equal."""
COSMETIC = ("model.name",)
MARK_TOKENS = 4096


def require_same_run(kept: dict[str, object], run: Run, where: str) -> None:
    """Raise `InvalidSpec` at the first field of `run` that the commit's run, as a plain dict, has otherwise."""
    theirs, ours = _leaves(kept), _leaves(run.plain())
    # A model's layers are listed before its counts, so that the message names what a user set.
    for field in dict.fromkeys([*ours, *theirs]):
        if field in COSMETIC or not any(field == each or field.startswith(f"{each}.") for each in SAME):
            continue
        if theirs.get(field) != ours.get(field):
            _refuse(field, ours.get(field, "none"), theirs.get(field, "none"), where)
    masters = ["fp64" if each.get("recipe.precision") == "fp64" else "fp32" for each in (theirs, ours)]
    if masters[0] != masters[1]:
        _refuse("recipe.precision", ours["recipe.precision"], theirs.get("recipe.precision"), where)


def require_same_data(manifest: Manifest, mark: DataMark, path: str, where: str) -> None:
    """Raise `InvalidSpec` where the stream of tokens is not the one that was trained on."""
    if manifest.data == mark:
        return
    kept = manifest.data.num_tokens
    what = f"{kept} tokens, not {mark.num_tokens}" if kept != mark.num_tokens else "other tokens"
    why = f"is not the data of {where}, which has {what}; name that data, or a new --out"
    reject("data.path", path, why)


def mark_of(shards: Shards) -> DataMark:
    """Of a stream of tokens."""
    length = min(MARK_TOKENS, shards.num_tokens)
    last = shards.num_tokens - length
    seen = np.concatenate([shards.window(start, length) for start in (0, last // 2, last)])
    return DataMark(num_tokens=shards.num_tokens, digest=digest_of(seen.astype("<i8").tobytes()))


def _refuse(field: str, ours: object, theirs: object, where: str) -> None:
    reject(field, ours, f"but {where} was saved with {theirs}; set it back, or choose a new --out")


def _leaves(value: object, path: str = "") -> dict[str, object]:
    """Every field of nested tables and lists by its path."""
    if isinstance(value, dict):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(number), each) for number, each in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, object] = {}
    for key, each in items:
        found |= _leaves(each, f"{path}.{key}" if path else key)
    return found
