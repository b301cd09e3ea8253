"""What a run says that the trainer doesn't do, set aside so that its program can be run: each change is told."""

from typing import Any

from trainwright.spec.miniature import Change
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.run import Run
from trainwright.train.door import TRAINED_CHOICES, TRAINED_KERNELS, TRAINED_PRECISIONS


def trainable_form(run: Run) -> tuple[Run, tuple[Change, ...]]:
    """The run with the nearest choices that are trained, and what was changed. Number formats that aren't trained
    become bf16; what is still refused then, the door says (`door.require_trainable`)."""
    recipe, changes = run.recipe, []
    plain: dict[str, Any] = recipe.plain()

    def change(field: str, value: object) -> None:
        *path, last = field.split(".")
        inside = plain
        for name in path:
            inside = inside[name]
        if inside[last] != value:
            changes.append(Change(f"recipe.{field}", inside[last], value))
            inside[last] = value

    for field, trained in TRAINED_CHOICES.items():
        change(field, trained)
    if recipe.precision not in TRAINED_PRECISIONS:
        change("precision", "bf16")
    if recipe.attention_kernel not in TRAINED_KERNELS:
        change("attention_kernel", "flash")
    if recipe.compile or plain["precision"] in LOW_PRECISION:
        change("overlap.tp", False)
    if recipe.zero and run.layout.dp * run.layout.cp > recipe.dp_replicate:
        change("overlap.dp", True)
    return run.changed(recipe=type(recipe).parse(plain)).check(), tuple(changes)
