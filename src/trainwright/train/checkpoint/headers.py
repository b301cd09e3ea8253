"""The header of a safetensors file: names, kinds and places of tensors that follow end to end, as JSON behind its
length (github.com/huggingface/safetensors, "Format"). Nothing here loads PyTorch."""

import json
import math
from collections.abc import Iterable
from typing import Any

WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1}
"""Bytes of a value, by the format's names."""
HEADER_MULTIPLE = 64
"""Headers are filled up with spaces, so that data are aligned."""


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """Of tensors by name, kind and shape, in their order: the header, and where in the file each begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, starts = 0, []
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        starts.append(at)
        at += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE)
    whole = len(text).to_bytes(8, "little") + text
    return whole, [start + len(whole) for start in starts]


def block_title(name: str, start: tuple[int, ...], shape: tuple[int, ...], whole_shape: tuple[int, ...]) -> str:
    """Of a block of a tensor: `NAME@0:16,32:64`, or the name alone where it is the whole."""
    return name if shape == whole_shape else f"{name}@{slices_text(start, shape)}"


def slices_text(start: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """`0:16,32:64`: a block's rows and columns in the whole."""
    return ",".join(f"{first}:{first + size}" for first, size in zip(start, shape, strict=True))
