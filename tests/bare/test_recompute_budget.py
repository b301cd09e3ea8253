"""Recompute that is left to a budget of bytes is the fastest of all that a recipe can say, by brute force."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.bare.plans import cluster, dense_model, moe_model
from tests.bare.test_plan_predict import run
from trainwright.cli.main import app
from trainwright.plan.memory_over_time import memory_over_time
from trainwright.plan.predict import predict
from trainwright.plan.recompute_budget import _fastest, policies, resolved
from trainwright.plan.timeline import timeline
from trainwright.spec import toml
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run

OPS = {
    "dense": ("attention", "norm", "activation", "mlp"),
    "experts": ("attention", "norm", "activation", "latent_up", "mlp", "moe"),
    "experts alone": ("attention", "norm", "activation", "moe"),
}
RUNS = {
    "dense": run(Layout(dp=2), model=dense_model(num_layers=3), micro_batch=4, attention_kernel="unfused"),
    "experts": run(Layout(dp=4, ep=4), model=moe_model(num_layers=3), micro_batch=2, zero=1),
    "experts alone": run(
        Layout(pp=2, vpp=2, dp=2, tp=2),
        model=moe_model(num_layers=7, num_dense=0, latent=False),
        schedule="interleaved_1f1b",
    ),
}
MOST_LAYERS = {"dense": 3, "experts": 3, "experts alone": 3}
"""Of a stage: 7 layers and two slots for embedding and loss on 4 stages are 1, 3, 2 and 1."""


@functools.cache
def everything(name: str) -> list[tuple[float, float, Recipe]]:
    """Peak, step and recipe of everything that a recipe can say of recompute, each predicted by itself."""
    base = RUNS[name].recipe
    sets = [ops for size in range(1, 7) for ops in itertools.combinations(OPS[name], size)]
    recipes = [
        base,
        *(base.changed(recompute="selective", recompute_ops=ops) for ops in sets),
        *(base.changed(recompute="full", recompute_layers=layers) for layers in range(1, MOST_LAYERS[name])),
        base.changed(recompute="full"),
    ]
    found = []
    for recipe in recipes:
        prediction = predict(RUNS[name].changed(recipe=recipe))
        found.append((prediction.peak_bytes, prediction.step_s, recipe))
    return found


def within(run_: Run, budget_bytes: int | None) -> Run:
    recipe = run_.recipe.changed(recompute="budget", recompute_budget_bytes=budget_bytes)
    return run_.changed(recipe=recipe)


@pytest.mark.parametrize("name", RUNS)
def test_the_choice_is_the_fastest_within_the_budget(name: str) -> None:
    all_of_them = everything(name)
    assert len(policies(RUNS[name])) == len(all_of_them)
    peaks = sorted({peak for peak, _, _ in all_of_them})
    chosen = []
    for budget in [*np.quantile(peaks, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), peaks[len(peaks) // 2] - 1, 10**9]:
        budget_bytes = int(np.ceil(budget))
        prediction = predict(within(RUNS[name], budget_bytes))
        allowed = [(step_s, peak) for peak, step_s, _ in all_of_them if peak <= budget_bytes]
        assert prediction.step_s == pytest.approx(min(allowed)[0], rel=1e-12)
        assert prediction.peak_bytes <= budget_bytes
        choice = prediction.recompute_choice
        assert choice is not None
        assert (choice.considered, choice.within) == (len(all_of_them), len(allowed))
        # What it says was chosen is an ordinary recipe with these very figures.
        again = predict(RUNS[name].changed(recipe=prediction.recipe))
        assert again.changed(recompute_choice=choice) == prediction
        assert prediction.recipe.recompute != "budget"
        chosen.append(prediction.recipe)
    assert chosen[-1] == RUNS[name].recipe, "nothing is recomputed where all fits"
    assert len({each.model_dump_json() for each in chosen}) >= 4, "the budgets told the choices apart"


def test_less_than_anything_leaves_is_refused_with_the_least() -> None:
    least = min(peak for peak, _, _ in everything("experts"))
    with pytest.raises(
        InvalidSpec, match=rf"recipe\.recompute_budget_bytes=1000: .*the least is {int(np.ceil(least))} "
    ):
        resolved(within(RUNS["experts"], 1000))
    resolved(within(RUNS["experts"], int(np.ceil(least))))


def test_without_bytes_the_budget_is_the_devices_memory() -> None:
    peaks = sorted(peak for peak, _, _ in everything("dense"))
    for memory in (10**9, int(peaks[len(peaks) // 2])):
        base = RUNS["dense"].changed(cluster=cluster(memory_bytes=memory))
        said = resolved(within(base, memory)).run
        assert resolved(within(base, None)).run == said
        assert predict(said).fits


def test_where_nothing_fits_the_smallest_is_shown() -> None:
    base = RUNS["dense"].changed(cluster=cluster(memory_bytes=10**6))
    prediction = predict(within(base, None))
    assert not prediction.fits
    assert prediction.peak_bytes == min(peak for peak, _, _ in everything("dense"))
    assert prediction.recompute_choice is not None
    assert prediction.recompute_choice.within == 0


def test_up_projections_are_left_alone_where_cp_exchanges_heads() -> None:
    base = run(Layout(cp=2), model=moe_model(), cp_method="all_to_all")
    assert not any("latent_up" in policy.ops for policy in policies(base))


def test_every_view_of_a_run_shows_the_same_choice() -> None:
    budget_bytes = int(np.median([peak for peak, _, _ in everything("experts alone")]))
    asked = within(RUNS["experts alone"], budget_bytes)
    said = resolved(asked).run
    assert said.recipe.recompute != "none"
    assert timeline(asked) == timeline(said)
    assert memory_over_time(asked) == memory_over_time(said)


def test_it_is_not_for_what_says_itself_what_is_recomputed() -> None:
    with pytest.raises(InvalidSpec, match="recompute_budget_bytes=5: needs recompute=budget, not full"):
        RUNS["dense"].recipe.changed(recompute="full", recompute_budget_bytes=5)


def test_predict_says_what_was_chosen(tmp_path: Path) -> None:
    least = min(peak for peak, _, _ in everything("dense"))
    path = tmp_path / "run.toml"
    path.write_text(toml.write(RUNS["dense"]))
    assign = ["--set", "recipe.recompute=budget", "--set", f"recipe.recompute_budget_bytes={int(np.ceil(least))}"]
    shown = CliRunner().invoke(app, ["predict", str(path), *assign])
    assert shown.exit_code == 0, shown.output
    assert "every layer recomputed in backward" in " ".join(shown.output.split())
    assert "recompute is the fastest of 19 ways to recompute, of which 1 stay within" in " ".join(
        shown.output.split()
    )


def test_a_search_chooses_recompute_by_itself() -> None:
    command = ["plan", "llama-3.1-8b", "--cluster", "h100-sxm", "--gpus", "8", "--seq-len", "8192"]
    command += ["--global-batch", "64", "--set", "recipe.recompute=budget"]
    told = CliRunner().invoke(app, command)
    assert isinstance(told.exception, InvalidSpec)
    assert "recipe.recompute='budget': is what a search does by itself" in str(told.exception)


class Played:
    """Of rows whose bounds are in another order than what their schedules take."""

    bound_s = np.array([3.0, 1.0, 2.0, 9.0])
    peak_bytes = np.array([1.0, 5.0, 4.0, 1.0])

    def __init__(self, *step_s: float) -> None:
        self._step_s = step_s
        self.asked: list[int] = []

    def step_s(self, row: int) -> float:
        self.asked.append(row)
        return self._step_s[row]


def test_the_fastest_is_by_the_schedule_that_was_played() -> None:
    played = Played(3.5, 6.0, 3.5, 9.5)
    # Row 0 takes as long as row 2 and holds less; row 3 can't be faster, and isn't played.
    assert _fastest(played, np.arange(4)) == 0  # pyright: ignore[reportArgumentType]
    assert played.asked == [1, 2, 0]
