"""What the lab of low precision has found, in sentences: each is made from its figures, and says the opposite
where they do."""

from collections.abc import Iterator
from statistics import median

from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.precision_lab import (
    LOSS_BOUND,
    MODELS,
    PLAIN,
    VISIBLE,
    ModelKind,
    PrecisionLab,
)

HIDDEN = 0.1
"""An error that is less than this share of another is hidden by it: together they are half a percent larger."""
MODEL_NAMES: dict[ModelKind, str] = {"dense": "the dense model", "moe": "the mixture of experts"}


def verdict(lab: PrecisionLab) -> list[str]:
    """Sentences, the most important first."""
    return [*_against_plain(lab), *_outliers(lab), *_order(lab), *_sums(lab)]


def per_tensor(lab: PrecisionLab) -> list[str]:
    """Recipes that have one scale for all of an activation."""
    return [name for name in lab.precisions if LOW_PRECISION[name].activation.is_per_tensor]


def loss_text(share: float) -> str:
    """A relative difference of losses."""
    return "diverged" if share == float("inf") else f"{share:+.2%}"


def _against_plain(lab: PrecisionLab) -> Iterator[str]:
    least = lab.factors[0]
    for name in lab.precisions:
        far = {model: lab.distance(model, name, least) for model in MODELS}
        shown = " and ".join(f"{far[model]:.2%} for {MODEL_NAMES[model]}" for model in MODELS)
        if name == "fp8-block":
            inside = all(each < LOSS_BOUND for each in far.values())
            where = "within" if inside else "NOT within"
            yield (
                f"Without planted outliers fp8-block's loss is {where} {LOSS_BOUND:.2%} of bf16's, averaged over "
                f"the last {lab.averaged:,} of {lab.steps:,} steps: {shown}"
            )
    others = [
        f"{name} {max(lab.distance(model, name, least) for model in MODELS):.2%}"
        for name in lab.precisions
        if name != "fp8-block"
    ]
    yield f"The other recipes' losses, the worse of both models: {', '.join(others)}"


def _outliers(lab: PrecisionLab) -> Iterator[str]:
    most = lab.factors[-1]
    if len(lab.factors) == 1:
        return
    plain = {model: [lab.curve(model, PLAIN, factor).losses for factor in lab.factors] for model in MODELS}
    same = all(losses == each[0] for each in plain.values() for losses in each)
    yield (
        "Planted outliers leave bf16's losses the same to the bit: what follows is rounding's alone"
        if same
        else "Planted outliers change bf16's own losses, so that what follows isn't rounding's alone"
    )
    for model in MODELS:
        worse = {name: lab.worse(model, name, most) for name in per_tensor(lab)}
        flushed = [each.flushed for name in worse for each in lab.of_tensors(model, name, most, "input")]
        fine = lab.worse(model, "fp8-block", most)
        names = " and ".join(f"{name} {loss_text(each)}" for name, each in worse.items())
        lost = f"of inputs' values {median(flushed):.0%} become zero (median), {max(flushed):.0%} at most"
        if all(each > max(VISIBLE, fine) for each in worse.values()):
            said = "Scales of whole tensors are visibly worse"
        else:
            said = "This lab could NOT show that scales of whole tensors are worse"
        yield (
            f"{said} with outliers of {most:,.0f} in {MODEL_NAMES[model]}: {names} against bf16, fp8-block "
            f"{loss_text(fine)}; {lost}"
        )
    for factor in lab.factors[1:-1]:
        hurt = [
            f"{name} in {MODEL_NAMES[model]} ({loss_text(lab.worse(model, name, factor))})"
            for model in MODELS
            for name in lab.precisions
            if lab.worse(model, name, factor) > VISIBLE
        ]
        who = ", ".join(hurt) if hurt else "no recipe"
        yield f"With outliers of {factor:,.0f} {who} is worse by more than {VISIBLE:.0%}"


def _order(lab: PrecisionLab) -> Iterator[str]:
    most = lab.factors[-1]
    if len(lab.factors) == 1:
        return
    worst = {name: max(lab.worse(model, name, most) for model in MODELS) for name in lab.precisions}
    ranked = sorted(worst, key=lambda name: worst[name])
    shown = ", ".join(f"{name} {loss_text(worst[name])}" for name in ranked)
    yield f"From least to most hurt by outliers of {most:,.0f}, the worse of both models: {shown}"


def _sums(lab: PrecisionLab) -> Iterator[str]:
    longest = sorted({each.summed for each in lab.sums})
    for summed in longest:
        if summed != 4096 and summed != longest[-1]:
            continue
        of = [each for each in lab.sums if each.summed == summed]
        never, often, full, operands = (
            max((each for each in of if each.kept == kept), key=lambda each: each.worst)
            for kept in ("never", "128", "fp32", "operands")
        )
        hidden = "hidden" if often.worst < HIDDEN * operands.worst else "NOT hidden"
        yield (
            f"Sums of 14 bits over {summed:,} values are off by {never.worst:.2%} at worst ({never.product}); "
            f"taken out every 128 by {often.worst:.3%}, which is {hidden} by what "
            f"rounding the operands costs ({operands.worst:.1%}); in fp32 by {full.worst:.5%}"
        )
