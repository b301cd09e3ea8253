"""Several ranks' dry runs, each in a process of its own, as PyTorch has one world in a process; and which ranks
stand for all.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

from trainwright.spec.counts import Counts
from trainwright.spec.layout import Coordinate
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.stages import layers_of_stages


def first_ranks(run: Run) -> dict[int, int]:
    """Each pipeline rank's first rank, and the rank that stands for it: the first of those that hold the same
    kinds of layers, the same ends, and so have the same counts. (Bytes over time differ: the first holds most.)"""
    layout, schedule = run.layout, SCHEDULES[run.recipe.schedule]
    placement = schedule.stages(layout.pp, layout.vpp)
    last = schedule.num_stages(layout.pp, layout.vpp) - 1
    stages = layers_of_stages(run.model.num_layers, last + 1, layout.stage_layers)
    # Stages that are held once may be neighbours on one rank: their results are handed over, not sent.
    is_once = last + 1 == layout.stages
    standing: dict[object, int] = {}
    found: dict[int, int] = {}
    for pp, own in enumerate(placement):
        rank = layout.rank(Coordinate(0, 0, pp, 0))
        content = tuple(
            (
                *(stage == 0, stage == last, is_once and stage + 1 in own, is_once and stage - 1 in own),
                tuple(run.model.layers[number] for number in stages[stage]),
            )
            for stage in own
        )
        found[rank] = standing.setdefault(content, rank)
    return found


def dry_runs(
    run: Run, ranks: list[int], passes: int | None, on_done: Callable[[int], None] = lambda rank: None
) -> dict[int, Counts]:
    """The counts of each of `ranks` of a checked, trainable run, on as many processors as there are."""
    workers = max(1, min(len(ranks), len(os.sched_getaffinity(0))))
    found: dict[int, Counts] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_one, run.plain(), rank, passes): rank for rank in ranks}
        for each in as_completed(waiting):
            found[waiting[each]] = Counts.parse(each.result())
            on_done(waiting[each])
    return {rank: found[rank] for rank in ranks}


def _one(plain: dict[str, object], rank: int, passes: int | None) -> dict[str, object]:
    import warnings

    import torch

    from trainwright.train.dryrun.record import dry_run

    # Of fake tensors' views; real processes run without PyTorch's warnings too (`launch.WORKER_ENVIRONMENT`).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")

    torch.set_num_threads(1)
    return dry_run(Run.parse(plain), rank, passes).plain()
