"""Any layout loads any checkpoint: `test_checkpoint_layouts.py` starts this on 1, 2 and 4 ranks, first to save and
then to load.

    checkpoint_cases.py save|load|load-all WORLD DIRECTORY

Saving, each layout of the world takes two steps, commits, writes the whole state down as DTensor puts it together,
and takes two steps more, whose losses it writes. Loading, each layout takes its own commit and one of another (of
all cases, the plain one's too), holds the whole state against what was written down, and takes the two steps.
"""

import gc
import json
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example import example_run
from parity_cases import uneven
from parity_moe import case
from parity_together import DEEPSEEK_V3, with_recipe
from torch.distributed.tensor import DTensor

from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.run import Run
from trainwright.train.checkpoint.identity import mark_of
from trainwright.train.checkpoint.keeper import Keeper, Position
from trainwright.train.clock import Clock
from trainwright.train.faults.attendant import Attendant
from trainwright.train.loop import batch_of
from trainwright.train.mesh import build_mesh, leave
from trainwright.train.model.experts import mixtures
from trainwright.train.model.initialize import global_name
from trainwright.train.moments import MOMENT_FORMATS
from trainwright.train.parallelize import Trainer, parallelize
from trainwright.train.updates import Updates
from trainwright.train.verify.subject import random_tokens

BEFORE, AFTER = 2, 2
"""Steps."""
INTERLEAVED = {"schedule": "interleaved_1f1b"}
DENSE: dict[str, Any] = {"model": {**uneven(5), "tied_embeddings": True}}
UNEVEN_EXPERTS = case({"num_experts": 6, "d_ff": 15, "bias": True})
MUON: dict[str, Any] = {"model": uneven(3), "recipe": {"optimizer": {"name": "muon", "lr": 0.01}}}
BF16: dict[str, Any] = {"recipe": {"precision": "bf16"}, "model": uneven(3)}
FP8: dict[str, Any] = {"recipe": {"precision": "fp8-delayed", "emulate_precision": True}, "model": uneven(3)}


def moments(kind: str) -> dict[str, Any]:
    recipe = {"precision": "bf16", "optimizer": {"moments": kind, "lr": 0.01, "beta2": 0.95}}
    return {"model": uneven(3), "recipe": recipe}


Layouts = dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]]
"""By world size: name, degrees, and changes to the recipe."""

