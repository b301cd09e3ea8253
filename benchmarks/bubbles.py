"""The bubble of a pipeline as its ranks see it, against the one that the planner plays with the same acts.

Four processes run steps of the trainer's executor, rows, transfers, split backward and all. What a stage computes
is a sleep of a stated length for each kind of act: four ranks that computed would share this machine's cores, and
wait for those instead of for one another. The acts are then timed, and the planner plays the schedule with the
medians. A bubble is the part of the ranks' time, from the first act to the last, in which no act runs. The mark is
5 points between the two, in the median step.

    python benchmarks/bubbles.py [steps] [--json]
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainwright.plan.pipeline import Pipe, makespan
from trainwright.spec.layout import Layout
from trainwright.spec.schedule import SCHEDULES
from trainwright.train.clock import Clock
from trainwright.train.data import Batch
from trainwright.train.head_loss import HeadLoss
from trainwright.train.mesh import Mesh, Worker, joined, leave
from trainwright.train.parallel.pipeline import Pipeline
from trainwright.train.parallel.replicated import Replicated

PP, MICROBATCHES, WIDTH, SEQ_LEN = 4, 12, 8, 4
CHUNKS = {"1f1b": 1, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}
FORWARD_S, INPUT_S, WEIGHT_S = 0.040, 0.048, 0.032
"""Of all that a rank holds, shared out over its chunks."""
WARM_UP = 1
MARK_POINTS = 5.0


class Sleep(torch.autograd.Function):
    """The tensor as it is, after so many seconds forward and so many backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Stage(nn.Module):
    """A product of which forward, input gradient and weight gradient take their time."""

    def __init__(self, chunks: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.is_first, self.is_last, self.spec = first, last, SimpleNamespace(d_model=WIDTH)
        self.share = 1 / chunks
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.embedding = nn.Parameter(torch.eye(WIDTH)) if first else None
        self.head = nn.Linear(WIDTH, WIDTH, bias=False) if last else None
        self.later: dict[str, nn.Module] = {}

    def tie(self) -> None:
        pass

    def forward(self, x: torch.Tensor, documents_BS: None = None, later_BS: Any = (), loss: Any = None) -> Any:
        if self.embedding is not None:
            x = F.embedding(x, self.embedding)
        x = Sleep.apply(x, FORWARD_S * self.share, INPUT_S * self.share)
        x = F.linear(x, Sleep.apply(self.weight, 0.0, WEIGHT_S * self.share))
        return x if loss is None else loss(self.head, [x])


class Stopwatch(Clock):
    """A clock that also remembers when compute ran: once in each act, in the order of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.acts_s: list[tuple[float, float]] = []

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        began_s = time.perf_counter()
        with super().of(cause):
            yield
        if cause == "compute":
            self.acts_s.append((began_s, time.perf_counter()))


class Bubble(NamedTuple):
    """Of one schedule, as parts of a rank's time."""

    seen: float
    played: float

    @property
    def off_points(self) -> float:
        return 100 * abs(self.seen - self.played)


def one_schedule(name: str, steps: int, mesh: Mesh) -> Bubble:
    chunks, schedule = CHUNKS[name], SCHEDULES[name]
    rows, placement = schedule.rows(PP, chunks, MICROBATCHES), schedule.stages(PP, chunks)
    own, ends = placement[mesh.rank], schedule.num_stages(PP, chunks) - 1
    pieces: Any = [Stage(chunks, first=stage == 0, last=stage == ends) for stage in own]
    watch = Stopwatch()
    data_parallel = Replicated(pieces, mesh, torch.float32, torch.float32, watch, overlap=True)
    pipeline = Pipeline(
        pieces,
        rows,
        placement,
        mesh,
        data_parallel,
        watch,
        activation_dtype=torch.float32,
        sequence_parallel=False,
        overlap=True,
        loss=HeadLoss(),
        told=(),
    )
    tokens = [torch.zeros((1, SEQ_LEN), dtype=torch.long)] * MICROBATCHES
    batch = Batch(tokens, tokens, MICROBATCHES * SEQ_LEN)
    seen, durations_s = [], {}
    for step in range(WARM_UP + steps):
        watch.acts_s.clear()
        mesh.barrier()
        pipeline.run(batch)
        data_parallel.after_update()
        everyone: list[Any] = [None] * PP
        dist.all_gather_object(everyone, watch.acts_s)
        if step < WARM_UP:
            continue
        whole_s = max(acts[-1][1] for acts in everyone) - min(acts[0][0] for acts in everyone)
        busy_s = sum(end - began for acts in everyone for began, end in acts)
        seen.append(1 - busy_s / (PP * whole_s))
        for rank, acts in enumerate(everyone):
            for act, (began, end) in zip(rows[rank], acts, strict=True):
                durations_s.setdefault((act.kind, placement[rank][act.chunk]), []).append(end - began)
    medians_s = {key: statistics.median(values) for key, values in durations_s.items()}
    return Bubble(statistics.median(seen), played(name, medians_s))


def played(name: str, medians_s: dict[tuple[str, int], float]) -> float:
    """The planner's bubble with acts that take so long, by kind and stage."""
    stages = range(SCHEDULES[name].num_stages(PP, CHUNKS[name]))
    forward_s = [medians_s["F", stage] for stage in stages]
    if SCHEDULES[name].splits_backward:
        input_s, weight_s = ([medians_s[kind, stage] for stage in stages] for kind in "IW")
    else:
        input_s, weight_s = [medians_s["B", stage] for stage in stages], [0.0 for _ in stages]
    pipe = Pipe(name, PP, CHUNKS[name], MICROBATCHES, forward_s, input_s, weight_s, send_s=0.0)
    busy_s = MICROBATCHES * (sum(forward_s) + sum(input_s) + sum(weight_s))
    return 1 - busy_s / (PP * makespan(pipe))


def main(steps: int, *, as_json: bool) -> None:
    with joined(Layout(pp=PP)) as mesh:
        bubbles = {name: one_schedule(name, steps, mesh) for name in CHUNKS}
    if mesh.rank == 0 and as_json:
        plain = {name: {**each._asdict(), "off_points": each.off_points} for name, each in bubbles.items()}
        print(json.dumps(plain))
    elif mesh.rank == 0:
        print(f"{PP} ranks, {MICROBATCHES} microbatches, median of {steps} steps; the mark is {MARK_POINTS:.0f}")
        print(f"{'schedule':12} {'seen':>8} {'played':>8} {'off':>12}")
        for name, each in bubbles.items():
            print(f"{name:12} {each.seen:8.1%} {each.played:8.1%} {each.off_points:5.1f} points")
    leave(int(max(each.off_points for each in bubbles.values()) > MARK_POINTS))


if __name__ == "__main__":
    if Worker.from_environment().world == 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PP), *sys.argv]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([sys.executable, *launch], env=environment, check=False).returncode)
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers[0] if numbers else 5, as_json="--json" in sys.argv)
