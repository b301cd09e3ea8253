"""Step times out of logs of other trainers; each format by the lines that its own program writes.

Megatron-LM   `training_log` in megatron/training/training.py: `iteration 43/ 100 | ... | elapsed time per
              iteration (ms): 5444.9 | ... | global batch size: 128 | ...`, a mean over the iterations since the
              line before. Megatron-Bridge and Megatron-DeepSpeed write it too.
NeMo          the progress lines of nemo/lightning and of NeMo 1: `train_step_timing in s: 0.03163` (or with `=`),
              with `iteration 121/149` or `global_step`, and in newer ones `global_batch_size: 1`.
TorchTitan    torchtitan/components/metrics.py: `step: 20 loss: ... memory: ... tps: 7,272 tflops: ... mfu: ...`;
              tps are tokens per second of one device, a mean over the steps since the line before.
DeepSpeed     deepspeed/utils/timer.py and runtime/engine.py: `[date] [INFO] [...] [Rank 0] step=40, skipped=2,
              ...`, whose dates say how long the steps between took; without dates `CurrSamplesPerSec=`, or the
              running mean `SamplesPerSec=`, of the whole batch."""

import re
import statistics
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from trainwright.spec.errors import InvalidSpec, reject
from trainwright.spec.explanation import LogSteps
from trainwright.spec.run import Run

WARM_UP_LINES = 2
"""Lines at the beginning that are left out: of compilation, allocation, first communication."""
FEWEST = 3
"""Steady lines that make a step time."""
STEADY = 0.25
"""How far from their median steady lines may lie, as a fraction of it; others are saves, evaluations,
stragglers."""

NUMBER = r"([\d.]+(?:[eE][+-]?\d+)?)"


class Line(NamedTuple):
    """What one line says."""

    iteration: int
    step_s: float
    global_batch: int | None


class Log(NamedTuple):
    """What a log says of steady steps."""

    framework: str
    steps: tuple[LogSteps, ...]
    """By the size of the batch, the run's last."""
    notes: tuple[str, ...]


def parse_log(text: str, name: str, run: Run) -> Log:
    """The steady steps of a log of `run`. `InvalidSpec` where no format fits, or the log is of another batch."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for framework, read in FORMATS.items():
        lines = list({line.iteration: line for line in reversed(list(read(plain, run)))}.values())[::-1]
        if lines:
            return _steady(lines, framework, name, run)
    known = "; ".join(f"{framework} ({SHOWN[framework]})" for framework in FORMATS)
    raise InvalidSpec(f"{name}: a log in no format that is known; expected are lines of {known}")


def _steady(lines: list[Line], framework: str, name: str, run: Run) -> Log:
    kept, left_out = [], []
    asked = run.recipe.global_batch
    by_batch: dict[int, list[float]] = {}
    for line in lines[WARM_UP_LINES:]:
        if line.step_s > 0:
            by_batch.setdefault(line.global_batch or asked, []).append(line.step_s)
    for batch, seconds in sorted(by_batch.items(), key=lambda item: (item[0] == asked, item[0])):
        median = statistics.median(seconds)
        near = [each for each in seconds if abs(each - median) <= STEADY * median]
        if len(near) >= FEWEST and 2 * len(near) > len(seconds):
            kept.append(LogSteps(global_batch=batch, step_s=statistics.median(near), steps=len(near)))
        else:
            left_out.append(batch)
    if not kept:
        found = f"{len(lines)} line{'s' if len(lines) > 1 else ''} of {framework}"
        raise InvalidSpec(
            f"{name}: no steady iterations: {found}, of which the first {WARM_UP_LINES} warm up; expected are at "
            f"least {FEWEST} more within {STEADY:.0%} of their median"
        )
    if kept[-1].global_batch != asked:
        batches = ", ".join(str(each.global_batch) for each in kept)
        reject("recipe.global_batch", asked, f"{name} has steady steps of {batches} only; name that run's file")
    notes = [f"global batch {batch}: too few steady lines, left out" for batch in left_out]
    return Log(framework, tuple(kept), tuple(notes))


def _megatron(text: str, run: Run) -> Iterator[Line]:
    for found in re.finditer(
        rf"iteration\s+(\d+)/\s*\d+.*?elapsed time per iteration \(ms\): *{NUMBER}(.*)", text
    ):
        yield Line(int(found[1]), float(found[2]) * 1e-3, _integer(r"global batch size: *(\d+)", found[0]))


def _nemo(text: str, run: Run) -> Iterator[Line]:
    for number, found in enumerate(re.finditer(rf"(.*?)train_step_timing in s *[:=] *{NUMBER}(.*)", text)):
        at = _integer(r"global_step *[:=] *(\d+)", found[0])
        at = _integer(r"iteration (\d+)/", found[0]) if at is None else at
        batch = _integer(r"global_batch_size *[:=] *(\d+)", found[0])
        yield Line(number if at is None else at, float(found[2]), batch)


def _torchtitan(text: str, run: Run) -> Iterator[Line]:
    for found in re.finditer(r"step: *(\d+) +loss: .*?tps: *([\d,]+)", text):
        tokens_per_s = int(found[2].replace(",", "")) * run.layout.world
        if tokens_per_s:
            yield Line(int(found[1]), run.recipe.tokens_per_step / tokens_per_s, None)


def _deepspeed(text: str, run: Run) -> Iterator[Line]:
    dated = [
        (int(found[2]), datetime.fromisoformat(found[1].replace(",", ".")))
        for found in re.finditer(
            r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\].*?\[Rank \d+\] step=(\d+), skipped=", text
        )
    ]
    dated = list({step: (step, when) for step, when in reversed(dated)}.values())[::-1]
    if len(dated) > 1:
        # The first date begins no interval, so that it stands for a line of warming up.
        yield Line(dated[0][0], 0.0, None)
        for (before, began), (after, ended) in pairwise(dated):
            if after > before:
                yield Line(after, (ended - began).total_seconds() / (after - before), None)
        return
    rates = list(re.finditer(rf"global_step=(\d+), .*?CurrSamplesPerSec={NUMBER}", text))
    rates = rates or list(re.finditer(rf"\b\d+/(\d+), .*?CurrSamplesPerSec={NUMBER}", text))
    rates = rates or list(re.finditer(rf"\b\d+/(\d+), SamplesPerSec={NUMBER}", text))
    for found in rates:
        if float(found[2]) > 0:
            yield Line(int(found[1]), run.recipe.global_batch / float(found[2]), None)


def _integer(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


FORMATS: dict[str, Callable[[str, Run], Iterator[Line]]] = {
    "Megatron-LM": _megatron,
    "NeMo": _nemo,
    "TorchTitan": _torchtitan,
    "DeepSpeed": _deepspeed,
}
"""Tried in this order: Megatron-DeepSpeed writes lines of both, and Megatron's say the time."""

SHOWN = {
    "Megatron-LM": "'elapsed time per iteration (ms):'",
    "NeMo": "'train_step_timing in s:'",
    "TorchTitan": "'step: ... loss: ... tps:'",
    "DeepSpeed": "'[Rank 0] step=..., skipped=' or 'SamplesPerSec='",
}
