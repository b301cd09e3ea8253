"""A Hugging Face config.json as a ModelSpec.

`families.FAMILIES` has one function for each `model_type`; it says what the family's modeling code builds from
which key. An absent key means what the family's configuration class in `transformers` makes of it. What would
change the parameters or the arithmetic in a way that ModelSpec can't say is refused, not dropped: a wrong count
is worse than none. How the weights are stored (quantization, dtype) isn't architecture and is passed over.
"""

from collections.abc import Mapping
from typing import Any

from trainwright.spec.errors import InvalidSpec, nearest, reject
from trainwright.spec.hf.config import Config
from trainwright.spec.hf.families import ARCHITECTURES, FAMILIES
from trainwright.spec.model import ModelSpec

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of architectures that predict the next token."""


def model_from_hf(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The architecture that a parsed config.json describes. Raises InvalidSpec naming the key, its value and
    the remedy. Of a model with images or sound, only gemma3 is read, and its language model alone."""
    if not isinstance(config, Mapping):
        reject("config", config, "must be the object that a config.json holds")
    family = _family(Config(config))
    values = FAMILIES[family](Config(config))
    return ModelSpec.parse({"name": name, "source": f"Hugging Face config.json of model_type {family}", **values})


def _family(config: Config) -> str:
    """The entry of FAMILIES, by model_type, else by architecture."""
    _, model_type = config.find("model_type")
    architectures = config.words("architectures")
    if model_type is not None and not isinstance(model_type, str):
        config.reject("model_type", "must be a text")
    family = model_type
    if family not in FAMILIES:
        family = next((ARCHITECTURES[each] for each in architectures or () if each in ARCHITECTURES), None)
    if family is None:
        if model_type is None and not architectures:
            raise InvalidSpec("model_type: missing; is it a model's config.json?")
        if model_type is None:
            reject(
                "architectures",
                architectures,
                f"no such family; {nearest((architectures or [''])[0], ARCHITECTURES)}",
            )
        reject("model_type", model_type, f"no such family; {nearest(model_type, FAMILIES)}")
    if architectures and not architectures[0].endswith(HEADS):
        config.reject("architectures", "has no output head to train; the name of one ends in ForCausalLM")
    return family
