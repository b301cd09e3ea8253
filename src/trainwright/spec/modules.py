"""What each module of a model computes in under a recipe, and why: linear layers and grouped experts in the low
format where the recipe has one, and the rest as it was.

Modules are named as the trainer's parameters are, without the numbers of layers; a row stands for all that are
alike.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from trainwright.spec.model import GroupedQueryAttention, LayerSpec, ModelSpec, MoeMlp
from trainwright.spec.recipe import Recipe

WHY = {
    "embedding": "a lookup: nothing is multiplied",
    "positions": "a lookup: nothing is multiplied",
    "norm": "statistics of a row: hardly any FLOPs, and sums that need the range",
    "core": "multiplies activations with one another, and its softmax wants their range (arXiv:2412.19437 s3.3.1)",
    "router": "decides who goes where: hardly any FLOPs, and rounding would change the choice",
    "gate": "one column wide: hardly any FLOPs",
    "head": "its errors go straight into the loss (arXiv:2412.19437 s3.3.1)",
}


class Linear(NamedTuple):
    """A weight (n, k) that every token, or a share of them, is multiplied with."""

    name: str
    k: int
    n: int
    per_token: float = 1.0
    """Copies that a token goes through: of experts those that are chosen."""


class ModuleRow(NamedTuple):
    """One kind of module. Pairs are the operands of a product; of what multiplies nothing they are empty."""

    name: str
    modules: int
    """Of the model, that are so."""
    format: str
    """That its results have."""
    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]
    wgrad: tuple[str, ...]
    master: str
    gradient: str
    why: str

    def report(self) -> dict[str, Any]:
        """The JSON form, with stable keys."""
        return self._asdict()


def modules_of(model: ModelSpec, recipe: Recipe) -> tuple[ModuleRow, ...]:
    """In the order in which a token goes through them."""
    rows: dict[str, ModuleRow] = {}
    total = _active_weights(model)
    inside = [
        row
        for layer, count in model.layer_counts().items()
        for row in _in_layer(model, recipe, layer, count, total)
    ]
    for row in (*_before(model, recipe), *inside, *_after(model, recipe, total)):
        known = rows.get(row.name)
        rows[row.name] = row if known is None else row._replace(modules=row.modules + known.modules)
    return tuple(rows.values())


def precision_text(model: ModelSpec, recipe: Recipe) -> list[str]:
    """The recipe in a line, and a line for each kind of module, as a log has them."""
    rows = modules_of(model, recipe)
    wide = max(len(row.name) for row in rows)
    lines = [f"{row.name:{wide}} x{row.modules:<4} {_operands_text(row)}; {row.why}" for row in rows]
    return [recipe_text(recipe), *lines]


def recipe_text(recipe: Recipe) -> str:
    """What the precision is."""
    low = recipe.low_precision
    if low is None:
        return f"{recipe.precision}: all in {recipe.precision}"
    emulated = "emulated by casts and products in bf16 or fp32; " if recipe.emulate_precision else ""
    return f"{recipe.precision}: {emulated}{low.text}"


def operands_of(row: ModuleRow) -> tuple[str, str, str]:
    """Formats of its input, its weight and its output's gradient: Fprop reads the first two, Dgrad the last two,
    Wgrad the first and the last."""
    if not row.fprop:
        return row.format, row.format, row.format
    return row.fprop[0], row.fprop[1], row.dgrad[0]


def _operands_text(row: ModuleRow) -> str:
    operands = operands_of(row)
    if len(set(operands)) == 1:
        return operands[0]
    return ", ".join(
        f"{name} {each}" for name, each in zip(("input", "weight", "gradient"), operands, strict=True)
    )


def _before(model: ModelSpec, recipe: Recipe) -> Iterator[ModuleRow]:
    for name in ("embedding", "positions") if model.learned_positions else ("embedding",):
        yield _plain(name, 1, recipe, name, multiplies=False)


def _after(model: ModelSpec, recipe: Recipe, total: float) -> Iterator[ModuleRow]:
    if model.mtp_depth:
        join = Linear("join", 2 * model.d_model, model.d_model)
        yield _linear(join, model.mtp_depth, recipe, join.k * join.n * model.mtp_depth / total)
    yield _plain("norm", 1, recipe, "norm", multiplies=False)
    share = model.vocab_size * model.d_model * (1 + model.mtp_depth) / total
    yield _plain("head", 1, recipe, "head", why=f", {share:.1%} of a token's matmul FLOPs")


def _in_layer(model: ModelSpec, recipe: Recipe, layer: LayerSpec, count: int, total: float) -> Iterator[ModuleRow]:
    if layer == model.layers[-1]:
        count += model.mtp_depth

    def norm(name: str) -> ModuleRow:
        return _plain(name, count, recipe, "norm", multiplies=False)

    before, after = model.norm_placement != "post", model.norm_placement != "pre"
    if before:
        yield norm("attention_norm")
    linears = linears_of(model, layer)
    for each in linears:
        if each.name == "attention.out":
            yield _plain("attention.core", count, recipe, "core")
        yield _linear(each, count, recipe, each.k * each.n * each.per_token * count / total)
        if each.name == "attention.out":
            yield from (
                norm(name) for name, is_there in (("attention_out_norm", after), ("mlp_norm", before)) if is_there
            )
            if isinstance(layer.mlp, MoeMlp):
                yield _plain("mlp.router", count, recipe, "router")
                if layer.mlp.shared_gate:
                    yield _plain("mlp.shared_gate", count, recipe, "gate")
    if after:
        yield norm("mlp_out_norm")


def linears_of(model: ModelSpec, layer: LayerSpec) -> tuple[Linear, ...]:
    """The matrices of a layer that low precisions are for, whole."""
    d_model, attention, mlp = model.d_model, layer.attention, layer.mlp
    if isinstance(attention, GroupedQueryAttention):
        query, kv = attention.num_heads * attention.d_head, attention.num_kv_heads * attention.d_head
        found = [
            Linear("attention.query", d_model, query),
            Linear("attention.key", d_model, kv),
            Linear("attention.value", d_model, kv),
            Linear("attention.out", query, d_model),
        ]
    else:
        heads, latent = attention.num_heads, attention.kv_lora_rank
        found = (
            []
            if attention.q_lora_rank is None
            else [Linear("attention.query_down", d_model, attention.q_lora_rank)]
        )
        found += [
            Linear(
                "attention.query", attention.q_lora_rank or d_model, heads * (attention.d_nope + attention.d_rope)
            ),
            Linear("attention.latent", d_model, latent + attention.d_rope),
            Linear("attention.key_value", latent, heads * (attention.d_nope + attention.d_value)),
            Linear("attention.out", heads * attention.d_value, d_model),
        ]
    if not isinstance(mlp, MoeMlp):
        return (*found, *_mlp("mlp.", d_model, mlp.d_ff, mlp.gated, 1.0))
    experts = _mlp("mlp.experts.", d_model, mlp.d_ff, mlp.gated, float(mlp.top_k))
    shared = _mlp("mlp.shared.", d_model, mlp.d_ff_shared, mlp.gated, 1.0) if mlp.d_ff_shared else ()
    return (*found, *experts, *shared)


def _mlp(prefix: str, d_model: int, d_ff: int, gated: bool, per_token: float) -> tuple[Linear, ...]:
    ways_up = ("up", "gate") if gated else ("up",)
    up = tuple(Linear(prefix + name, d_model, d_ff, per_token) for name in ways_up)
    return (*up, Linear(f"{prefix}down", d_ff, d_model, per_token))


def _active_weights(model: ModelSpec) -> float:
    """Weights that a token is multiplied with, routers and columns of gates left out."""
    layers = list(model.layers) + [model.layers[-1]] * model.mtp_depth
    inside = sum(each.k * each.n * each.per_token for layer in layers for each in linears_of(model, layer))
    return (
        inside + 2 * model.d_model**2 * model.mtp_depth + model.vocab_size * model.d_model * (1 + model.mtp_depth)
    )


def _linear(each: Linear, count: int, recipe: Recipe, share: float) -> ModuleRow:
    low = recipe.low_precision
    kind = "grouped experts" if ".experts." in each.name else "linear layer"
    why = f"{kind}, {share:.1%} of a token's matmul FLOPs"
    if low is None:
        return _plain(each.name, count, recipe, "", why=why)
    activation, weight, gradient = low.activation.text, low.weight.text, low.gradient.text
    return ModuleRow(
        each.name,
        count,
        recipe.activation_format,
        (activation, weight),
        (gradient, weight),
        (gradient, activation),
        _master(recipe),
        _gradient(recipe),
        why,
    )


def _plain(
    name: str, count: int, recipe: Recipe, reason: str, *, multiplies: bool = True, why: str = ""
) -> ModuleRow:
    fmt = recipe.activation_format
    pair = (fmt, fmt) if multiplies else ()
    return ModuleRow(
        name, count, fmt, pair, pair, pair, _master(recipe), _gradient(recipe), WHY.get(reason, "") + why
    )


def _master(recipe: Recipe) -> str:
    return "fp64" if recipe.precision == "fp64" else "fp32"


def _gradient(recipe: Recipe) -> str:
    return "fp64" if recipe.precision == "fp64" else recipe.gradient_format