FAMILIES: dict[str, tuple[dict[str, Any], Layouts]] = {
    "dense": (
        DENSE,
        {
            1: [("one", {}, {})],
            2: [
                ("dp zero 0", {"dp": 2}, {}),
                ("dp zero 1", {"dp": 2}, {"zero": 1}),
                ("tp", {"tp": 2}, {}),
                ("pp interleaved", {"pp": 2, "vpp": 2}, INTERLEAVED),
                ("pp chosen stages", {"pp": 2, "stage_layers": [0, 5]}, {}),
                ("cp zero 3", {"cp": 2}, {"zero": 3}),
                ("zb_v", {"pp": 2, "vpp": 2}, {"schedule": "zb_v"}),
            ],
            4: [
                ("tp x dp zero 3", {"tp": 2, "dp": 2}, {"zero": 3}),
                ("tp", {"tp": 4}, {}),
                ("hsdp zero 2", {"dp": 4}, {"zero": 2, "dp_replicate": 2}),
                ("pp x dp zero 1", {"pp": 2, "vpp": 2, "dp": 2}, {"zero": 1, **INTERLEAVED}),
                ("cp x tp", {"cp": 2, "tp": 2}, {"zero": 2}),
                ("dualpipe x dp", {"pp": 2, "vpp": 2, "dp": 2}, {"schedule": "dualpipe", "zero": 1}),
                ("dualpipe_v x tp", {"pp": 2, "vpp": 2, "tp": 2}, {"schedule": "dualpipe_v"}),
                ("dp inside pp", {"pp": 2, "dp": 2, "order": "tp-cp-dp-pp"}, {"zero": 3}),
            ],
        },
    ),
    "deepseek": (
        DEEPSEEK_V3,
        {
            1: [("one", {}, {})],
            2: [
                ("ep zero 1", {"dp": 2, "ep": 2}, {"zero": 1}),
                ("tp, etp", {"tp": 2, "etp": 2}, {}),
                ("pp", {"pp": 2}, {}),
            ],
            4: [
                ("ep x edp zero 3", {"dp": 4, "ep": 2}, {"zero": 3}),
                ("tp x dp, ep of both", {"tp": 2, "dp": 2, "ep": 4}, {"zero": 1}),
                ("pp x tp, zb_v", {"pp": 2, "vpp": 2, "tp": 2}, {"schedule": "zb_v"}),
                ("ep x hsdp", {"dp": 4, "ep": 2}, {"zero": 2, "dp_replicate": 2}),
            ],
        },
    ),
    "uneven experts": (
        UNEVEN_EXPERTS,
        {
            1: [("one", {}, {})],
            2: [("dp zero 3", {"dp": 2}, {"zero": 3})],
            4: [("ep x edp zero 3", {"dp": 4, "ep": 2}, {"zero": 3}), ("dp zero 2", {"dp": 4}, {"zero": 2})],
        },
    ),
    "muon": (
        MUON,
        {
            1: [("one", {}, {})],
            2: [("tp", {"tp": 2}, {}), ("dp zero 1", {"dp": 2}, {"zero": 1})],
            4: [("tp x dp zero 3", {"tp": 2, "dp": 2}, {"zero": 3})],
        },
    ),
    "bf16": (
        BF16,
        {
            1: [("one", {}, {})],
            2: [("dp zero 1", {"dp": 2}, {"zero": 1})],
            4: [("tp x pp", {"tp": 2, "pp": 2}, {})],
        },
    ),
    "fp8 histories": (
        FP8,
        {
            1: [("one", {}, {})],
            2: [
                ("dp zero 1", {"dp": 2}, {"zero": 1}),
                ("dp zero 3, gathered in fp8", {"dp": 2}, {"zero": 3, "gather_fp8": True}),
                ("tp", {"tp": 2}, {}),
                ("pp", {"pp": 2}, {}),
            ],
        },
    ),
    "moments in bf16": (moments("bf16"), {1: [("one", {}, {})], 2: [("dp zero 1", {"dp": 2}, {"zero": 1})]}),
    "moments in int8": (
        moments("int8"),
        {1: [("one", {}, {})], 2: [("dp zero 1", {"dp": 2}, {"zero": 1}), ("tp", {"tp": 2}, {})]},
    ),
}
EXACT = ("dense", "deepseek", "uneven experts", "muon")
"""In float64, so that another layout's losses are those to 1e-12."""
IN_ONE, GLOBAL_BATCH = ("dense", "muon"), 8
"""Families whose steps take all of a rank's samples at once, where no pipeline wants them in parts: no choice of
experts depends on it."""


def layouts_of(family: str) -> list[tuple[int, str]]:
    return [(world, name) for world, each in FAMILIES[family][1].items() for name, _, _ in each]


def sources_of(family: str, world: int, name: str, *, all_cases: bool) -> list[tuple[int, str]]:
    """Whose commits a layout loads: its own, and another's, so that each is loaded by some; of all cases the plain
    one's too."""
    everyone = layouts_of(family)
    at, further = everyone.index((world, name)), 3 if len(everyone) > 3 else 1
    places = (0, -at, further) if all_cases else (0, further)
    return list(dict.fromkeys(everyone[(at + step) % len(everyone)] for step in places))


