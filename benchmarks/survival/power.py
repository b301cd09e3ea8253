"""Loss of power: the calls of a save that change the disk are recorded, and every state is built that a disk may
be in when power fails between two of them. A resume must find a whole commit in each, and the newest one from the
moment that the save is told as committed.

The disk promises no more than POSIX does: content is there after fsync of its file, names after fsync of their
directory; before that each change of a name is there or not, whatever came before or after it, and content is
none, half, all, or zeros. A rename is one change. As a control the same is done to a save whose fsyncs do
nothing: then states must be found without the commit.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from damage import complaint, memory_home, saved

from trainwright.train.checkpoint.directory import remove, retain, saves_in

CALLS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir")
MOST = 400
"""States of one moment; where there are more, so many are drawn."""

Operation = tuple[str, str, Any]
"""Kind, path, and bytes or the other path."""


@contextmanager
def recorded(into: list[Operation]) -> Iterator[None]:
    """Calls that change the disk, in order, by path."""
    plain = {name: getattr(os, name) for name in CALLS}
    paths: dict[int, str] = {}

    def path_of(path: Any, directory: int | None) -> str:
        return str(path) if directory is None else os.path.join(paths[directory], os.fspath(path))

    def opened(path: Any, flags: int, *rest: Any, dir_fd: int | None = None) -> int:
        where = path_of(path, dir_fd)
        is_new = flags & os.O_CREAT and not os.path.exists(where)
        descriptor = plain["open"](path, flags, *rest, dir_fd=dir_fd)
        paths[descriptor] = where
        if is_new:
            into.append(("create", where, None))
        return descriptor

    def write(descriptor: int, data: Any) -> int:
        done = plain["write"](descriptor, data)
        into.append(("write", paths[descriptor], bytes(data[:done])))
        return done

    def fsync(descriptor: int) -> None:
        plain["fsync"](descriptor)
        into.append(("fsync", paths[descriptor], None))

    def replace(source: Any, target: Any) -> None:
        plain["replace"](source, target)
        into.append(("replace", str(source), str(target)))

    def without(name: str) -> Any:
        def call(path: Any, *rest: Any, dir_fd: int | None = None) -> None:
            where = path_of(path, dir_fd)
            plain[name](path, *rest, dir_fd=dir_fd)
            into.append(("mkdir" if name == "mkdir" else "unlink", where, None))

        return call

    replaced = {"open": opened, "write": write, "fsync": fsync, "replace": replace}
    replaced |= {name: without(name) for name in ("unlink", "rmdir", "mkdir")}
    for name, each in replaced.items():
        setattr(os, name, each)
    try:
        yield
    finally:
        for name, each in plain.items():
            setattr(os, name, each)


@dataclass
class File:
    """Content that is durable, and what was written since."""

    durable: bytes = b""
    pending: bytes = b""

    def contents(self) -> list[bytes]:
        if not self.pending:
            return [self.durable]
        half = self.pending[: len(self.pending) // 2]
        return [
            self.durable,
            self.durable + half,
            self.durable + bytes(len(self.pending)),
            self.durable + self.pending,
        ]


@dataclass
class Directory:
    """Names that are durable, and changes since: of a name or two at once, to a node or to nothing."""

    durable: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)

    @property
    def now(self) -> dict[str, Any]:
        return self.with_changes(self.pending)

    def with_changes(self, changes: list[dict[str, Any]]) -> dict[str, Any]:
        names = dict(self.durable)
        for change in changes:
            for name, node in change.items():
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        return names


class Disk:
    """What may be there when power fails, from operations under `root`."""

    def __init__(self, root: Path) -> None:
        self._root, self._top = root, Directory()
        self._read(root, self._top)

    def _read(self, path: Path, into: Directory) -> None:
        for each in path.iterdir():
            node: Any = Directory() if each.is_dir() else File(each.read_bytes())
            into.durable[each.name] = node
            if each.is_dir():
                self._read(each, node)

    def _place(self, path: str) -> tuple[Directory, str]:
        *parents, name = Path(path).relative_to(self._root).parts
        node = self._top
        for each in parents:
            node = node.now[each]
        return node, name

    def _node(self, path: str) -> Any:
        if Path(path) == self._root:
            return self._top
        parent, name = self._place(path)
        return parent.now[name]

    def apply(self, operation: Operation, *, syncs: bool) -> None:
        kind, path, more = operation
        if kind == "write":
            self._node(path).pending += more
        elif kind == "fsync":
            if syncs:
                self._sync(self._node(path))
        else:
            parent, name = self._place(path)
            if kind == "replace":
                other, target = self._place(more)
                assert other is parent, "a rename within a directory is one change"
                parent.pending.append({name: None, target: parent.now[name]})
            else:
                made: Any = {"create": File, "mkdir": Directory}.get(kind, lambda: None)()
                parent.pending.append({name: made})

    def _sync(self, node: Any) -> None:
        if isinstance(node, File):
            node.durable, node.pending = node.durable + node.pending, b""
        else:
            node.durable, node.pending = node.now, []

    def states(self, chosen: random.Random) -> Iterator[dict[str, bytes | None]]:
        """Trees, as contents by path; None of a directory. Each once."""
        seen: set[int] = set()
        nodes = list(self._nodes(self._top))
        options = [self._options(node, chosen) for node in nodes]
        number = 1
        for each in options:
            number *= len(each)
        if number <= MOST:
            picks: Any = product(*options)
        else:
            picks = ([chosen.choice(each) for each in options] for _ in range(MOST))
        for pick in picks:
            tree: dict[str, bytes | None] = {}
            self._lay(self._top, "", {id(node): each for node, each in zip(nodes, pick, strict=True)}, tree)
            key = hash(tuple(sorted(tree.items(), key=lambda item: item[0])))
            if key not in seen:
                seen.add(key)
                yield tree

    def _nodes(self, node: Any) -> Iterator[Any]:
        """Those that may be there: by names that are durable, or came since."""
        yield node
        if isinstance(node, Directory):
            children = [*node.durable.values(), *(each for change in node.pending for each in change.values())]
            for child in {id(each): each for each in children if each is not None}.values():
                yield from self._nodes(child)

    def _options(self, node: Any, chosen: random.Random) -> list[Any]:
        if isinstance(node, File):
            return node.contents()
        changes = node.pending
        if len(changes) <= 6:
            subsets = list(product((False, True), repeat=len(changes)))
        else:
            subsets = [tuple(place < stop for place in range(len(changes))) for stop in range(len(changes) + 1)]
            subsets += [tuple(chosen.random() < 0.5 for _ in changes) for _ in range(64)]
        return [
            node.with_changes([change for change, is_there in zip(changes, each, strict=True) if is_there])
            for each in subsets
        ]

    def _lay(self, node: Any, path: str, picked: dict[int, Any], tree: dict[str, bytes | None]) -> None:
        if isinstance(node, File):
            tree[path] = picked[id(node)]
            return
        if path:
            tree[path] = None
        for name, child in picked[id(node)].items():
            self._lay(child, f"{path}/{name}" if path else name, picked, tree)


def newest_whole(tree: dict[str, bytes | None], scratch: Path) -> int:
    """The step that a resume finds in a state; 0: none."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (scratch / path).mkdir()
        else:
            (scratch / path).write_bytes(data)
    return next((save.step for save in saves_in(scratch) if save.is_committed and not complaint(save)), 0)


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    """A save after two commits, of which the older is removed; the first save of all; and one after which only it
    is kept; each once more without fsyncs."""
    chosen = random.Random(seed)
    for earlier, keep in ((2, 2), (0, 2), (2, 1)):
        for syncs in (True, False):
            home = Path(tempfile.mkdtemp(prefix="trainwright-power-", dir=memory_home()))
            try:
                yield _one(home, earlier, keep, syncs, share, chosen)
            finally:
                shutil.rmtree(home, ignore_errors=True)


