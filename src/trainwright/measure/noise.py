"""Whether a machine was quiet enough to be measured: how far repetitions of one call lie apart, and how much of a
core its ranks had while they were no more than the cores.

Each call is repeated, in two places of the session: what is compared are the quartiles of all its repetitions,
over their median. Half of the calls scatter by more, half by less, so that neither a single outlier nor a single
call decides. A program that takes a core all the time scatters nothing; but then ranks that should have a core
each don't.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from trainwright.measure.points import median
from trainwright.spec.errors import reject
from trainwright.spec.record import Sample

MOST_NOISE = 0.3
"""What is accepted where nobody says more."""

LOCAL = ("matmul", "attention_forward", "attention_backward", "copy", "elementwise", "update", "launch")
"""Operations whose seconds are the machine's alone; collectives wait for the system's scheduler, and scatter by
it."""


def noise(samples: Sequence[Sample], cores: int) -> float:
    """The larger of both: scatter, and the part of a core that ranks lacked where each could have one. The latter
    is taken at the number of ranks that lacked most."""
    return max(_scatter(samples), _lacking(samples, cores))


def _scatter(samples: Iterable[Sample]) -> float:
    """The median, over calls, of the distance between quartiles over the median."""
    seconds: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.op in LOCAL:
            call = (sample.op, sample.precision, sample.size, sample.work, sample.busy_ranks)
            seconds[call].extend(sample.seconds)
    scatter = [np.subtract(*np.percentile(each, (75, 25))) / np.median(each) for each in seconds.values()]
    return median(scatter) if scatter else 0.0


def _lacking(samples: Iterable[Sample], cores: int) -> float:
    """The median, over calls of so many ranks, of what was lacking."""
    lacking: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.op in LOCAL and sample.busy_ranks <= cores:
            lacking[sample.busy_ranks].append(1 - sample.on_core)
    return max((median(each) for each in lacking.values()), default=0.0)


def require_quiet(samples: Sequence[Sample], cores: int, most: float) -> None:
    """`InvalidSpec` where the machine was noisier."""
    found = noise(samples, cores)
    if found > most:
        reject(
            "noise",
            f"{found:.0%}",
            "this machine is too noisy to measure: half of its calls scatter by more, or ranks had so much less "
            f"than a core; the most is {most:.0%}: stop other programs, or accept it with --max-noise",
        )
