"""Whether a machine was quiet enough to be measured: how far repetitions of one call lie apart.

Each call is repeated, in two places of the session: what is compared are the quartiles of all its repetitions,
over their median. Half of the calls scatter by more than `noise`, half by less, so that neither a single outlier
nor a single call decides.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from trainwright.measure.points import median
from trainwright.spec.errors import reject
from trainwright.spec.record import Sample

MOST_NOISE = 0.3
"""What is accepted where nobody says more: quiet machines scatter by 2% to 10%, one on which another program takes
a core now and then by 50% and more (docs/log.md)."""

LOCAL = ("matmul", "attention_forward", "attention_backward", "copy", "elementwise", "update", "launch")
"""Operations whose seconds are the machine's alone; collectives wait for the system's scheduler, and scatter by
it."""


def noise(samples: Iterable[Sample]) -> float:
    """The median, over calls, of the distance between quartiles over the median."""
    seconds: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.op in LOCAL:
            call = (sample.op, sample.precision, sample.size, sample.work, sample.busy_ranks)
            seconds[call].extend(sample.seconds)
    scatter = [np.subtract(*np.percentile(each, (75, 25))) / np.median(each) for each in seconds.values()]
    return median(scatter) if scatter else 0.0


def require_quiet(samples: Iterable[Sample], most: float) -> None:
    """`InvalidSpec` where the samples scatter by more."""
    found = noise(samples)
    if found > most:
        reject(
            "noise",
            f"{found:.0%}",
            "this machine is too noisy to measure: half of its calls scatter by more than that, and the most is "
            f"{most:.0%}; stop other programs, or accept it with --max-noise",
        )