def run_of(family: str, world: int, name: str) -> Run:
    fields, layouts = FAMILIES[family]
    degrees, recipe = next((degrees, recipe) for title, degrees, recipe in layouts[world] if title == name)
    if family in IN_ONE and "pp" not in degrees:
        recipe = {**recipe, "micro_batch": GLOBAL_BATCH // degrees.get("dp", 1)}
    return example_run(**with_recipe({**fields, **degrees}, **recipe)).check()


def folder(directory: Path, family: str, world: int, name: str) -> Path:
    return directory / family / f"{world} {name}"


MADE: dict[Any, Any] = {}


def trainer_of(run: Run, rank: int) -> Trainer:
    cpu, timeout = torch.device("cpu"), timedelta(seconds=120)
    return parallelize(run, build_mesh(run.layout, rank, cpu, run.recipe.dp_replicate, timeout, MADE), Clock())


def keeper_of(trainer: Trainer, root: Path) -> Keeper:
    policy = Checkpointing(every_steps=BEFORE, asynchronous=False)
    data = random_tokens(trainer.run, BEFORE + AFTER)
    attendant = Attendant(trainer, None, print)
    return Keeper(trainer, root, policy, mark_of(data.shards), BEFORE + AFTER, lambda text: None, attendant)


def losses(trainer: Trainer, start: int, stop: int) -> list[float]:
    data = random_tokens(trainer.run, BEFORE + AFTER)
    dp_rank = trainer.mesh.coordinate.dp
    return [trainer.step(batch_of(trainer.run, data, step, dp_rank), 0.01).loss for step in range(start, stop)]


def whole_state(trainer: Trainer, rank: int) -> dict[str, torch.Tensor]:
    """Every tensor of the state on the first rank, put together by DTensor and not by what is tested."""
    mine = {name: tensor.clone() for name, tensor in _whole(trainer)}
    everyone: list[Any] = [mine]
    if trainer.mesh.layout.world > 1:
        everyone = [None] * trainer.mesh.layout.world if rank == 0 else []
        dist.gather_object(mine, everyone or None)
    merged: dict[str, torch.Tensor] = {}
    for each in everyone:
        for name, tensor in each.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return merged


def _whole(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in trainer.data_parallel.parameters():
        name = global_name(trainer.run.model, name)
        yield name, _full(parameter.detach())
        state = trainer.optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                yield f"{name}:{key}", _full(state[key])
        if not isinstance(trainer.optimizer, Updates):
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for key in ("first", "second"):
            if key in state:
                kept = tuple(state[each] for each in (key, f"{key}_scale") if each in state)
                form = MOMENT_FORMATS[trainer.run.recipe.optimizer.moments]
                values = form.unpack(kept, local.dtype, key == "first").view(local.shape)
                if isinstance(parameter, DTensor):
                    shape = {"shape": parameter.shape, "stride": parameter.stride()}
                    values = DTensor.from_local(
                        values, parameter.device_mesh, parameter.placements, run_check=False, **shape
                    )
                yield f"{name}:{key}", _full(values)
    for piece in trainer.pieces:
        for name, mixture in mixtures(piece):
            if mixture.balance_bias is not None:
                yield f"{name}.balance_bias", mixture.balance_bias
    if trainer.low_precision is not None:
        for name, delayed in trainer.low_precision.delayed.items():
            yield f"{name}.amax_history", delayed.history_RH


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(directory: Path, world: int, rank: int) -> None:
    for family, (_, layouts) in FAMILIES.items():
        for name, _, _ in layouts.get(world, ()):
            trainer = trainer_of(run_of(family, world, name), rank)
            root = folder(directory, family, world, name)
            keeper = keeper_of(trainer, root)
            before = losses(trainer, 0, BEFORE)
            keeper.after_step(Position(BEFORE, BEFORE * trainer.run.recipe.global_batch), 0.1, is_last=True)
            state = whole_state(trainer, rank)
            after = losses(trainer, BEFORE, BEFORE + AFTER)
            if rank == 0:
                torch.save(state, root / "state.pt")
                (root / "losses.json").write_text(json.dumps([before, after]))
            gc.collect()


def load(directory: Path, world: int, rank: int, *, all_cases: bool = False) -> None:
    results: list[dict[str, Any]] = []
    for family, (_, layouts) in FAMILIES.items():
        for name, _, _ in layouts.get(world, ()):
            for source in sources_of(family, world, name, all_cases=all_cases):
                trainer = trainer_of(run_of(family, world, name), rank)
                for piece in trainer.pieces:
                    for parameter in piece.parameters():
                        parameter.data.zero_()
                root = folder(directory, family, *source)
                keeper = keeper_of(trainer, root)
                position = keeper.resume()
                state = whole_state(trainer, rank)
                after = losses(trainer, position.step, BEFORE + AFTER)
                if rank == 0:
                    expected = torch.load(root / "state.pt")
                    different = [each for each in expected if not torch.equal(state[each], expected[each])]
                    assert set(state) == set(expected)
                    results.append(
                        {
                            "family": family,
                            "layout": [world, name],
                            "source": list(source),
                            "step": position.step,
                            "samples": position.samples,
                            "different": different,
                            "largest": max(
                                (float((state[each] - expected[each]).abs().max()) for each in different),
                                default=0,
                            ),
                            "losses": after,
                            "expected": json.loads((root / "losses.json").read_text())[1],
                        }
                    )
                gc.collect()
    if rank == 0:
        (directory / f"loaded-{world}.json").write_text(json.dumps(results))


def main(what: str, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    rank = 0
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        rank = dist.get_rank()
    try:
        bodies = {"save": save, "load": load, "load-all": partial(load, all_cases=True)}
        bodies[what](directory, world, rank)
    except BaseException:
        traceback.print_exc()
        leave(1)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
