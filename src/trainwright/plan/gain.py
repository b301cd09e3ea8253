"""What low precision buys: the plan beside the best one in bf16 on the same cluster, cause by cause.

A step's matmuls are split by whether the recipe is for them (linear layers and experts) or not (head, router), in
the proportion of their seconds on the busiest rank. Nothing is assumed of what fp8 does: both steps are predicted.
"""

import numpy as np

from trainwright.plan import rates
from trainwright.plan.answer import best_plan
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.figures import kinds_of
from trainwright.plan.flops import busiest
from trainwright.plan.operations import Matmul
from trainwright.plan.predict import prediction
from trainwright.plan.table import Table
from trainwright.spec.answers import Prediction
from trainwright.spec.gain import CauseGain, Gathers, LayerBytes, MatmulRate, PrecisionGain
from trainwright.spec.ledger import SECONDS_CAUSES, SecondsCause
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run

LOW, PLAIN = "matmuls of linear layers and experts", "matmuls of head and router"

FIRST = 8
"""Shapes of matmuls that are told, those that take most."""


def gain(question: Question, plan: Prediction) -> PrecisionGain:
    """What `plan`, the answer to a question of low precision, has over the best one without: in bf16, or in fp32
    on a device that has no bf16."""
    without = best_plan(question.changed(recipe=_plain(question.recipe, question)))
    low = _evaluation(question, plan, plan.recipe)
    alike = _evaluation(question, plan, _plain(plan.recipe, question))
    same = prediction(alike, 0, question.tokens)
    is_same = without is not None and (without.layout, without.recipe) == (same.layout, same.recipe)
    return PrecisionGain(
        plan=plan,
        without=without,
        alike=None if is_same else same,
        peak_ratio=plan.peak_flops_per_s / same.peak_flops_per_s,
        low_flops_share=_flops_share(low, plan),
        causes=() if without is None else _causes(question, plan, low, without),
        matmuls=_matmuls(low, alike),
        layer=_layer(low, alike),
        gathers=_gathers(question, plan, low),
        usd_per_device_hour=question.cluster.usd_per_device_hour,
    )


def _plain(recipe: Recipe, question: Question) -> Recipe:
    return recipe.changed(
        precision="fp32" if question.cluster.peak("bf16") is None else "bf16",
        emulate_precision=False,
        gather_fp8=False,
        dispatch_fp8=False,
        activations_fp8=False,
    )


def _evaluation(question: Question, plan: Prediction, recipe: Recipe) -> Evaluation:
    run = Run(layout=plan.layout, recipe=recipe, model=question.model, cluster=question.cluster)
    return Evaluation(Table.of_run(run))


def _of_busiest(evaluation: Evaluation) -> list[tuple[Matmul, float, float]]:
    """Matmuls of the busiest rank's step with their seconds and FLOPs, forward and both of backward."""
    parts, counts = evaluation.parts, busiest(evaluation, 0)
    split = len(kinds_of(parts.table))
    counts = counts[split:] + np.concatenate([counts[:split], np.zeros(len(counts) - 2 * split)])
    found = []
    for piece, count in zip(parts.pieces, counts.tolist(), strict=True):
        matmuls = [each for each in piece.operations if isinstance(each, Matmul)]
        for each, seconds in zip(matmuls, rates.matmuls_s(parts.table, matmuls), strict=True):
            found.append((each, 3 * count * float(seconds.max()), 3 * count * float(each.forward_flops.max())))
    return found


def _flops_share(evaluation: Evaluation, plan: Prediction) -> float:
    low = sum(flops for each, _, flops in _of_busiest(evaluation) if each.in_low_precision)
    return low / sum(kind.busiest_flops for kind in plan.computed.values())


def _causes(question: Question, plan: Prediction, low: Evaluation, plain: Prediction) -> tuple[CauseGain, ...]:
    """Every cause that either step has, matmuls in two."""
    before, after = plain.ledger.seconds, plan.ledger.seconds
    shares = [_low_share(_evaluation(question, plain, plain.recipe)), _low_share(low)]
    matmul_s = [each.get("matmul", 0.0) for each in (before, after)]
    of_low = [seconds * share for seconds, share in zip(matmul_s, shares, strict=True)]
    rows = [
        CauseGain(cause=LOW, plain_s=of_low[0], low_s=of_low[1]),
        CauseGain(cause=PLAIN, plain_s=matmul_s[0] - of_low[0], low_s=matmul_s[1] - of_low[1]),
    ]
    others: list[SecondsCause] = [cause for cause in SECONDS_CAUSES if cause != "matmul"]
    rows += [
        CauseGain(cause=cause, plain_s=before.get(cause, 0.0), low_s=after.get(cause, 0.0)) for cause in others
    ]
    return tuple(each for each in rows if each.plain_s or each.low_s)


def _low_share(evaluation: Evaluation) -> float:
    """Of the seconds of matmuls, that of those that low precisions are for."""
    found = _of_busiest(evaluation)
    return sum(seconds for each, seconds, _ in found if each.in_low_precision) / sum(each[1] for each in found)


def _matmuls(low: Evaluation, alike: Evaluation) -> tuple[MatmulRate, ...]:
    """Those that take most, each name once."""
    found, total = {}, sum(seconds for _, seconds, _ in _of_busiest(low))
    for (each, seconds, flops), (_, plain_s, _) in zip(_of_busiest(low), _of_busiest(alike), strict=True):
        if each.in_low_precision and seconds:
            key = (each.name, *(float(np.max(size)) for size in (each.m, each.k, each.n, _groups(each))))
            known = found.get(key, (0.0, 0.0, 0.0))
            found[key] = (known[0] + seconds, known[1] + plain_s, known[2] + flops)
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:FIRST]
    return tuple(
        MatmulRate(
            name=name,
            m=m,
            k=k,
            n=n,
            groups=groups,
            share=seconds / total,
            plain_flops_per_s=flops / plain_s,
            low_flops_per_s=flops / seconds,
        )
        for (name, m, k, n, groups), (seconds, plain_s, flops) in ranked
    )


def _groups(each: Matmul) -> float:
    return 1.0 if each.groups is None else float(np.max(each.groups))


def _layer(low: Evaluation, alike: Evaluation) -> LayerBytes:
    """Of the kind of layer that there are most of."""
    counts = low.table.model.layer_counts()
    most = max(range(len(counts)), key=lambda at: list(counts.values())[at])
    kept = [float(each.parts.pieces[most].saved_bytes.max()) for each in (alike, low)]
    return LayerBytes(plain_bytes=kept[0], low_bytes=kept[1])


def _gathers(question: Question, plan: Prediction, low: Evaluation) -> Gathers | None:
    recipe, layout = plan.recipe, plan.layout
    if recipe.gather_fp8 or not recipe.zero or layout.dp * layout.cp == recipe.dp_replicate:
        return None
    low_precision = recipe.low_precision
    if low_precision is None or low_precision.format != "fp8" or not low_precision.has_one_cast_of_weights:
        return None  # What `train` gathers so.
    cast = _evaluation(question, plan, recipe.changed(gather_fp8=True))
    params, low_params = low.rank_params(0)
    plain_bytes = params * recipe.compute_bytes
    low_bytes = plain_bytes - low_params * (recipe.compute_bytes - recipe.code_bytes)
    return Gathers(plain_bytes=plain_bytes, low_bytes=low_bytes, step_s=cast.step_s(0))
