"""A real text that every machine has: the running Python's standard library, tokenized by a BPE trained on it.

The sources (without tests and installed packages) are read in sorted order; a byte-level BPE of `vocab_size`
is trained on them; each file ends with an end-of-text token. The result is a directory of token shards, named
by the content's hash, so that a second call finds it. It is written beside its place and renamed into it: a
build that is interrupted leaves nothing that looks finished.
"""

import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainwright.spec.errors import reject
from trainwright.train.shards import INDEX, write_shards

END_OF_TEXT = "<|endoftext|>"
SKIPPED = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "ensurepip",
        "turtledemo",
        "pydoc_data",
    }
)
MAX_BYTES = 8_000_000
"""Enough text for a demonstration; bounds the build to seconds on one core."""
FILES_PER_STEP = 64
"""Encoded between two reports of progress."""

Progress = Callable[[str, float], None]
"""Told what is being done and which fraction of all of it is done."""


def build_corpus(cache: Path, vocab_size: int = 4096, on_progress: Progress = lambda what, done: None) -> Path:
    """Directory of token shards of the standard library under `cache`, built if it isn't there.

    It also holds `tokenizer.json`. Raises `InvalidSpec` where `cache` can't be written.
    """
    on_progress("reading the standard library", 0.0)
    texts = list(_texts(Path(sysconfig.get_path("stdlib"))))
    # The first versions of this cache didn't say which token ends a document: they have other names.
    digest = hashlib.sha256(END_OF_TEXT.encode())
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    target = cache / f"python-stdlib-{vocab_size}-{digest.hexdigest()[:12]}"
    if (target / INDEX).is_file():
        on_progress("found in the cache", 1.0)
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    except OSError as error:
        reject("cache", str(cache), f"can't be written ({error.strerror}); choose a directory that can")
    try:
        _build(building, texts, vocab_size, on_progress)
        _put_in_place(building, target)
    except OSError as error:
        reject("cache", str(cache), f"can't be written ({error.strerror}); free space or choose another directory")
    finally:
        shutil.rmtree(building, ignore_errors=True)
    on_progress("done", 1.0)
    return target


def _texts(root: Path) -> Iterator[str]:
    """Source files below `root` in sorted order, up to `MAX_BYTES`; undecodable ones are left out."""
    paths: list[Path] = []
    for directory, below, names in os.walk(root):
        # What is skipped isn't walked: installed packages are most of an environment's files.
        below[:] = [name for name in below if name not in SKIPPED]
        paths += (Path(directory, name) for name in names if name.endswith(".py"))
    taken = 0
    for path in sorted(paths):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        taken += len(text)
        if taken > MAX_BYTES:
            return
        yield text


def _build(directory: Path, texts: list[str], vocab_size: int, on_progress: Progress) -> None:
    on_progress("training the tokenizer", 0.1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), FILES_PER_STEP):
        on_progress("encoding", 0.5 + 0.5 * start / len(texts))
        for encoding in tokenizer.encode_batch_fast(texts[start : start + FILES_PER_STEP]):
            pieces.append(np.array([*encoding.ids, end], dtype=np.uint32))
    tokenizer.save(str(directory / "tokenizer.json"))
    write_shards(
        directory, [np.concatenate(pieces)], tokenizer.get_vocab_size(), "Python standard library sources", end
    )


def _put_in_place(building: Path, target: Path) -> None:
    """Rename, unless another process finished the same corpus first."""
    try:
        building.rename(target)
    except OSError:
        if not (target / INDEX).is_file():
            raise
