"""Constants that step times of a log identify: a factor on compute rates, and one on communication bandwidths.

A log has no causes. Steps of one size of batch are one number, which one factor fits; steps of several sizes (a
batch that is ramped up) tell what grows with the batch from what doesn't, so that they may identify both. A
factor counts as identified where the logarithms of the step times move, for each unit of the factor's, by at
least `LEAST` in a way that no factor before it explains. The factor that moves them most comes first."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trainwright.measure.fit import Problem, fit
from trainwright.spec.cluster import ClusterSpec, Format, Provenance
from trainwright.spec.constants import Constant
from trainwright.spec.explanation import FittedConstant, LogSteps

Predict = Callable[[ClusterSpec, int], float]
"""The step's seconds on a cluster, with a global batch."""

COMPUTE, COMMUNICATION = "compute efficiency", "communication bandwidth"
WHAT = {
    COMPUTE: "what matmuls and attention keep of their rates (rates.sustained, rates.attention_sustained)",
    COMMUNICATION: "what collectives reach of the links (rates.link, rates.network, measured collectives)",
}
LEAST = 0.1
LOG_SD = 1.0
"""Of the priors: weak, for the log shall speak."""
LOWEST, HIGHEST = 0.1, 4.0
"""Beyond these a factor stands for something that it doesn't name."""
MOST_SUSTAINED = 1.2
"""As far as `Rates.sustained` goes."""


def fitted(
    cluster: ClusterSpec, steps: Sequence[LogSteps], predict: Predict
) -> tuple[tuple[FittedConstant, ...], tuple[str, ...], ClusterSpec]:
    """The factors that the steps identify, what they can't say, and the cluster by the factors."""
    constants = [_constant(cluster, name) for name in WHAT]
    problem = _problem(cluster, steps, predict, constants)
    at = problem.prior
    jacobian = problem.jacobian(at, problem.errors(at))
    chosen = identified(jacobian)
    missing = tuple(
        _unidentified(constants[each].name, jacobian, each) for each in range(len(WHAT)) if each not in chosen
    )
    if not chosen:
        return (), missing, cluster
    known = [constants[each] for each in chosen]
    problem = _problem(cluster, steps, predict, known)
    values = problem.values(fit(problem).unknowns)
    found = tuple(
        FittedConstant(name=each.name, what=WHAT[each.name], value=values[each.name], low=each.low, high=each.high)
        for each in known
    )
    return found, missing, scaled(cluster, values, sum(each.steps for each in steps))


def identified(jacobian: np.ndarray) -> list[int]:
    """The columns (one a factor) that are identified, the one that moves the rows most first."""
    left, chosen = np.array(jacobian, dtype=float), []
    while len(chosen) < left.shape[1]:
        norms = np.linalg.norm(left, axis=0) / np.sqrt(len(left))
        best = int(norms.argmax())
        if norms[best] < LEAST:
            break
        chosen.append(best)
        unit = left[:, best] / np.linalg.norm(left[:, best])
        left = left - np.outer(unit, unit @ left)
    return chosen


def scaled(cluster: ClusterSpec, factors: Mapping[str, float], lines: int = 0) -> ClusterSpec:
    """A cluster whose rates are multiplied by factors."""
    rates, provenance = cluster.rates, dict(cluster.provenance)
    source = Provenance(kind="measured", source="fitted to step times of a log", samples=lines)
    changes: dict[str, object] = {}
    if COMPUTE in factors:
        factor = factors[COMPUTE]
        formats: list[Format] = [*rates.matmul, *(fmt for fmt in rates.sustained if fmt not in rates.matmul)]
        changes["sustained"] = {fmt: rates.sustained.get(fmt, 1.0) * factor for fmt in formats}
        changes["attention_sustained"] = rates.attention_sustained * factor
    if COMMUNICATION in factors:
        factor = factors[COMMUNICATION]
        changes |= {"link": rates.link * factor, "network": rates.network * factor}
        changes["collectives"] = tuple(
            each.changed(bytes_per_s=each.bytes_per_s * factor) for each in rates.collectives
        )
    provenance |= {f"rates.{field}": source for field in changes if field != "collectives" or rates.collectives}
    return cluster.changed(rates=rates.changed(**changes), provenance=provenance)


def _constant(cluster: ClusterSpec, name: str) -> Constant:
    rates = cluster.rates
    if name == COMPUTE:
        sustained = [rates.attention_sustained, *(rates.sustained.get(fmt, 1.0) for fmt in rates.matmul)]
        room, fields = MOST_SUSTAINED / max(sustained), ("rates.sustained", "rates.attention_sustained")
    else:
        room, fields = 1.0 / max(rates.link, rates.network), ("rates.link", "rates.network")
    return Constant(
        name=name,
        parts=(f"device:{cluster.device.name}",),
        fields=fields,
        prior=1.0,
        log_sd=LOG_SD,
        low=LOWEST,
        high=min(max(room, 1.0), HIGHEST),
        value=1.0,
        why="the rates of the run's cluster",
    )


def _problem(
    cluster: ClusterSpec, steps: Sequence[LogSteps], predict: Predict, constants: Sequence[Constant]
) -> Problem:
    def predicted(values: Mapping[str, float], rows: Sequence[int]) -> np.ndarray:
        changed = scaled(cluster, values)
        return np.array([predict(changed, steps[row].global_batch) for row in rows])

    return Problem(
        constants=constants,
        seen_s=np.array([each.step_s for each in steps]),
        weights=np.ones(len(steps)),
        touched={each.name: range(len(steps)) for each in constants},
        predict=predicted,
    )


def _unidentified(name: str, jacobian: np.ndarray, column: int) -> str:
    share = float(np.abs(jacobian[:, column]).max())
    if share < LEAST:
        return f"{name}: it moves the step by {share:.1%} of its own change, too little to be seen"
    if len(jacobian) == 1:
        return f"{name}: steps of one size of batch are one number, which the other factor fits as well"
    return f"{name}: it changes the log's step times as the other factor does"
