"""Reshard: a model of five uneven layers with tied embeddings takes two steps of AdamW on 1, 2, 3, 4, 6 and 8
ranks and commits; each of these worlds loads the commit of each, and the whole state, put together by DTensor's
own gathering, is held against what was saved, tensor by tensor, to the bit."""

import gc
import json
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_cases import BEFORE, DENSE, keeper_of, losses, trainer_of, whole_state
from example import example_run
from forks import on_ranks
from parity_together import with_recipe

from trainwright.spec.run import Run
from trainwright.train.checkpoint.files import digest_of
from trainwright.train.checkpoint.keeper import Position
from trainwright.train.checkpoint.state import Held
from trainwright.train.faults.replicas import bytes_of

WORLDS: dict[int, tuple[dict[str, int], dict[str, Any]]] = {
    1: ({}, {}),
    2: ({"dp": 2}, {"zero": 3}),
    3: ({"dp": 3}, {"zero": 1}),
    4: ({"tp": 2, "dp": 2}, {"zero": 2}),
    6: ({"pp": 2, "dp": 3}, {"zero": 1}),
    8: ({"pp": 2, "tp": 2, "dp": 2}, {"zero": 1}),
}
"""Degrees, and changes to the recipe."""
GLOBAL_BATCH = 24


def run_of(world: int) -> Run:
    degrees, recipe = WORLDS[world]
    changes = {"global_batch": GLOBAL_BATCH, "micro_batch": 4, **recipe}
    return example_run(**with_recipe({**DENSE, **degrees}, **changes)).check()


def digests(trainer: Any, rank: int) -> dict[str, str]:
    """Of each whole tensor of the state, on the first rank."""
    state = whole_state(trainer, rank)
    return {
        name: digest_of(bytes_of(Held(name, tuple(each.shape), (0,) * each.ndim, each)))
        for name, each in state.items()
    }


def _begin(world: int) -> None:
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def _save(home: Path, world: int, rank: int) -> None:
    _begin(world)
    trainer = trainer_of(run_of(world), rank)
    keeper = keeper_of(trainer, home / f"from-{world}")
    losses(trainer, 0, BEFORE)
    keeper.after_step(Position(BEFORE, BEFORE * GLOBAL_BATCH), 0.1, is_last=True)
    found = digests(trainer, rank)
    if rank == 0:
        (home / f"saved-{world}.json").write_text(json.dumps(found))


def _load(home: Path, world: int, sources: list[int], rank: int) -> None:
    _begin(world)
    seen = {}
    for source in sources:
        trainer = trainer_of(run_of(world), rank)
        for piece in trainer.pieces:
            for parameter in piece.parameters():
                parameter.data.zero_()
        position = keeper_of(trainer, home / f"from-{source}").resume()
        seen[source] = position.step, digests(trainer, rank)
        gc.collect()
    if rank == 0:
        (home / f"loaded-{world}.json").write_text(json.dumps(seen))


def trials(share: float, seed: int) -> Iterator[dict[str, Any]]:
    """One for each ordered pair of worlds; of a smaller share the first ones of each world."""
    sources = list(WORLDS)[: max(1, round(len(WORLDS) * share))]
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        for world in sources:
            on_ranks(world, partial(_save, home, world), home)
        for world in WORLDS:
            on_ranks(world, partial(_load, home, world, sources), home)
            loaded = json.loads((home / f"loaded-{world}.json").read_text())
            for source in sources:
                saved = json.loads((home / f"saved-{source}.json").read_text())
                step, found = loaded[str(source)]
                differing = [name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name)]
                yield {
                    "saved_by": source,
                    "loaded_by": world,
                    "tensors": len(saved),
                    "differing": len(differing),
                    "is_at_step": step == BEFORE,
                }
