"""What a commit holds, as JSON that carries its own digest.

The text is canonical: reading it and writing it again gives the same bytes, or it has been changed. A part is what
one rank wrote; the manifest is made of all parts.
"""

import json
from typing import Any

from trainwright.spec.base import Natural, NonNegative, Noun, Sequence
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.supervision import GuardState
from trainwright.train.checkpoint.files import digest_of

MANIFEST = "manifest.json"
FORMAT = 2
"""1 had no `guard`."""


class Damaged(Exception):
    """A commit that is not what was written; `str()` says which file and what is wrong with it."""


class Piece(Noun):
    """A block of a tensor, in a file."""

    tensor: str
    start: Sequence[Natural]
    """Of the block in the whole tensor, along each dim."""
    shape: Sequence[Natural]
    file: str
    offset_bytes: Natural
    length_bytes: Natural
    digests: Sequence[str]
    """Of each `files.BLOCK_BYTES` of it."""


class TensorEntry(Noun):
    """A tensor of the whole state."""

    dtype: str
    """As safetensors names it."""
    shape: Sequence[Natural]


class FileEntry(Noun):
    """A file of a commit: a header, then pieces end to end."""

    name: str
    length_bytes: Natural
    header_bytes: Natural
    header_digest: str


class Part(Noun):
    """What one rank wrote."""

    generation: Natural
    rank: Natural
    files: Sequence[FileEntry]
    pieces: Sequence[Piece]
    snapshot_s: NonNegative
    """For which the step was held up."""
    write_s: NonNegative


class DataMark(Noun):
    """What tells one stream of tokens from another."""

    num_tokens: Natural
    digest: str
    """Of tokens at its beginning, middle and end."""


class Manifest(Noun):
    """A commit: everything that a resume needs beside the tensors, and where the tensors are."""

    format: Natural
    generation: Natural
    step: Natural
    """Steps that are done. Random numbers are functions of the run's seed, the step and the sample's number, so
    that no generator's state is kept."""
    samples: Natural
    """Global number of the next sample."""
    guard: GuardState = GuardState()
    schedule_steps: Natural
    """Over which the learning rate takes its course."""
    written_at_s: NonNegative
    """Seconds since 1970."""
    data: DataMark
    run: dict[str, Any]
    """As in run.toml."""
    tensors: dict[str, TensorEntry]
    parts: Sequence[Part]

    @property
    def num_bytes(self) -> int:
        return sum(file.length_bytes for part in self.parts for file in part.files)


def text_of(noun: Noun) -> bytes:
    """Canonical JSON of a part or a manifest, with its digest."""
    content = noun.model_dump(mode="json", exclude_none=True)
    return _canonical({"content": content, "digest": digest_of(_canonical(content))})


def manifest_of(text: bytes, where: str) -> Manifest:
    """Raises `Damaged` where the text is not what was written, `InvalidSpec` where a newer program wrote it."""
    content = _content(text, where)
    form = content.get("format")
    if isinstance(form, int) and form > FORMAT:
        reject(
            where, form, f"is a newer format than this program's {FORMAT}; resume with the program that wrote it"
        )
    try:
        return Manifest.parse(content)
    except InvalidSpec as error:
        raise Damaged(f"{where}: {error}") from None


def part_of(text: bytes, where: str) -> Part:
    return Part.parse(_content(text, where))


def _content(text: bytes, where: str) -> dict[str, Any]:
    try:
        outer = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged(f"{where}: is no JSON") from None
    content = outer.get("content") if isinstance(outer, dict) else None
    if not isinstance(content, dict):
        raise Damaged(f"{where}: is no manifest")
    if outer.get("digest") != digest_of(_canonical(content)) or _canonical(outer) != text:
        raise Damaged(f"{where}: does not have the digest that it carries")
    return content


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
