"""Plans in a few words, as reasons name them: degrees above one, what is recomputed, what differs from another."""

from trainwright.plan.table import Policy
from trainwright.spec.answers import Prediction

DEGREES = ("tp", "cp", "pp", "vpp", "ep", "dp")


def layout_text(plan: Prediction) -> str:
    """Degrees above one: `tp 8, pp 16, dp 128`."""
    degrees = [(axis, getattr(plan.layout, axis)) for axis in DEGREES]
    return ", ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "one device"


def policy_text(policy: Policy) -> str:
    """What is recomputed: `recompute full of 2 layers a stage`."""
    text = f"recompute {policy.recompute}"
    if policy.recompute == "selective":
        text += f" ({', '.join(policy.ops)})"
    return text if policy.layers is None else f"{text} of {policy.layers} layer(s) a stage"


def choices_text(plan: Prediction) -> str:
    """Degrees, sharding and recompute: `tp 8, dp 2, zero 1, recompute none`."""
    return f"{layout_text(plan)}, zero {plan.recipe.zero}, {policy_text(Policy.of_recipe(plan.recipe))}"


def becomes_text(before: Prediction, after: Prediction, free: tuple[str, ...] = ()) -> str:
    """What the best plan becomes, or that it stays; `free` are degrees that need not stay."""
    fields = [name for name in (*DEGREES, "etp") if name not in free]
    same_layout = all(getattr(before.layout, name) == getattr(after.layout, name) for name in fields)
    changed = [f"{name} {new}" for name, new in _recipe_texts(after) if (name, new) not in _recipe_texts(before)]
    policies = [policy_text(Policy.of_recipe(plan.recipe)) for plan in (before, after)]
    changed += [policies[1]] if policies[0] != policies[1] else []
    if same_layout and not changed:
        return "same layout"
    return f"the best plan becomes {', '.join([layout_text(after), *changed])}"


def _recipe_texts(plan: Prediction) -> list[tuple[str, str]]:
    """What the search chooses of a recipe beside recompute, with the names that people use."""
    recipe = plan.recipe
    return [
        ("micro-batch", str(recipe.micro_batch)),
        ("zero", str(recipe.zero)),
        ("replicas", str(recipe.dp_replicate)),
        ("reshard after forward", str(recipe.zero < 3 or recipe.reshard_after_forward).lower()),
        ("schedule", recipe.schedule),
    ]
