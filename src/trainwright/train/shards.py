"""Token shards on disk: flat files of unsigned integers, and an index that says how to read them.

A directory holds `index.json` and the `.bin` files that it names, little-endian uint16 (vocabularies up to
65,536) or uint32. The index carries the vocabulary size and each file's token count, so that a truncated file
or one of another vocabulary is found at the door and not as a wrong loss. It may name the token that ends a
document.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.spec.errors import reject

INDEX = "index.json"
FORMAT = "trainwright-shards-1"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Shards:
    """Opened shards: memory-mapped arrays in order, read as one stream of `num_tokens` tokens."""

    directory: Path
    vocab_size: int
    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    starts: tuple[int, ...]
    """Stream position of each shard's first token, and of the end."""
    end_of_document: int | None = None
    """The token that each document ends with, where the index says it."""

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def window(self, start: int, length: int) -> np.ndarray:
        """`length` tokens of the stream from `start` on, as int64; raises `InvalidSpec` on a token that the
        index's vocabulary doesn't have."""
        pieces: list[np.ndarray] = []
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        end = start + length
        while start < end:
            offset = start - self.starts[shard]
            piece = self.arrays[shard][offset : offset + end - start]
            if piece.size and int(piece.max()) >= self.vocab_size:
                at = offset + int(np.argmax(piece >= self.vocab_size))
                reject(
                    "data.path",
                    str(self.directory),
                    f"token {int(self.arrays[shard][at])} at position {at} of {self.names[shard]} is not below "
                    f"the index's vocab_size={self.vocab_size}; tokenize again or correct {INDEX}",
                )
            pieces.append(piece)
            start += piece.size
            shard += 1
        return np.concatenate(pieces).astype(np.int64)


def open_shards(directory: Path) -> Shards:
    """Map the shards of `directory`; raises `InvalidSpec` where they are missing, malformed or truncated."""
    path = directory / INDEX
    if not path.is_file():
        what = "is empty" if directory.is_dir() and not any(directory.iterdir()) else f"has no {INDEX}"
        reject("data.path", str(directory), f"{what}; name a directory of token shards")
    index = _read_index(path)
    dtype = DTYPES[index["dtype"]]
    names, arrays, starts = [], [], [0]
    for entry in index["shards"]:
        file, tokens = directory / entry["file"], entry["tokens"]
        if not file.is_file():
            remedy = f"{file.name} is named in {INDEX} but missing; restore it or correct the index"
            reject("data.path", str(directory), remedy)
        held = file.stat().st_size
        if held != tokens * dtype.itemsize:
            reject(
                "data.path",
                str(directory),
                f"{file.name} holds {held} bytes where {INDEX} says {tokens} tokens of {dtype.itemsize} bytes; it "
                "is truncated or not the file that was indexed: write it again",
            )
        names.append(entry["file"])
        arrays.append(np.memmap(file, dtype=dtype, mode="r") if tokens else np.empty(0, dtype))
        starts.append(starts[-1] + tokens)
    end = index.get("end_of_document")
    return Shards(directory, index["vocab_size"], tuple(names), tuple(arrays), tuple(starts), end)


def write_shards(
    directory: Path, shards: list[np.ndarray], vocab_size: int, source: str, end_of_document: int | None = None
) -> None:
    """Write token arrays as shards of an existing, empty `directory`. The index goes last."""
    name = "uint16" if vocab_size <= 65536 else "uint32"
    entries = []
    for number, tokens in enumerate(shards):
        file = f"shard-{number:05d}.bin"
        tokens.astype(DTYPES[name]).tofile(directory / file)
        entries.append({"file": file, "tokens": int(tokens.size)})
    index = {"format": FORMAT, "dtype": name, "vocab_size": vocab_size, "source": source, "shards": entries}
    if end_of_document is not None:
        index["end_of_document"] = end_of_document
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _read_index(path: Path) -> dict[str, Any]:
    """The index as a checked dict."""
    try:
        index = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        reject("data.path", str(path.parent), f"{INDEX} can't be read as JSON ({error}); write the shards again")
    remedy = f"{INDEX} is no index of format {FORMAT}; write the shards with this program"
    if not isinstance(index, dict) or index.get("format") != FORMAT or index.get("dtype") not in DTYPES:
        reject("data.path", str(path.parent), remedy)
    entries, vocab_size = index.get("shards"), index.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1 or not isinstance(entries, list):
        reject("data.path", str(path.parent), remedy)
    end = index.get("end_of_document", 0)
    if not isinstance(end, int) or not 0 <= end < vocab_size:
        reject(
            "data.path", str(path.parent), f"{INDEX} has end_of_document={end!r}, which is no token; correct it"
        )
    for entry in entries:
        tokens = entry.get("tokens") if isinstance(entry, dict) else None
        if not isinstance(tokens, int) or tokens < 0 or not isinstance(entry.get("file"), str):
            reject("data.path", str(path.parent), remedy)
    return index
