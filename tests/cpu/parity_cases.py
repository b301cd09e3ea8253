"""Every parallel form that is held against the plain model, by world size; and the worker that does it.

One launch per world size runs all its cases, each with a mesh of its own over one process group. A case's result
is its worst relative error (L2) over all tensors; the test reads them from a JSON file.
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import parity_collective_matmul
import parity_compiled
import parity_context
import parity_ingredients
import parity_models
import parity_moe
import parity_overlap
import parity_pairs
import parity_precision
import parity_schedules
import parity_sequences
import parity_together
from example import example_batches, example_run, part_of, steer, with_documents

from trainwright.spec.layout import AXES
from trainwright.spec.run import Run
from trainwright.train.clock import Clock
from trainwright.train.door import require_trainable
from trainwright.train.mesh import Mesh, build_mesh, leave
from trainwright.train.parallel.local import local_of
from trainwright.train.parallelize import Trainer, parallelize
from trainwright.train.verify.compare import compared_step
from trainwright.train.verify.plain import PlainProgram

MHA, MQA = {"num_kv_heads": 4}, {"num_kv_heads": 1}
TIED = {"tied_embeddings": True}
LAYERNORM = {"norm": "layernorm"}
BIASES = {"attention": {"qkv_bias": True, "out_bias": True}, "mlp": {"bias": True}}
PLAIN_MLP = {"gated": False, "activation": "gelu_tanh"}
INTERLEAVED = {"schedule": "interleaved_1f1b"}
DP_INSIDE_PP = {"order": "tp-cp-dp-pp"}
LLAMA3_ROPE = {
    "theta": 500000.0,
    "scaling": {"kind": "llama3", "factor": 8.0, "original_max_positions": 8, "low_frequency_factor": 1.0},
}


def uneven(layers: int) -> dict[str, Any]:
    layer = {
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "d_head": 8},
        "mlp": {"kind": "dense", "d_ff": 48},
    }
    return {"layer_groups": [{"repeat": layers, "pattern": [layer]}]}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "plain": {},
        "micro-batch of 4": {"recipe": {"micro_batch": 4}},
        "gpipe of one": {"recipe": {"schedule": "gpipe"}},
        "mha": {"attention": MHA},
        "mqa": {"attention": MQA},
        "tied": {"model": TIED},
        "layernorm": {"model": LAYERNORM},
        "layernorm without bias": {"model": {"norm": "layernorm_no_bias"}},
        "biases": BIASES,
        "plain mlp": {"mlp": PLAIN_MLP},
        "sliding window": {"attention": {"sliding_window": 5}},
        "query and key norm": {"attention": {"qk_norm": "per_head"}},
        "query scale": {"attention": {"query_scale": 0.2}},
        "partial rotary": {"model": {"rope": {"fraction": 0.5}}},
        "llama3 rotary": {"model": {"rope": LLAMA3_ROPE}},
        "no rotary": {"model": {"rope": None}},
        "selective recompute": {"recipe": {"recompute": "selective"}},
        "full recompute": {"recipe": {"recompute": "full"}},
        "zero 3 of one": {"recipe": {"zero": 3}},
        "ignored targets": {"ignored": True},
        "no clipping": {"recipe": {"grad_clip": 0.0}},
    },
    2: {
        **{f"dp zero {zero}": {"dp": 2, "recipe": {"zero": zero}} for zero in range(4)},
        "dp zero 0 without overlap": {"dp": 2, "recipe": {"overlap": {"dp": False}}},
        "dp ignored targets": {"dp": 2, "recipe": {"zero": 1}, "ignored": True},
        "dp zero 0 ignored targets": {"dp": 2, "ignored": True},
        "dp zero 3 tied": {"dp": 2, "recipe": {"zero": 3}, "model": TIED},
        "dp zero 2 full recompute": {"dp": 2, "recipe": {"zero": 2, "recompute": "full"}},
        "dp zero 3 full recompute": {"dp": 2, "recipe": {"zero": 3, "recompute": "full"}},
        "dp zero 3 gathered once": {"dp": 2, "recipe": {"zero": 3, "reshard_after_forward": False}},
        "hsdp of two replicas": {"dp": 2, "recipe": {"zero": 1, "dp_replicate": 2}},
        "tp": {"tp": 2},
        "tp without sequence parallelism": {"tp": 2, "recipe": {"sequence_parallel": False}},
        "tp mqa": {"tp": 2, "attention": MQA},
        "tp tied": {"tp": 2, "model": TIED},
        "tp layernorm and biases": {"tp": 2, "model": LAYERNORM, **BIASES},
        "tp biases without sequence parallelism": {
            "tp": 2,
            "model": LAYERNORM,
            "recipe": {"sequence_parallel": False},
            **BIASES,
        },
        "tp plain mlp": {"tp": 2, "mlp": PLAIN_MLP},
        "tp query and key norm": {"tp": 2, "attention": {"qk_norm": "per_head"}},
        "tp sliding window": {"tp": 2, "attention": {"sliding_window": 5}},
        "tp selective recompute": {"tp": 2, "recipe": {"recompute": "selective"}},
        "tp full recompute": {"tp": 2, "recipe": {"recompute": "full"}},
        "tp full recompute of one layer": {"tp": 2, "recipe": {"recompute": "full", "recompute_layers": 1}},
        "tp ignored targets": {"tp": 2, "ignored": True},
        "pp 1f1b": {"pp": 2},
        "pp gpipe": {"pp": 2, "recipe": {"schedule": "gpipe"}},
        "pp interleaved": {"pp": 2, "vpp": 2, "recipe": INTERLEAVED},
        "pp without overlap": {"pp": 2, "recipe": {"overlap": {"pp": False}}},
        "pp uneven stages": {"pp": 2, "model": uneven(5)},
        "pp chosen stages": {"pp": 2, "stage_layers": [1, 3]},
        "pp all layers on the last stage": {"pp": 2, "stage_layers": [0, 4], "model": TIED},
        "pp interleaved empty ends": {"pp": 2, "vpp": 2, "recipe": INTERLEAVED, "model": uneven(2)},
        "pp breadth first": {"pp": 2, "vpp": 2, "recipe": {"schedule": "breadth_first"}},
        "pp tied": {"pp": 2, "model": TIED},
        "pp interleaved tied": {"pp": 2, "vpp": 2, "recipe": INTERLEAVED, "model": TIED},
        "pp full recompute": {"pp": 2, "recipe": {"recompute": "full"}},
        "pp fewer microbatches than stages": {"pp": 2, "recipe": {"micro_batch": 8}},
    },
    4: {
        **{f"dp zero {zero}": {"dp": 4, "recipe": {"zero": zero}} for zero in range(4)},
        **{f"hsdp zero {zero}": {"dp": 4, "recipe": {"zero": zero, "dp_replicate": 2}} for zero in (1, 2, 3)},
        "tp": {"tp": 4, "attention": MHA},
        "tp gqa, two key heads on four ranks": {"tp": 4},
        "tp mqa": {"tp": 4, "attention": MQA},
        "tp mqa with key norm and biases": {
            "tp": 4,
            "attention": {**MQA, "qk_norm": "per_head", "qkv_bias": True},
        },
        **{f"tp x dp zero {zero}": {"tp": 2, "dp": 2, "recipe": {"zero": zero}} for zero in range(4)},
        "tp x dp zero 1 tied": {"tp": 2, "dp": 2, "recipe": {"zero": 1}, "model": TIED},
        "tp x dp zero 3 full recompute": {"tp": 2, "dp": 2, "recipe": {"zero": 3, "recompute": "full"}},
        "tp x dp without sequence parallelism": {
            "tp": 2,
            "dp": 2,
            "recipe": {"zero": 1, "sequence_parallel": False},
            "model": LAYERNORM,
            **BIASES,
        },
        "tp x pp": {"tp": 2, "pp": 2},
        "tp x pp tied": {"tp": 2, "pp": 2, "model": TIED},
        "tp x pp interleaved": {"tp": 2, "pp": 2, "vpp": 2, "recipe": INTERLEAVED},
        "tp x pp without sequence parallelism": {"tp": 2, "pp": 2, "recipe": {"sequence_parallel": False}},
        **{f"dp x pp zero {zero}": {"dp": 2, "pp": 2, "recipe": {"zero": zero}} for zero in range(4)},
        **{
            f"dp x pp interleaved zero {zero}": {
                "dp": 2,
                "pp": 2,
                "vpp": 2,
                "recipe": {"zero": zero, **INTERLEAVED},
            }
            for zero in (0, 1, 2, 3)
        },
        "dp x pp tied zero 1": {"dp": 2, "pp": 2, "recipe": {"zero": 1}, "model": TIED},
        "dp x pp tied ignored targets": {"dp": 2, "pp": 2, "model": TIED, "ignored": True},
        "pp 1f1b": {"pp": 4},
        "pp uneven stages": {"pp": 4, "model": uneven(6)},
        "pp gpipe uneven stages": {"pp": 4, "model": uneven(7), "recipe": {"schedule": "gpipe"}},
        "pp empty ends tied": {"pp": 4, "stage_layers": [0, 3, 1, 0], "model": TIED},
        "tp x pp empty ends": {"tp": 2, "pp": 2, "vpp": 2, "recipe": INTERLEAVED, "model": uneven(2)},
        "tp x pp all layers on the first stage, full recompute": {
            "tp": 2,
            "pp": 2,
            "stage_layers": [4, 0],
            "recipe": {"recompute": "full"},
        },
        **{
            f"dp inside pp zero {zero}": {"dp": 2, "pp": 2, **DP_INSIDE_PP, "recipe": {"zero": zero}}
            for zero in range(4)
        },
        **{
            f"dp x pp empty ends zero {zero}": {
                "dp": 2,
                "pp": 2,
                "vpp": 2,
                "recipe": {"zero": zero, **INTERLEAVED},
                "model": uneven(2),
            }
            for zero in range(4)
        },
        **{
            f"dp x pp chosen stages zero {zero}": {
                "dp": 2,
                "pp": 2,
                "vpp": 2,
                "stage_layers": [0, 1, 2, 1],
                "recipe": {"zero": zero, **INTERLEAVED},
            }
            for zero in range(4)
        },
        "dp x pp interleaved zero 2 full recompute, ignored targets": {
            "dp": 2,
            "pp": 2,
            "vpp": 2,
            "recipe": {"zero": 2, "recompute": "full", **INTERLEAVED},
            "ignored": True,
        },
        "dp x pp interleaved zero 3 gathered once": {
            "dp": 2,
            "pp": 2,
            "vpp": 2,
            "recipe": {"zero": 3, "reshard_after_forward": False, **INTERLEAVED},
        },
        "dp x pp breadth first zero 2": {
            "dp": 2,
            "pp": 2,
            "vpp": 2,
            "recipe": {"zero": 2, "schedule": "breadth_first"},
        },
    },
    8: {
        **{
            f"tp x pp x dp zero {zero}": {"tp": 2, "pp": 2, "dp": 2, "recipe": {"zero": zero}}
            for zero in (0, 1, 2, 3)
        },
        "tp x pp x dp interleaved tied": {
            "tp": 2,
            "pp": 2,
            "vpp": 2,
            "dp": 2,
            "recipe": {"zero": 1, **INTERLEAVED},
            "model": TIED,
        },
        "tp x pp x dp full recompute": {"tp": 2, "pp": 2, "dp": 2, "recipe": {"zero": 3, "recompute": "full"}},
        "tp x hsdp": {"tp": 2, "dp": 4, "recipe": {"zero": 3, "dp_replicate": 2}},
        "pp x hsdp": {"pp": 2, "dp": 4, "recipe": {"zero": 2, "dp_replicate": 2}},
        "pp x hsdp interleaved": {
            "pp": 2,
            "vpp": 2,
            "dp": 4,
            "recipe": {"zero": 2, "dp_replicate": 2, **INTERLEAVED, "global_batch": 16},
        },
        **{
            f"tp x pp x dp, dp inside pp, zero {zero}": {
                "tp": 2,
                "pp": 2,
                "dp": 2,
                **DP_INSIDE_PP,
                "recipe": {"zero": zero},
            }
            for zero in (0, 1, 2, 3)
        },
        "pp x hsdp, dp inside pp": {"pp": 2, "dp": 4, **DP_INSIDE_PP, "recipe": {"zero": 3, "dp_replicate": 2}},
        **{
            f"tp x pp x dp empty ends, dp inside pp, zero {zero}": {
                "tp": 2,
                "pp": 2,
                "vpp": 2,
                "dp": 2,
                **DP_INSIDE_PP,
                "recipe": {"zero": zero, **INTERLEAVED},
                "model": {**uneven(2), **TIED},
            }
            for zero in (0, 1, 2, 3)
        },
        "tp x pp x dp chosen stages": {
            "tp": 2,
            "pp": 2,
            "vpp": 2,
            "dp": 2,
            "stage_layers": [1, 2, 1, 0],
            "recipe": {"zero": 2, **INTERLEAVED},
        },
    },
}

TOPICS = {
    "schedules": parity_schedules.CASES,
    "context": parity_context.CASES,
    "models": parity_models.CASES,
    "ingredients": parity_ingredients.CASES,
    "experts": parity_moe.CASES,
    "sequences": parity_sequences.CASES,
    "overlap": parity_overlap.CASES,
    "beside matmuls": parity_collective_matmul.CASES,
    "pairs": parity_pairs.CASES,
    "together": parity_together.CASES,
    "compiled": parity_compiled.CASES,
    "precision": parity_precision.CASES,
    "cut": parity_precision.CUT,
}
for _topic, _cases in TOPICS.items():
    for _world, _more in _cases.items():
        CASES.setdefault(_world, {}).update({f"{_topic}: {name}": fields for name, fields in _more.items()})


ALIKE: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    world: {f"alike: {name}": each for name, each in cases.items()}
    for world, cases in parity_precision.ALIKE.items()
}
"""Runs that step like those with another recipe, to the bit."""

ONE_IN = 8
"""`make test` runs this part of the cases, and `make parity` all of them."""


def part_of_cases(world: int) -> list[str]:
    """What `make test` runs: by a checksum of the name, all that cover pairs, those that are alike to the bit, and
    the planted errors."""
    part = [name for name in CASES[world] if name.startswith("pairs:") or crc32(name.encode()) % ONE_IN == 0]
    return [*part, *ALIKE.get(world, {}), *CONTROLS.get(world, {})]


def without_dp_reduction(trainer: Trainer) -> None:
    trainer.data_parallel.reduce = lambda: None  # type: ignore[method-assign]


def without_tied_reduction(trainer: Trainer) -> None:
    trainer.tied_across_stages = lambda: []  # type: ignore[method-assign]


def clipping_by_the_local_norm(trainer: Trainer) -> None:
    object.__setattr__(trainer.mesh, "sum_over_world", lambda values: values)


# A planted error each; the comparison must see it.
CONTROLS: dict[int, dict[str, tuple[dict[str, Any], Callable[[Trainer], None]]]] = {
    2: {
        "dp without its reduction": ({"dp": 2, "recipe": {"overlap": {"dp": False}}}, without_dp_reduction),
        "pp without the tied reduction": ({"pp": 2, "model": TIED}, without_tied_reduction),
        "norm of one stage alone": ({"pp": 2}, clipping_by_the_local_norm),
        **parity_context.CONTROLS[2],
        **parity_schedules.CONTROLS,
    },
}


for topic in (parity_moe, parity_sequences):
    for world, controls in topic.CONTROLS.items():
        CONTROLS[world] = CONTROLS.get(world, {}) | controls


TIMEOUT = timedelta(seconds=240)
MADE: dict[Any, Any] = {}
"""Process groups of all cases so far: each has threads, and hundreds of them would crowd out the ranks."""


def stands_where_the_layout_says(mesh: Mesh) -> None:
    """Groups and DeviceMesh say the same of who is whose neighbour; a rank at the wrong place of an axis would go
    unnoticed in the numbers."""
    at, layout = mesh.coordinate, mesh.layout
    for axis, group in mesh.groups.items():
        if axis in AXES:
            ranks = [layout.rank(at._replace(**{axis: place})) for place in range(layout.degree(axis))]
            assert dist.get_process_group_ranks(group) == ranks, axis
    if mesh.device_mesh is not None:
        names, places = mesh.device_mesh.mesh_dim_names or (), mesh.device_mesh.get_coordinate() or ()
        coordinate = dict(zip(names, places, strict=True))
        plane = coordinate.pop("dp_replicate") * mesh.dp_shard + coordinate.pop("dp_shard")
        dp, cp = divmod(plane, layout.cp)
        assert {**coordinate, "dp": dp, "cp": cp} == at._asdict()
    if mesh.expert_mesh is not None:
        assert mesh.expert_mesh["ep"].mesh.tolist() in [list(ranks) for ranks in layout.expert_groups()]
        plane = at.tp + layout.tp * (at.cp + layout.cp * at.dp)
        names, places = mesh.expert_mesh.mesh_dim_names or (), mesh.expert_mesh.get_coordinate() or ()
        place = dict(zip(names, places, strict=True))
        edp = place["edp_replicate"] * (layout.expert_dp // mesh.dp_replicate) + place["edp_shard"]
        assert place["etp"] + layout.etp * (place["ep"] + layout.ep * edp) == plane
        assert place["pp"] == at.pp
        for axis in {"ep", "etp", "edp_shard", "edp_replicate"} & set(mesh.groups):
            assert dist.get_process_group_ranks(mesh.groups[axis]) == mesh.expert_mesh[axis].mesh.tolist(), axis


def compare(run: Run, rank: int, *, ignored: bool, spoil: Callable[[Trainer], None] | None) -> dict[str, float]:
    """Worst relative error of loss, gradients, norm and weights of this rank's part of the run."""
    mesh = build_mesh(run.layout, rank, torch.device("cpu"), run.recipe.dp_replicate, TIMEOUT, MADE)
    stands_where_the_layout_says(mesh)
    require_trainable(run.check())
    trainer = parallelize(run, mesh, Clock(), in_float64=True)
    for piece in trainer.pieces:
        steer(piece)
    if spoil is not None:
        spoil(trainer)
    sequences = example_batches(run, ignored=ignored)
    program = PlainProgram(run)
    steer(program.model)
    expected = program.step(with_documents(run, sequences), run.recipe.optimizer.lr)
    batch = part_of(run, mesh.coordinate.dp, sequences)
    errors = compared_step(trainer, batch, run.recipe.optimizer.lr, expected)
    everything: list[Any] = [set(errors.weights)]
    if mesh.layout.world > 1:
        everything = [None] * mesh.layout.world
        dist.all_gather_object(everything, set(errors.weights))
    assert set().union(*everything) == set(expected.weights), "some parameters are nowhere"
    return errors.worst()


