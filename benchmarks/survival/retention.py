"""Retention: random sequences of saves, of saves that fail, of crashes and of resumes, over commits of one rank
that keep 1 to 3. Before every call of the system that removes or renames something, and after every act, the
directory is read to the last byte: from the first commit on there must be one that is whole.

A save fails by a full disk at a drawn call; a crash is an exception that nothing catches, at a drawn call, after
which processes start again with the next generation. A commit may rot in between: one that is not the newest, as
the last copy can't be saved by any rule.
"""

import errno
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_crashes import CALLS, held_of, manifest_of, plans
from damage import complaint, memory_home

from trainwright.train.checkpoint.directory import Save, save_of, saves_in
from trainwright.train.checkpoint.saving import Writing, commit, write_part
from trainwright.train.checkpoint.snapshot import Snapshot

SEQUENCES, ACTS = 10_000, 8
CALLS_OF_A_SAVE = 40
"""About; a call is drawn from so many."""
REMOVING = ("replace", "unlink", "rmdir")
PARTS = 20
"""In which results are told."""


class Crash(BaseException):
    """The process is gone."""


@contextmanager
def disturbed(before: Callable[[str, int], None]) -> Iterator[None]:
    """Calls of the system that change the disk tell their name and number before they are made."""
    plain, seen = {name: getattr(os, name) for name in CALLS}, 0

    def around(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            before(name, seen)
            return plain[name](*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, around(name))
    try:
        yield
    finally:
        for name, each in plain.items():
            setattr(os, name, each)


def is_safe(root: Path) -> bool:
    """Whether a commit is whole to the last byte."""
    return any(save.is_committed and not complaint(save) for save in saves_in(root))


class Sequence:
    """One sequence over a directory; `unsafe` counts moments without a whole commit."""

    def __init__(self, root: Path, chosen: random.Random) -> None:
        self.root, self._chosen = root, chosen
        self._keep = chosen.randint(1, 3)
        (self._plan,) = plans(1)
        self._step, self._generation = 0, 1
        self._has_saved = False
        self.acts: Counter[str] = Counter()
        self.looks = self.unsafe = 0

    def act(self) -> None:
        kind = self._chosen.choice(("save", "save", "fail", "crash", "rot"))
        self.acts[kind] += 1
        getattr(self, f"_{kind}")()
        self._look()

    def _look(self) -> None:
        if self._has_saved:
            self.looks += 1
            self.unsafe += not is_safe(self.root)

    def _saved(self, fatal: BaseException | None, at: int) -> str | None:
        """A save, in which `fatal` is raised at call `at`; why it failed."""
        self._step += 1
        save = save_of(self.root, self._step, self._generation)
        snapshot = Snapshot(self._plan.files, torch.device("cpu"))
        snapshot.take(held_of(0, 1, self._step))
        made = partial(manifest_of, save, self._plan)
        is_looking = False

        def before(name: str, number: int) -> None:
            nonlocal is_looking
            if is_looking:
                return
            if fatal is not None and number == at:
                raise fatal
            if name in REMOVING:
                is_looking = True  # reading opens files too
                self._look()
                is_looking = False

        def work(writing: Writing) -> None:
            write_part(save, self._plan, snapshot, 0, 0.0)
            commit(save, 1, made, self._keep, frozenset(), writing, 1.0)

        writing = Writing(work)
        with disturbed(before):
            writing.run()
        if writing.error is None:
            self._has_saved = True
        elif not save.is_committed:
            shutil.rmtree(save.path, ignore_errors=True)  # as the keeper does
        self._has_saved = self._has_saved or save.is_committed
        return writing.error

    def _save(self) -> None:
        assert self._saved(None, 0) is None

    def _fail(self) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._saved(full, self._chosen.randint(1, CALLS_OF_A_SAVE))

    def _crash(self) -> None:
        try:
            self._saved(Crash(), self._chosen.randint(1, CALLS_OF_A_SAVE))
        except Crash:
            save: Save | None = next(iter(saves_in(self.root)), None)
            self._has_saved = self._has_saved or (save is not None and save.is_committed)
            self._generation += 1
            whole = [each.step for each in saves_in(self.root) if each.is_committed and not complaint(each)]
            self._step = max(whole, default=0)

    def _rot(self) -> None:
        whole = [each for each in saves_in(self.root) if each.is_committed and not complaint(each)]
        if len(whole) > 1:
            path = sorted(whole[-1].path.glob("*.safetensors"))[0]
            data = bytearray(path.read_bytes())
            data[self._chosen.randrange(len(data))] ^= 1
            path.write_bytes(data)


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    """What happened in so many sequences."""
    wanted = max(1, round(SEQUENCES * share))
    chosen = random.Random(seed)
    home = Path(tempfile.mkdtemp(prefix="trainwright-retention-", dir=memory_home()))
    try:
        for part in range(PARTS):
            numbers = range(wanted * part // PARTS, wanted * (part + 1) // PARTS)
            acts: Counter[str] = Counter()
            looks = unsafe = 0
            for number in numbers:
                sequence = Sequence(home / str(number), chosen)
                for _ in range(ACTS):
                    sequence.act()
                acts += sequence.acts
                looks, unsafe = looks + sequence.looks, unsafe + sequence.unsafe
                shutil.rmtree(sequence.root, ignore_errors=True)
            yield {"sequences": len(numbers), "looks": looks, "unsafe": unsafe, "acts": dict(acts)}
    finally:
        shutil.rmtree(home, ignore_errors=True)
