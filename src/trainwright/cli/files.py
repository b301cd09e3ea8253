"""Files: what is read is checked to be a text of sane size, what is written appears whole or not at all.

Texts are written to a temporary file beside their target, which then takes the target's name. Also here, as
they come from the environment: the directories for what the user keeps and for what can be made again.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainwright.spec import toml
from trainwright.spec.base import Noun
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.run import Run
from trainwright.spec.units import MIB

N = TypeVar("N", bound=Noun)

LARGEST_TEXT_BYTES = 64 * MIB
"""Beyond it a file is refused unread: no run, cluster or ledger comes near."""


def read_text(path: Path) -> str:
    """The text of a file; `InvalidSpec` where it is a directory, too large or not UTF-8."""
    if path.is_dir():
        raise InvalidSpec(f"{path}: is a directory; name a file")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise InvalidSpec(f"{path}: no such file") from None
    except ValueError as error:
        raise InvalidSpec(f"{str(path)!r}: not a path: {error}") from None
    if len(content) > LARGEST_TEXT_BYTES:
        raise InvalidSpec(f"{path}: is larger than {LARGEST_TEXT_BYTES} bytes; it can't be a file of this program")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidSpec(f"{path}: not a text in UTF-8 (byte {error.start})") from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. A device or pipe is written to directly."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InvalidSpec(f"{path}: is a directory; name a file")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        _write_and_close(os.open(target, os.O_WRONLY), text, path)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _write_and_close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), text, path)
        os.replace(temporary, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_and_close(descriptor: int, text: str, path: Path) -> None:
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def require_place(path: Path) -> None:
    """Refuse a file that can't be written, before the work whose result it is to hold."""
    if path.is_dir():
        raise InvalidSpec(f"{path}: is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise InvalidSpec(f"{path}: there is no directory {path.parent}; make it, or name a file elsewhere")


def make_directory(path: Path) -> None:
    """Make a directory and those above it; `InvalidSpec` where a file stands in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidSpec(f"{path}: a file is in the way of this directory; name another with --out") from None


def read_noun(path: Path, noun: type[N]) -> N:
    """The noun that a TOML file says."""
    return toml.read(read_text(path), noun, str(path))


OPS = "recipe.recompute_ops="


def read_run(path: Path, assignments: list[str] | None = None) -> Run:
    """The run that a file says, with `--set` assignments applied, cross-examined."""
    said = read_noun(path, Run)
    try:
        run = toml.with_assignments(said, assignments or []).check()
        if run.recipe.recompute != "selective" and any(text.startswith(OPS) for text in assignments or []):
            # In a file it may wait for another recompute; who sets it now expects that it does something.
            why = f"needs recompute=selective, not {run.recipe.recompute}; set that too"
            reject("recipe.recompute_ops", list(run.recipe.recompute_ops), why)
        return run
    except InvalidSpec as error:
        raise InvalidSpec(f"{path}: {error}") from None


def json_text(report: Mapping[str, Any]) -> str:
    """One JSON document; `InvalidSpec` where a number went beyond what numbers can hold."""
    try:
        return json.dumps(report, indent=2, allow_nan=False)
    except ValueError:
        raise InvalidSpec("the result has numbers beyond 1e308; look for a field that is far too large") from None


def config_directory() -> Path:
    """Where a user's own clusters are kept: `$XDG_CONFIG_HOME/trainwright`, else `~/.config/trainwright`."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def cache_directory() -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/trainwright`, else `~/.cache/trainwright`."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable, "")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / fallback) / "trainwright"
