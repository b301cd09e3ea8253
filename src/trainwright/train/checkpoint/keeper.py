"""Saving and resuming around the training loop: every rank has a keeper and calls it alike.

A save is begun between two steps. The ranks first agree, in one small sum, that the one before has ended on all of
them; if it hasn't, no new one is begun, for a slow storage must not hold up the steps: at most one is in flight. A
save that fails is told, and leaves every earlier commit as it was; the next one is tried like any other.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.supervision import GuardState
from trainwright.train.checkpoint.directory import FOLDER, Save, locked, save_of, saves_in
from trainwright.train.checkpoint.frequency import Frequency
from trainwright.train.checkpoint.identity import require_same_data, require_same_run
from trainwright.train.checkpoint.manifest import FORMAT, Damaged, DataMark, Manifest, Part
from trainwright.train.checkpoint.memory import MemoryTier, Recovered
from trainwright.train.checkpoint.reading import Reader
from trainwright.train.checkpoint.restoring import restore
from trainwright.train.checkpoint.saving import OTHER_FAILED, Writing, commit, write_part
from trainwright.train.checkpoint.snapshot import Snapshot
from trainwright.train.checkpoint.state import held_blocks, held_weights
from trainwright.train.checkpoint.writers import WritePlan, planned
from trainwright.train.faults.attendant import Attendant
from trainwright.train.faults.reasons import Diverged
from trainwright.train.faults.shared import MEMORY
from trainwright.train.parallelize import Trainer

POLL_S = 0.02
"""Between questions whether a save has ended, where that is waited for."""
GIVING_UP_S = 1.0
"""For the first rank to stop waiting for the part of one that has failed."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int
    """Steps that are done."""
    samples: int
    """Global number of the next sample."""
    guard: GuardState = field(default_factory=GuardState)


def directory_of(policy: Checkpointing | None, out_dir: Path) -> Path:
    """Where a run's commits lie."""
    return Path(policy.directory) if policy is not None and policy.directory else out_dir / FOLDER


