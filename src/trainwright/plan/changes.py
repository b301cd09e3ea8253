"""What would change the answer: a faster network, less memory, a larger batch, more devices; each searched anew.

Where there are many candidates, the changed question is asked of the planes (tp, cp, pp, dp) that have a chance:
those of the best bounds in the question as it was; with the devices doubled, those with one degree doubled. Within
them everything is searched.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.plan.candidates import candidates
from trainwright.plan.predict import prediction
from trainwright.plan.race import Race
from trainwright.plan.search import Ranking
from trainwright.plan.shortlist import shortlist, shortlisted
from trainwright.plan.table import Ints, Table
from trainwright.plan.wording import becomes_text
from trainwright.spec.answers import Change, Prediction
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.question import Question
from trainwright.spec.units import bytes_text

WHOLE = 50_000
"""Candidates judged, up to which all are searched anew; of more, those in planes that have a chance."""

MOST_PLANES = 12
"""Planes that have a chance under another question."""

LESS_MEMORY = 0.8
"""Fraction of the device's memory that is left."""

NOTHING = 1e-3
"""Fraction of a step that is no change."""

AXES = ("tp", "cp", "pp", "dp")


def changes(question: Question, ranking: Ranking, plan: Prediction) -> Iterator[Change]:
    """What the best plan, `plan`, would be under other questions."""
    fabric = question.cluster.fabric
    if question.devices > fabric.link_domain and not question.cluster.rates.collectives:
        yield _network(question, ranking.race, plan)
    yield _memory(question, ranking, plan)
    yield from _doubled(question, ranking.race, plan)


def _network(question: Question, race: Race, plan: Prediction) -> Change:
    table, fabric = race.evaluation.table, question.cluster.fabric
    faster = fabric.changed(nics_per_node=2 * fabric.nics_per_node)
    table = replace(table, cluster=question.cluster.changed(fabric=faster))
    if len(table.columns) > WHOLE:
        planes = _planes(table)
        table = table.take(np.isin(planes, planes[_chances(race)]))
    name = "twice the NICs"
    found = _best(table, question.tokens)
    if found is None:
        return Change(name=name, plan=None, text=f"{name}: nothing fits")
    return Change(name=name, plan=found, text=f"{name}: {_faster(plan, found)}, {becomes_text(plan, found)}")


def _memory(question: Question, ranking: Ranking, plan: Prediction) -> Change:
    evaluation = ranking.evaluation
    memory_bytes = LESS_MEMORY * question.cluster.device.memory_bytes
    name = f"{1 - LESS_MEMORY:.0%} less {'memory' if question.cluster.device.kind == 'cpu' else 'HBM'}"
    best = ranking.race.fastest(evaluation.peak_bytes <= memory_bytes, 1)
    if not best and not ranking.is_whole:
        device = question.cluster.device.changed(memory_bytes=int(memory_bytes))
        smaller = question.cluster.changed(device=device)
        evaluation, best = shortlisted(question.changed(cluster=smaller, top=1))
    if not best:
        short_by = float(evaluation.peak_bytes.min()) - memory_bytes
        return Change(name=name, plan=None, text=f"with {name} nothing fits; {bytes_text(short_by)} are missing")
    found = prediction(evaluation, best[0], question.tokens)
    if found.step_s < (1 + NOTHING) * plan.step_s:
        return Change(
            name=name, plan=found, text=f"with {name} ({bytes_text(memory_bytes)}) the answer stays as fast"
        )
    text = f"with {name}: {_faster(plan, found)}, {becomes_text(plan, found)}"
    return Change(name=name, plan=found, text=text)


def _doubled(question: Question, race: Race, plan: Prediction) -> Iterator[Change]:
    """The batch and the devices doubled; left out where no layout is legal then."""
    batch = question.recipe.changed(global_batch=2 * question.recipe.global_batch)
    columns = race.evaluation.table.columns
    planes = {tuple(int(getattr(columns, axis)[row]) for axis in AXES) for row in _chances(race).tolist()}
    larger = {
        tuple(degree * (1 + (at == doubled)) for at, degree in enumerate(plane))
        for plane in planes
        for doubled in range(len(AXES))
    }
    asked: list[tuple[str, dict[str, Any], set]] = [("twice the global batch", {"recipe": batch}, planes)]
    if 2 * question.devices <= question.cluster.max_devices:
        asked.append(("twice the devices", {"devices": 2 * question.devices}, larger))
    for name, choices, chances in asked:
        whole = len(columns) <= WHOLE
        try:
            table = candidates(question.changed(**choices), None if whole else chances)
        except InvalidSpec:
            continue
        found = _best(table, question.tokens)
        if found is not None:
            ratio = _tokens_per_s(found) / _tokens_per_s(plan)
            becomes = becomes_text(plan, found, ("dp",))
            text = f"{name}: {ratio:.2f}x the tokens/s (MFU {found.mfu:.1%}), {becomes}"
            yield Change(name=name, plan=found, text=text)


def _best(table: Table, tokens: int | None) -> Prediction | None:
    """The fastest plan of a table that fits."""
    evaluation, best = shortlist(table)
    return prediction(evaluation, best[0], tokens) if best else None


def _chances(race: Race) -> NDArray[np.intp]:
    """The best row by its bound of each of the best planes."""
    evaluation = race.evaluation
    fitting = np.flatnonzero(evaluation.fits)
    order = fitting[np.argsort(evaluation.bound_s[fitting], kind="stable")]
    _, first = np.unique(_planes(evaluation.table)[order], return_index=True)
    return order[np.sort(first)[:MOST_PLANES]]


def _planes(table: Table) -> Ints:
    """A number for each row's plane; dp follows from the others."""
    columns = table.columns
    return (columns.tp << 40) + (columns.cp << 20) + columns.pp


def _tokens_per_s(plan: Prediction) -> float:
    return plan.tokens_per_s_per_device * plan.layout.world


def _faster(before: Prediction, after: Prediction) -> str:
    """By how much a step is faster, of its speed; or slower, of its time."""
    if abs(after.step_s / before.step_s - 1) < NOTHING:
        return "as fast"
    if after.step_s < before.step_s:
        return f"{before.step_s / after.step_s - 1:.1%} faster"
    return f"{after.step_s / before.step_s - 1:.1%} slower"