def differing_bits(run: Run, rank: int, other: dict[str, Any]) -> dict[str, float]:
    """Of two steps of a low-precision run and of the same with another recipe: how far losses and norms are apart,
    the share of this rank's weights and moments that aren't equal, and whether what is told of layers isn't."""
    seen, told = [], []
    for each in (run, run.changed(recipe=run.recipe.changed(**other)).check()):
        mesh = build_mesh(each.layout, rank, torch.device("cpu"), each.recipe.dp_replicate, TIMEOUT, MADE)
        require_trainable(each)
        trainer = parallelize(each, mesh, Clock())
        batch = part_of(each, mesh.coordinate.dp, example_batches(each))
        assert trainer.low_precision is not None
        assert trainer.low_precision.watch(each.recipe.precision_report_steps)
        steps = [trainer.step(batch, each.recipe.optimizer.lr) for _ in range(2)]
        told.append(trainer.low_precision.report(1).layers)
        states = [state for _, state in sorted(trainer.optimizer.state_dict()["state"].items())]
        tensors = [parameter for _, parameter in trainer.data_parallel.parameters()]
        tensors += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        seen.append((steps, [local_of(tensor) for tensor in tensors]))
    (steps, tensors), (others, expected) = seen
    unequal = sum(int((a != b).sum()) for a, b in zip(tensors, expected, strict=True))
    return {
        "loss": max(abs(a.loss - b.loss) for a, b in zip(steps, others, strict=True)),
        "norm": max(abs(a.grad_norm - b.grad_norm) for a, b in zip(steps, others, strict=True)),
        "told": float(told[0] != told[1]),
        "states": unequal / sum(each.numel() for each in tensors),
        "same step": float(steps[0].loss == steps[1].loss),
    }