def _one(home: Path, earlier: int, keep: int, syncs: bool, share: float, chosen: random.Random) -> dict[str, Any]:
    root = home / "commits"
    root.mkdir()
    for step in range(1, earlier + 1):
        saved(root, step)
    disk, operations = Disk(root), list[Operation]()
    with recorded(operations):
        save = saved(root, earlier + 1)
        committed_at = len(operations)
        retain(save, keep)
    # `saved` ends with the manifest's directory on the disk; what it removes of parts comes behind.
    last_sync = max(at for at, each in enumerate(operations[:committed_at]) if each[:2] == ("fsync", str(root)))
    found = {"states": 0, "unsafe": 0, "lost": 0}
    stride = max(1, round(1 / share))
    for at in range(len(operations) + 1):
        if at % stride == 0 or at == len(operations):
            for tree in disk.states(chosen):
                step = newest_whole(tree, home / "state")
                found["states"] += 1
                found["unsafe"] += step == 0 and earlier > 0
                found["lost"] += at > last_sync and step != save.step
        if at < len(operations):
            disk.apply(operations[at], syncs=syncs)
    for each in saves_in(root):
        remove(each)
    return {
        "kind": "save" if syncs else "control",
        "earlier": earlier,
        "keep": keep,
        "calls": len(operations),
        **found,
    }
