"""Nouns survive their TOML: what is written and read back is equal, with the same hash."""

import importlib
import pkgutil

import pytest

import trainwright.spec
from tests.bare.plans import cluster, dense_model
from trainwright.cli.catalogue import load_model, model_names
from trainwright.spec import toml
from trainwright.spec.base import Noun
from trainwright.spec.layout import Layout
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run


def every_noun() -> list[type[Noun]]:
    for module in pkgutil.walk_packages(trainwright.spec.__path__, "trainwright.spec."):
        importlib.import_module(module.name)
    found, left = [], [Noun]
    while left:
        subclasses = left.pop().__subclasses__()
        found += subclasses
        left += subclasses
    return found


def test_an_absent_field_means_none_wherever_none_is_allowed() -> None:
    """TOML has no null: a field that may be None must default to it, or None would come back as the default."""
    assert len(every_noun()) > 15
    wrong = [
        f"{noun.__name__}.{name}"
        for noun in every_noun()
        for name, field in noun.model_fields.items()
        if type(None) in getattr(field.annotation, "__args__", ()) and field.default is not None
    ]
    assert not wrong


@pytest.mark.parametrize("name", model_names())
def test_a_model_survives_its_toml(name: str) -> None:
    model = load_model(name)
    assert toml.read(toml.write(model), ModelSpec, name) == model


def test_a_run_survives_its_toml_and_keeps_its_hash() -> None:
    run = Run(
        layout=Layout(tp=2, dp=4),
        recipe=Recipe(seq_len=64, global_batch=8, grad_clip=0.0),
        model=dense_model(),
        cluster=cluster(),
    )
    again = toml.read(toml.write(run), Run, "run.toml")
    assert again == run
    assert again.hash == run.hash
    assert run.with_value("layout.tp", 1).hash != run.hash
