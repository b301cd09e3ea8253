"""A run that has no layout yet: what `plan` is told, before the search completes it.

Here `--set` meets the search: an assignment to a field that the search chooses (`layout.tp`,
`recipe.micro_batch`; `spec.question.SEARCHED`) fixes it, any other one changes the draft.
"""

import math
from typing import cast, get_args

from trainwright.spec import toml
from trainwright.spec.answers import Prediction
from trainwright.spec.base import Noun
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec, nearest, reject
from trainwright.spec.layout import Layout
from trainwright.spec.model import ModelSpec
from trainwright.spec.question import SEARCHED, Question
from trainwright.spec.recipe import Precision, Recipe, format_of
from trainwright.spec.run import Budget, DataSpec, Run
from trainwright.spec.sizing import MOST_DEVICES, Goal, Least

OWN_FIELDS = {"fixed", "stage_layers"}
"""Of a draft, that no run has."""


class Draft(Noun):
    """All of a `Run` but its layout, with the choices that are made already."""

    name: str
    recipe: Recipe
    data: DataSpec
    budget: Budget | None = None
    model: ModelSpec
    cluster: ClusterSpec
    fixed: dict[str, int | str | bool] = {}  # noqa: RUF012  (pydantic copies defaults)
    stage_layers: tuple[int, ...] = ()
    """`Layout.stage_layers`, which the search doesn't choose."""

    def question(self, devices: int, top: int) -> Question:
        """What the planner is asked."""
        return Question.parse(
            {
                "model": self.model,
                "cluster": self.cluster,
                "devices": devices,
                "recipe": self.recipe,
                "tokens": self.budget.tokens if self.budget else None,
                "fixed": self.fixed,
                "stage_layers": self.stage_layers,
                "top": top,
            }
        )

    def run(self, plan: Prediction) -> Run:
        """The run that a plan completes this to."""
        return Run(
            name=self.name,
            layout=plan.layout,
            recipe=plan.recipe,
            data=self.data,
            budget=self.budget,
            model=self.model,
            cluster=self.cluster,
        ).check()


def draft(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    seq_len: int,
    global_batch: int,
    precision: str | None,
    tokens: int | None,
    assignments: list[str],
) -> Draft:
    """The draft that the options of `plan` say; without a precision, `usual_precision`. Raises `InvalidSpec` for
    the first wrong one."""
    precision = precision or usual_precision(cluster)
    recipe = {"seq_len": seq_len, "global_batch": global_batch, "precision": precision}
    vocab_size = DataSpec.model_fields["vocab_size"].default
    made = Draft(
        name=model.name,
        recipe=Recipe.parse(recipe, "recipe"),
        data=DataSpec(vocab_size=max(min(vocab_size, model.vocab_size), 258)),
        budget=None if tokens is None else Budget.parse({"tokens": tokens}, "budget"),
        model=model,
        cluster=cluster,
    )
    return _with_assignments(made, assignments)


def usual_precision(cluster: ClusterSpec) -> Precision:
    """What to train in where nobody says: bf16, unless the device is faster in fp32 (a CPU without matmuls in
    bf16) or has fp16 in its place (a V100)."""
    usual: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    return max(usual, key=lambda precision: cluster.peak(format_of(precision)) or 0.0)


def goal_of(least: str | None, days: float | None, gpus: int | None, *, explain_infeasible: bool) -> Goal | None:
    """What `--min` asks; None where the devices are given. Raises `InvalidSpec` for options that clash."""
    if least is None:
        if days is not None:
            reject("--days", days, "is for --min; add --min gpus or --min cost")
        if gpus is None:
            raise InvalidSpec("--gpus: missing; say how many devices, or ask for them with --min gpus --days 60")
        return None
    if least not in get_args(Least):
        reject("--min", least, f"may be {' or '.join(get_args(Least))}")
    if days is None:
        reject("--min", least, "needs --days, such as --days 60")
    if not 0 < days < math.inf:
        reject("--days", days, "must be above zero")
    if explain_infeasible:
        raise InvalidSpec(
            "--explain-infeasible: is for one number of devices; leave it out, or give --gpus without --min"
        )
    return Goal(least=cast(Least, least), days=days, most_devices=gpus or MOST_DEVICES)


def _with_assignments(made: Draft, assignments: list[str]) -> Draft:
    """The draft with `field=value` texts applied, checked when all are."""
    choices = [toml.parse_assignment(text) for text in assignments]
    degrees = {path: value for path, value in choices if path.split(".")[0] == "layout"}
    others = [(path, value) for path, value in choices if path not in degrees]
    for path, _ in others:
        room = path.split(".")[0]
        if room not in Draft.model_fields or room in OWN_FIELDS:
            known = sorted({*Draft.model_fields, "layout"} - OWN_FIELDS)
            raise InvalidSpec(f"{path}: unknown field; {nearest(room, known)}")
    changed = _with_kernels(made.with_values(others), {path for path, _ in others})
    chosen = {path.removeprefix("recipe.") for path, _ in others if path.startswith("recipe.")} & set(SEARCHED)
    fixed = {field: getattr(changed.recipe, field) for field in sorted(chosen)}
    stage_layers = Layout.parse({"stage_layers": degrees.pop("layout.stage_layers", ())}, "layout").stage_layers
    return changed.changed(fixed={**_fixed_degrees(degrees), **fixed}, stage_layers=stage_layers)


def _with_kernels(made: Draft, said: set[str]) -> Draft:
    """Dropout needs weights of attention to drop, which only an unfused core has; and that core needs whole
    sequences, which only one way of sharing them out gives it. Where neither is said, they follow."""
    if made.recipe.dropout and "recipe.attention_kernel" not in said:
        made = made.with_values([("recipe.attention_kernel", "unfused")])
    if made.recipe.attention_kernel == "unfused" and "recipe.cp_method" not in said:
        made = made.with_values([("recipe.cp_method", "all_to_all")])
    return made


def _fixed_degrees(choices: dict[str, object]) -> dict[str, int | str]:
    """Degrees of the layout by their names, each a possible one by itself."""
    fixed: dict[str, int | str] = {}
    for path, value in choices.items():
        field = path.partition(".")[2]
        if field not in Layout.model_fields:
            raise InvalidSpec(f"{path}: unknown field; {nearest(field, Layout.model_fields)}")
        if field == "order":
            fixed[field] = Layout.parse({"order": value}, "layout").order
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            reject(path, value, "must be a whole number of at least 1")
        fixed[field] = value
    return fixed
