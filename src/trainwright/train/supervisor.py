"""The supervisor of one node's workers: what `torchrun` does, with the workers' exit status kept, a watchdog
beside it, and a start anew after a failure.

The `torchrun` command turns every failure into status 1 and a banner. A run that was refused for bad input must
end with 2 and its one line, so the elastic launcher under it is called through its public interface, once for
each attempt: between two attempts it is decided which places of the node are used, and with how many replicas.
`launch.py` starts this in a process of its own. What happened is told on standard output in lines of JSON,
`{"fault": ...}`.
"""

import json
import logging
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.spec.run import Run
from trainwright.spec.supervision import FaultKind, FaultRecord, Supervision
from trainwright.train.faults.places import Places, stages_of, visible_devices
from trainwright.train.faults.shared import MEMORY, shared_directory
from trainwright.train.faults.watchdog import Watchdog

BAD_INPUT = 2
DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    status: int
    rank: int | None = None
    """That failed first."""
    is_signalled: bool = False
    """By someone who wants the whole run to end."""


def supervise(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m trainwright <arguments>` on `num_ranks` workers of this node; the exit status to pass on.

    If one fails, the others are ended. The status is 2 if any worker refused its input, else the first failure's.
    """
    _prepare()
    return _attempt(num_ranks, arguments).status


def supervise_run(run_text: str, arguments: Sequence[str], plants: str | None) -> int:
    """The same for a run with a table `supervision`, in JSON: after a failure its processes start again, and go on
    from the newest commit. `plants`: a file of faults to put into it."""
    _prepare()
    run = Run.parse(json.loads(run_text))
    assert run.supervision is not None
    with shared_directory() as directory:
        attempts = _Attempts(run, run.supervision, list(arguments), directory, plants)
        try:
            return attempts.until_the_end()
        except SignalException as signalled:
            return 128 + signalled.sigval


@dataclass
class _Attempts:
    """Of one call of the run."""

    run: Run
    policy: Supervision
    arguments: list[str]
    directory: Path
    """In shared memory, with a folder for each attempt."""
    plants: str | None
    number: int = 0
    furthest_step: int = 0
    fruitless: int = 0
    """Attempts in a row that did not come further."""
    places: Places = field(init=False)
    _devices: str | None = field(default_factory=lambda: os.environ.get(DEVICES))

    def __post_init__(self) -> None:
        self.places = Places(self.run, self.policy.lemon_after)

    def until_the_end(self) -> int:
        now, failed, known_s = self.run, None, 0.0
        while True:
            folder = self.directory / f"attempt-{self.number}"
            folder.mkdir()
            save_s = now.checkpoint.deadline_s if now.checkpoint is not None else 0.0
            watchdog = Watchdog(folder, stages_of(now), self.number, self.policy, tell, failed, save_s, known_s)
            if now.layout.dp < self.run.layout.dp and self.policy.grow_after_steps:
                watchdog.grow_at_step = self.furthest_step + self.policy.grow_after_steps
            watchdog.start()
            try:
                ended = _attempt(now.layout.world, self._arguments(now, folder))
            finally:
                watchdog.stop()
            if ended.status in (0, BAD_INPUT) or ended.is_signalled:
                return ended.status
            failed, before = (watchdog.reached, time.monotonic()), now
            self._count(watchdog)
            if watchdog.has_grown:
                now = self._grown(watchdog)
            else:
                failure = self._failure(watchdog, ended)
                if failure.kind == "diverged":
                    return ended.status
                if failure.kind == "corrupt":  # what was kept in memory since may be too; commits are compared
                    shutil.rmtree(self.directory / MEMORY, ignore_errors=True)
                if self.fruitless > self.policy.max_restarts:
                    text = f"no attempt of the last {self.fruitless} came beyond step {self.furthest_step}"
                    note(f"{text}, as supervision.max_restarts has it: the run is given up")
                    return ended.status
                now = self._next(now, failure)
            # Other layouts have other acts.
            known_s = watchdog.learned_s if now.layout == before.layout else 0.0
            self.number += 1

    def _arguments(self, now: Run, folder: Path) -> list[str]:
        places = self.places.of(now)
        if self.places.excluded:
            os.environ[DEVICES] = visible_devices(self._devices, places)
        elif self._devices is not None:
            os.environ[DEVICES] = self._devices
        else:
            os.environ.pop(DEVICES, None)
        more = ["--watched", str(folder)]
        if self.plants is not None:
            more += ["--plants", self.plants]
        if now.layout.dp != self.run.layout.dp:
            more += ["--set", f"layout.dp={now.layout.dp}"]
        return [*self.arguments, *more]

    def _count(self, watchdog: Watchdog) -> None:
        self.fruitless = 0 if watchdog.reached > self.furthest_step else self.fruitless + 1
        self.furthest_step = max(watchdog.reached, self.furthest_step)

    def _failure(self, watchdog: Watchdog, ended: Ended) -> FaultRecord:
        """What ended an attempt, told."""
        if watchdog.hang is not None:
            return watchdog.hang
        for each in watchdog.ranks:
            reason = each.reason()
            if reason is not None:
                return self._tell(reason["kind"], reason["rank"], reason["text"], watchdog.reached)
        rank, seen = ended.rank, watchdog.seen.get(-1 if ended.rank is None else ended.rank)
        how = signal_text(ended.status)
        text = f"rank {rank} ended by {how}" if rank is not None else f"a rank ended by {how}"
        return self._tell(
            "died", rank, f"{text} {seen.place if seen else 'before its first step'}", watchdog.reached
        )

    def _next(self, now: Run, failure: FaultRecord) -> Run:
        """The run to go on with."""
        if failure.rank is None:
            return now
        place = self.places.of(now)[failure.rank]
        if not self.places.failed(place):
            return now
        times = self.places.failures[place]
        fewer = self.places.without(place)
        if fewer is None:
            why = "but the run can't do with fewer dp replicas, so it stays in use"
            self._tell(
                "excluded", failure.rank, f"place {place} of this node failed {times} times: a lemon, {why}", 0
            )
            return now
        text = f"place {place} of this node failed {times} times: a lemon, and is left out"
        self._tell("excluded", failure.rank, text, 0)
        if fewer.layout.dp != now.layout.dp:
            what = f"the run goes on with {fewer.layout.dp} dp replicas instead of {now.layout.dp}"
            self._tell("shrunk", None, f"{what}, and the same global batch", 0)
        return fewer

    def _grown(self, watchdog: Watchdog) -> Run:
        run = self.places.all_again()
        self._tell("grown", None, f"the run goes on with all {run.layout.dp} dp replicas", watchdog.reached)
        return run

    def _tell(self, kind: FaultKind, rank: int | None, text: str, step: int) -> FaultRecord:
        record = FaultRecord(kind=kind, attempt=self.number, rank=rank, step=step, text=text, at_s=time.time())
        tell(record)
        return record


def tell(record: FaultRecord) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps({"fault": record.plain()}) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """For a person, at once."""
    sys.stdout.write(f"note: {text}\n")
    sys.stdout.flush()


def signal_text(status: int) -> str:
    """Of an exit status as a shell has it: `SIGKILL`, or `status 1`."""
    number = status - 128
    return signal.Signals(number).name if number in list(signal.Signals) else f"status {status}"


def _prepare() -> None:
    logging.disable(logging.CRITICAL)  # This process has nothing to say that the workers haven't said.
    # The launcher's own store serves the workers' rendezvous; PyTorch 2.13 hands restarted gloo workers stale
    # addresses from it unless each attempt makes its own store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def _attempt(num_ranks: int, arguments: Sequence[str]) -> Ended:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "trainwright", *arguments)
    except ChildFailedError as error:
        statuses = [failure.exitcode for failure in error.failures.values()]
        rank, failure = error.get_first_failure()
        first = failure.exitcode
        status = BAD_INPUT if BAD_INPUT in statuses else first if first > 0 else 128 - first
        return Ended(status, rank)
    except SignalException as signalled:
        return Ended(128 + signalled.sigval, is_signalled=True)
    return Ended(0)