def main(world: int, output: Path, only: list[str]) -> None:
    """Run the cases of these names or topics; all of them where none is named, and where `part` is, a part."""
    torch.set_num_threads(1)
    rank = 0
    if world > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        rank = dist.get_rank()
    plain = CASES[world] | {name: fields for name, (fields, _) in ALIKE.get(world, {}).items()}
    jobs = {name: (fields, None) for name, fields in plain.items()} | CONTROLS.get(world, {})
    results: dict[str, Any] = {}
    if only == ["part"]:
        only = part_of_cases(world)
    for name, (fields, spoil) in jobs.items():
        if only and name not in only and name.partition(":")[0] not in only:
            continue
        fields = dict(fields)
        ignored, other = fields.pop("ignored", False), ALIKE.get(world, {}).get(name, ({}, {}))[1]
        try:
            run = example_run(**fields)
            mine: Any = (
                differing_bits(run, rank, other) if other else compare(run, rank, ignored=ignored, spoil=spoil)
            )
        except Exception:
            # The others may wait for this rank now: report and end the launch.
            results[name] = traceback.format_exc()
            output.with_suffix(f".{rank}").write_text(json.dumps(results))
            print(f"case {name!r} failed on rank {rank}\n{results[name]}", file=sys.stderr)
            leave(1)
        gathered: list[Any] = [mine]
        if world > 1:
            gathered = [None] * world
            dist.all_gather_object(gathered, mine)
        results[name] = {key: max(each.get(key, 0.0) for each in gathered) for key in mine}
        if rank == 0:
            output.write_text(json.dumps(results))
        gc.collect()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