@dataclass
class Keeper:
    """See the file's first paragraph. `policy` None: nothing is saved."""

    trainer: Trainer
    root: Path
    policy: Checkpointing | None
    mark: DataMark
    schedule_steps: int
    tell: Tell
    """For notes to the user; of the first rank."""
    attendant: Attendant
    generation: int = 1
    _rejected: frozenset[str] = frozenset()
    _frequency: Frequency = field(default_factory=lambda: Frequency(Checkpointing()))
    _plan: WritePlan | None = None
    _snapshot: Snapshot | None = None
    _writing: Writing | None = None
    _save: Save | None = None
    _told_busy: bool = False
    _told_failure: bool = False
    _memory: MemoryTier | None = None
    _next_interval: int = 0
    """What the first rank made of the last save; 0: nothing yet."""

    def __post_init__(self) -> None:
        if self.policy is None:
            return
        self._frequency = Frequency(self.policy)
        watched = self.attendant.watched
        if self.policy.memory_every_steps and watched is not None:
            replicas, shared = self.policy.memory_replicas, watched.shared / MEMORY
            self._memory = MemoryTier(self.trainer, shared, replicas, self.schedule_steps)
            self._note(f"memory tier: {self._memory.text}")

    # Resuming

    def resume(self, *, is_rolled_back: bool = False) -> Position:
        """Load the newest commit that is whole and this run's; the beginning where there is none. Raises
        `InvalidSpec` where that commit is of another run or a newer format, or all commits are damaged."""
        saves = self.agreed(saves_in(self.root) if self._is_first else [])
        self.generation = 1 + max((save.generation for save in saves), default=0)
        rejected: dict[str, str] = {}
        if self._memory is not None and not is_rolled_back:
            newest = max((save.step for save in saves if save.is_committed), default=0)
            recovered = self._memory.recover(self.agreed(newest))
            if recovered is not None:
                return self._from_memory(recovered)
        for save in saves:
            outcome = self._loaded(save)
            if isinstance(outcome, Manifest):
                self._pass_over(rejected)
                self._note(f"resumed at step {outcome.step} from {self.root / save.name}")
                if outcome.schedule_steps != self.schedule_steps:
                    over = f"{self.schedule_steps} steps, and was over {outcome.schedule_steps}"
                    self._note(f"the learning rate takes its course over {over}")
                self.attendant.resumed(outcome.guard, is_rolled_back=is_rolled_back)
                return Position(outcome.step, outcome.samples, self.attendant.guard_state)
            rejected[save.name] = outcome
        why = ""
        if self._is_first and any(save.is_committed for save in saves):
            worst = next(iter(rejected.values()))
            why = f"none of its {len(saves)} saves is whole ({worst}); restore one, or choose a new --out"
        why = self.agreed(why)
        if why:
            reject("checkpoint.directory", str(self.root), why)
        self._pass_over(rejected)
        return Position(0, 0)

    def _from_memory(self, recovered: Recovered) -> Position:
        seconds = max(self._of_all(recovered.seconds))
        peers = f", {recovered.from_peers} of its ranks from a peer's" if recovered.from_peers else ""
        self._note(f"resumed at step {recovered.step} from memory{peers}, in {seconds:.3f} s")
        self.attendant.resumed(recovered.guard, is_rolled_back=False)
        return Position(recovered.step, recovered.samples, self.attendant.guard_state)

    def rolled_back(self, why: str, samples: int) -> Position:
        """Load the newest commit again, and go on from there with the sample of that number. Raises `Diverged`, on
        all ranks, where there is none."""
        assert self.policy is not None
        self._ended(self.policy.deadline_s)
        self._plan = self._snapshot = None
        there = any(save.is_committed for save in saves_in(self.root)) if self._is_first else False
        if not self.agreed(there):
            raise Diverged(f"{why}, and there is no commit to roll back to")
        if self._memory is not None:
            self._memory.forget()
        position = self.resume(is_rolled_back=True)
        self._note(f"{why}: rolled back to step {position.step}, and on with sample {samples}")
        return replace(position, samples=samples)

    def _pass_over(self, rejected: dict[str, str]) -> None:
        self._rejected = frozenset(rejected)
        for complaint in rejected.values():
            self._note(f"{complaint}; that save is passed over")

    def _loaded(self, save: Save) -> Manifest | str:
        """The manifest of a commit that all ranks have loaded, or what is wrong with it."""
        manifest: Manifest | None = None
        complaint, refusal, other = "", "", ""
        try:
            # A rank looks at what it reads; the first one at what nobody reads too.
            manifest = save.look_over() if self._is_first else save.manifest()
            where = str(self.root / save.name)
            require_same_run(manifest.run, self.trainer.run, where)
            require_same_data(manifest, self.mark, self.trainer.run.data.path, where)
            with Reader(save, manifest.parts) as reader:
                restore(self.trainer, reader, manifest)
        except Damaged as error:
            complaint = str(error)
        except InvalidSpec as error:
            refusal, other = str(error), self._other_tensor(manifest)
        # One sum first: texts travel only where something is wrong.
        failed, refused = self._summed([float(bool(complaint)), float(bool(refusal))])
        if refused:
            said, others = self._of_all(refusal), self._of_all(other)
            raise InvalidSpec(next(filter(None, said)) + next(filter(None, others), ""))
        if failed:
            return next(filter(None, self._of_all(complaint)))
        assert manifest is not None
        return manifest

    def _other_tensor(self, manifest: Manifest | None) -> str:
        """The first weight of this rank that a commit has in another shape, or not at all, for people."""
        if manifest is None:
            return ""
        for held in held_weights(self.trainer):
            entry = manifest.tensors.get(held.name)
            if entry is None:
                return f" ({held.name} is not in it)"
            if entry.shape != held.whole_shape:
                return f" ({held.name} is {list(entry.shape)} there and {list(held.whole_shape)} here)"
        return ""

    # Saving

    def after_step(self, position: Position, step_s: float, *, is_last: bool) -> None:
        """Called when a step is done: save if it is time to, and always after the last one."""
        if self.policy is None:
            return
        if self._memory is not None and (position.step % self.policy.memory_every_steps == 0 or is_last):
            self._memory.save(position.step, position.samples, position.guard)
            if is_last:
                self._memory.wait()
        self._frequency.stepped(step_s, is_writing=self._writing is not None and self._writing.is_alive())
        if not self._frequency.is_due(position.step) and not is_last:
            return
        patience_s = self.policy.deadline_s if is_last or not self.policy.asynchronous else 0.0
        if not self._ended(patience_s):
            if not self._told_busy:
                earlier = self._save.step if self._save is not None else 0
                self._note(f"step {position.step} is not saved: step {earlier} is still being written")
            self._told_busy = True
        else:
            self._begin(position)
            if is_last or not self.policy.asynchronous:
                self._ended(self.policy.deadline_s)
        if is_last and self._is_unsaved(position):
            what = f"step {position.step}, the last, could not be saved; see the note above"
            reject("checkpoint.directory", str(self.root), what)

    def _begin(self, position: Position) -> None:
        self.attendant.before_save(position.step)
        mesh = self.trainer.mesh
        if self._plan is None or self._snapshot is None:
            self._plan = planned(held_blocks(self.trainer), mesh.rank, mesh.layout.world)
            self._snapshot = Snapshot(self._plan.files, mesh.device)
        begun_s = time.perf_counter()
        self._snapshot.take(held_blocks(self.trainer))
        blocked_s = time.perf_counter() - begun_s
        self._save = save_of(self.root, position.step, self.generation)
        self._told_busy = self._told_failure = False
        self._next_interval = 0
        self._writing = Writing(partial(self._written, self._save, position, blocked_s))
        self._writing.start()
        self._frequency.saved(blocked_s)

    def _written(self, save: Save, position: Position, snapshot_s: float, writing: Writing) -> None:
        """What the thread does."""
        assert self._plan is not None
        assert self._snapshot is not None
        assert self.policy is not None
        write_part(save, self._plan, self._snapshot, self.trainer.mesh.rank, snapshot_s)
        if self._is_first:
            world = self.trainer.mesh.layout.world
            made = partial(self._manifest, position)
            commit(save, world, made, self.policy.keep, self._rejected, writing, self.policy.deadline_s)

    def _manifest(self, position: Position, parts: tuple[Part, ...]) -> Manifest:
        assert self._plan is not None
        return Manifest(
            format=FORMAT,
            generation=self.generation,
            step=position.step,
            samples=position.samples,
            guard=position.guard,
            schedule_steps=self.schedule_steps,
            written_at_s=time.time(),
            data=self.mark,
            run=self.trainer.run.plain(),
            tensors=self._plan.tensors,
            parts=parts,
        )

    def _ended(self, patience_s: float) -> bool:
        """Whether the last save has ended on every rank, waited for as long as `patience_s`; what failed is
        told."""
        until_s = time.monotonic() + patience_s
        while True:
            writing = self._writing
            is_busy = writing is not None and writing.is_alive()
            has_failed = writing is not None and not is_busy and writing.error is not None
            if self._is_first and writing is not None and not is_busy and not self._next_interval:
                self._next_interval = self._frequency.next_interval(writing.whole_s)
            # The first rank's clock counts for all, so that they agree on when to stop.
            is_over = self._is_first and time.monotonic() > until_s
            flags = [float(has_failed), float(is_busy), float(self._next_interval), float(is_over)]
            failed, busy, interval, over = self._summed(flags)
            if not busy:
                break
            if failed and writing is not None and not writing.is_given_up.is_set():
                writing.is_given_up.set()
                until_s = max(until_s, time.monotonic() + GIVING_UP_S)
            elif over:
                if failed:
                    self._tell_failure()
                return False
            time.sleep(POLL_S)
        if failed:
            self._tell_failure()
            self._remove_rest()
        elif self._writing is not None and self._save is not None:
            self.attendant.committed(self._save.step)
        if interval:
            self._frequency.interval = int(interval)
        self._writing = None
        return True

    def _tell_failure(self) -> None:
        """Once for each save."""
        if self._told_failure:
            return
        self._told_failure = True
        assert self._save is not None
        said = self._of_all(self._writing.error or "" if self._writing is not None else "")
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text and text != OTHER_FAILED]
        what = "is saved, but what is older could not be removed"
        if not self._save.is_committed:
            what = "could not be saved, and earlier commits are as they were"
        self._note(f"step {self._save.step} {what}: {'; '.join(texts)}")

    def _remove_rest(self) -> None:
        """Of a save that failed, when nobody writes it any more."""
        if self._is_first and self._save is not None and not self._save.is_committed:
            with suppress(OSError):
                shutil.rmtree(self._save.path)

    def _is_unsaved(self, position: Position) -> bool:
        is_there = bool(self._save and self._save.step == position.step and self._save.is_committed)
        return not self.agreed(is_there)

    # Ranks among themselves

    @property
    def _is_first(self) -> bool:
        return self.trainer.mesh.rank == 0

    def _note(self, text: str) -> None:
        if self._is_first:
            self.tell(text)

    def _summed(self, values: list[float]) -> list[float]:
        return self.trainer.mesh.sum_over_world(values)

    def agreed(self, value: Any) -> Any:
        """The first rank's value."""
        if self.trainer.mesh.layout.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _of_all(self, value: Any) -> list[Any]:
        if self.trainer.mesh.layout.world == 1:
            return [value]
        values: list[Any] = [None] * self.trainer.mesh.layout.world
        dist.all_gather_object(values, value)
        return values


@contextmanager
def keeping(keeper: Keeper) -> Iterator[Keeper]:
    """Hold the directory for as long as the run goes on; only where something is saved, and by the first rank."""
    with ExitStack() as stack:
        why = ""
        if keeper.policy is not None and keeper.trainer.mesh.rank == 0:
            try:
                stack.enter_context(locked(keeper.root))
            except InvalidSpec as error:
                why = str(error)
        why = keeper.agreed(why)
        if why:
            raise InvalidSpec(why)
        yield keeper
