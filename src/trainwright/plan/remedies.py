"""What would make a question's plans fit, by trying it: each remedy is a changed question, searched anew.

What the search chooses (full recompute, more pipeline stages, zero 3, a smaller micro-batch, context parallelism)
is a remedy only where the question fixes it; else it was tried already. The rest changes the recipe, the devices
or, last, the sequence, which makes it another job.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from trainwright.plan.candidates import candidates
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import prediction
from trainwright.plan.race import Race
from trainwright.plan.shortlist import shortlisted
from trainwright.plan.sizing import device_counts
from trainwright.spec.diagnosis import Diagnosis, Remedy
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.sizing import MOST_DEVICES

MOST_NEAREST = 3
"""Plans of different layouts that are shown."""

MOST_GROWTH = 32
"""Times the devices that are tried; beyond, memory is not what a few more devices would help."""

MOST_HALVINGS = 4
"""Of the sequence."""


def diagnosed(question: Question, told: Callable[[str], None] = lambda name: None) -> Diagnosis:
    """What is nearest to fitting and which remedies help; or, where something fits, how much room it has.

    `told` hears of each remedy that was tried. Raises `InvalidSpec` where no layout is legal.
    """
    evaluation = Evaluation(candidates(question))
    feasible = int(evaluation.fits.sum())
    rows = _fastest_and_roomiest(evaluation) if feasible else _nearest(evaluation)
    found = Diagnosis(
        considered=len(evaluation.fits),
        feasible=feasible,
        nearest=tuple(prediction(evaluation, row, question.tokens) for row in rows),
    )
    if feasible:
        return found
    is_moe = question.model.is_moe
    tried = [name for name, field, _ in SEARCHED if field not in question.fixed and (is_moe or field != "ep")]
    remedies = []
    for each in chain(_changed(question), _more_devices(question), _shorter(question)):
        if each:
            told(each.name)
            remedies.append(each)
    return found.changed(tried=tuple(tried), remedies=tuple(sorted(remedies, key=_cost)))


def _cost(found: Remedy) -> tuple[bool, bool, float]:
    """What fits and leaves the job as it is first, and of that what takes least of the devices' time."""
    missing = found.plan.short_by_bytes
    return not found.plan.fits, not found.same_job, missing or found.device_s_per_token


def _fastest_and_roomiest(evaluation: Evaluation) -> list[int]:
    race = Race(evaluation)
    fitting = np.flatnonzero(evaluation.fits)
    fastest = race.fastest(evaluation.fits, 1)[0]
    least = evaluation.peak_bytes[fitting].min()
    roomiest = race.fastest(evaluation.fits & (evaluation.peak_bytes == least), 1)[0]
    return list(dict.fromkeys([fastest, roomiest]))


def _nearest(evaluation: Evaluation) -> list[int]:
    """Rows with the lowest peaks, one for each tp, cp, pp and dp."""
    columns = evaluation.table.columns
    found: dict[tuple[int, ...], int] = {}
    for row in np.argsort(evaluation.peak_bytes, kind="stable").tolist():
        found.setdefault(tuple(int(each[row]) for each in (columns.tp, columns.cp, columns.pp, columns.dp)), row)
        if len(found) == MOST_NEAREST:
            break
    return list(found.values())


def remedy(name: str, question: Question, *, same_job: bool = True) -> Remedy | None:
    """What the changed question leads to; None where it has no legal layout."""
    try:
        evaluation, best = shortlisted(question.changed(top=1))
    except InvalidSpec:
        return None
    row = best[0] if best else int(evaluation.peak_bytes.argmin())
    return Remedy(name=name, plan=prediction(evaluation, row, question.tokens), same_job=same_job)


SEARCHED = (
    ("full recompute", "recompute", "full"),
    ("more pipeline stages", "pp", None),
    ("zero 3", "zero", 3),
    ("a smaller micro-batch", "micro_batch", 1),
    ("context parallelism", "cp", None),
    ("tensor parallelism", "tp", None),
    ("expert parallelism", "ep", None),
)
"""Remedies that the search tries itself where their field is not fixed, and the value that they set; None: any."""


def _changed(question: Question) -> Iterator[Remedy | None]:
    """Other values of what is fixed, and smaller states."""
    fixed, is_moe = question.fixed, question.model.is_moe
    for name, field, value in SEARCHED:
        if field in fixed and fixed[field] != value and (is_moe or field != "ep"):
            others = {each: choice for each, choice in fixed.items() if each != field}
            chosen = others if value is None else others | {field: value}
            yield remedy(f"{name} in place of {field} {fixed[field]}", question.changed(fixed=chosen))
    for name, choices in _smaller(question.recipe).items():
        yield remedy(name, question.changed(recipe=question.recipe.changed(**choices)))


def _smaller(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Recipes with smaller states on the device."""
    optimizer = recipe.optimizer
    found: dict[str, dict[str, Any]] = {}
    if optimizer.moments == "fp32" and recipe.precision != "fp64":
        found["moments in bf16"] = {"optimizer": optimizer.changed(moments="bf16")}
    in_bf16 = recipe.gradient_format == "fp32" and recipe.precision not in ("fp64", "fp32")
    if in_bf16:
        found["gradients in bf16"] = {"gradient_format": "bf16"}
    if not optimizer.offload:
        offloaded: dict[str, Any] = {"optimizer": optimizer.changed(offload=True)}
        found["optimizer states in host memory"] = offloaded
        if in_bf16:
            both = offloaded | {"gradient_format": "bf16"}
            found["optimizer states in host memory, gradients in bf16"] = both
    return found


def _more_devices(question: Question) -> Iterator[Remedy | None]:
    """The next number of devices that fits; where none does, the last one tried."""
    found = None
    for count in device_counts(question.cluster, min(MOST_GROWTH * question.devices, MOST_DEVICES)):
        if count > question.devices and not (found and found.plan.fits):
            found = remedy(f"{count:,} devices", question.changed(devices=count)) or found
    yield found


def _shorter(question: Question) -> Iterator[Remedy | None]:
    """The longest sequence that fits, halved again and again; the shortest where not even that one does."""

    def tried(seq_len: int) -> Remedy | None:
        recipe = question.recipe.changed(seq_len=seq_len)
        return remedy(f"sequences of {seq_len:,} tokens", question.changed(recipe=recipe), same_job=False)

    lengths = [question.recipe.seq_len >> halvings for halvings in range(1, MOST_HALVINGS + 1)]
    shortest = tried(lengths[-1]) if lengths[-1] else None
    if shortest is None or not shortest.plan.fits:
        yield shortest
        return
    longer = (tried(seq_len) for seq_len in lengths[:-1])
    yield next((each for each in longer if each and each.plan.fits), shortest)
