"""What attends to failures on this rank while the loop goes on: its beats, its guard, and digests of replicas.

The loop calls it around each step; where nobody supervises and nothing is guarded it does nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from trainwright.spec.chaos import Planted
from trainwright.spec.run import Run
from trainwright.spec.supervision import GuardState
from trainwright.train.checkpoint.state import kept_moments, make_moments
from trainwright.train.data import Batch
from trainwright.train.faults.beats import Pulse
from trainwright.train.faults.collectives import last_entered
from trainwright.train.faults.guard import Judge
from trainwright.train.faults.plant import Plants, read_plants
from trainwright.train.faults.reasons import RunEnded
from trainwright.train.faults.replicas import Replicas
from trainwright.train.parallelize import StepResult, Trainer


@dataclass
class Watched:
    """Where a supervised rank beats, and what is planted in the run."""

    pulse: Pulse
    planted: Sequence[Planted] = ()
    commits: Path = Path()
    """Where commits lie, for what is planted in them."""

    @property
    def shared(self) -> Path:
        """The supervisor's directory in memory, which outlives this rank."""
        return self.pulse.directory.parent

    def phase(self, name: str) -> None:
        self.pulse.change(name)


def watched_rank(directory: Path, rank: int, plants: Path | None, commits: Path) -> Watched:
    """This rank as its supervisor watches it in `directory`."""
    return Watched(Pulse(directory, rank), read_plants(plants) if plants is not None else (), commits)


@dataclass
class Attendant:
    """See the file's first paragraph."""

    trainer: Trainer
    watched: Watched | None
    tell: Callable[[str], None]
    """For notes to the user; of the first rank."""
    _plants: Plants | None = None
    _judge: Judge | None = field(default=None)

    def __post_init__(self) -> None:
        if self._run.guard is not None:
            self._judge = Judge(self._run.guard)
        if self.watched is None:
            return
        self.trainer.clock.on_change = self.watched.pulse.change
        self.watched.pulse.collectives = last_entered(self.trainer.mesh)
        if self.watched.planted:
            self._plants = Plants(self.trainer, self.watched.planted, self.watched.shared, self.watched.commits)

    @property
    def guard_state(self) -> GuardState:
        """What a commit keeps of the guard."""
        return self._judge.state if self._judge is not None else GuardState()

    def resumed(self, state: GuardState, *, is_rolled_back: bool) -> None:
        """The state is that of a commit."""
        if self._judge is None:
            return
        self._judge.state = state
        if is_rolled_back:
            self._judge.rolled_back()

    def begin(self, step: int) -> None:
        """Step `step`, from 1, begins."""
        if self.watched is not None:
            self.watched.pulse.begin_step(step)
        if self._plants is not None:
            self._plants.before(step)

    def step(self, step: int, batch: Batch, lr: float) -> tuple[StepResult, float]:
        """The step's work, and the rate at which it learned: 0 where its update was left out. Raises `RollBack`
        and `Diverged`, on all ranks."""
        judge = self._judge
        if judge is None:
            return self.trainer.step(batch, lr), lr
        result, lr = self.trainer.gradients(batch), judge.rate(lr)
        complaint = judge.complaint(result.loss, result.grad_norm)
        if not complaint:
            self.trainer.update(result, lr)
            judge.good(result.loss, result.grad_norm)
            return result, lr
        self.trainer.leave_out()
        said = judge.bad(step, complaint)
        if not any(moments for _, _, moments in kept_moments(self.trainer)):
            make_moments(self.trainer, 0)  # else a commit would lack what later ones have
        self._note(said)
        return result, 0.0

    def end(self, step: int, seconds: dict[str, float]) -> None:
        """It has ended, and took this rank so long by cause. Raises `Corrupt`, on all ranks."""
        if self._plants is not None:
            self._plants.after(step)
        if self.watched is not None:
            self.watched.pulse.end_step(step, seconds)
        every = self._digest_every
        if every and step % every == 0:
            self._replicas.compare(step)
        if self.watched is not None:
            self.watched.phase("saving")

    def before_save(self, step: int) -> None:
        """State that replicas disagree about is not saved."""
        if self._digest_every and step % self._digest_every:
            self._replicas.compare(step)

    def committed(self, step: int) -> None:
        """A commit of `step` is there."""
        if self._judge is not None:
            self._judge.saved()
        if self.watched is not None:
            self.watched.pulse.saved(step)

    @contextmanager
    def leaving_reasons(self) -> Iterator[None]:
        """What this rank ends for, left for the supervisor."""
        try:
            yield
        except RunEnded as ended:
            if self.watched is not None:
                rank = ended.ranks[0] if len(ended.ranks) == 1 else None
                self.watched.pulse.say_why(ended.kind, str(ended), rank)
            raise
        except Exception:
            if self.watched is not None:
                self.watched.phase("failing")
            raise

    def _note(self, text: str) -> None:
        if self.trainer.mesh.rank == 0:
            self.tell(text)

    @property
    def _run(self) -> Run:
        return self.trainer.run

    @property
    def _digest_every(self) -> int:
        return self._run.supervision.digest_every_steps if self._run.supervision is not None else 0

    @cached_property
    def _replicas(self) -> Replicas:
        return Replicas(self.trainer)
